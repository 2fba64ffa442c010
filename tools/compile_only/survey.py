"""Resources that each kernel needs in each case, and their limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nsa import NSAConfig
from nsa.ops._triton.tuning import (
    RELATIVES,
    TABLES,
    Tile,
    TileKey,
    TileTable,
    default_tile,
    load_table,
    tiles_chosen_by,
)
from tools.compile_only.driver import SHARED_MEMORY_LIMIT, Usage, absent_gpu
from tools.compile_only.launches import DENSE, LONG, PARTS, SHORT, attend, decode

MAX_STACK_BYTES = 256  # bytes of a thread
FP8_ARCH = 89  # the first with fp8 products; the library refuses them on others
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

H200 = "nvidia-h200"
# Kernels that may need stack with the tiles of the H200, by function and head size of the table's
# row, and the measurement that shows that it is faster; more in docs/log.md. Those with head size
# 192 have the paper's shape (64 query heads in 4 groups, D 192, Dv 128) and 8,192 tokens, compared
# with the best tile without stack.
STACK_THAT_WINS = {
    ("range_dkv_kernel", 64): (
        "compressed, at most 168 registers, so that three programs share a multiprocessor: "
        "0.127 ms against 0.153"
    ),
    ("range_dq_kernel", 64): (
        "window, 2 stages: 0.345 ms against 0.363 with 3 and no limit; compressed, at most 96 "
        "registers: 0.408 ms of forward and backward against 0.409"
    ),
    ("range_fwd_kernel", 64): (
        "window, 2 stages: 0.315 ms against 0.336 with 3, 0.360 with 128 rows"
    ),
    ("range_dkv_kernel", 128): (
        "4 warps, 32 rows by 64 keys (window) and 64 by 64 (compressed): 10.1 and 28.1 ms of "
        "backward (wide, 65,536 tokens) against 12.4 and 36.0 with 128 rows, 15.9 and 48.7 with 8 "
        "warps"
    ),
    ("range_dkv_kernel", 112): (
        "heads that do not fill 128 columns, 64 rows by 64 keys: 2.0 and 6.68 ms of backward "
        "(window, compressed, D 80) against 2.34 and 7.58 with 128 rows"
    ),
    ("selected_gather_bwd_kernel", 64): "dK and dV alone: 0.98 ms against 1.07",
    ("selected_gather_bwd_kernel", 128): (
        "32 rows by 64 keys with a deep pipeline: 1.39 ms (dK and dV alone) and 20.1 ms (with dQ) "
        "against 1.55 and 25.8 with other tiles"
    ),
    ("selected_gather_fwd_kernel", 128): (
        "at most 128 registers, so that four programs share a multiprocessor: 14.2 ms of forward "
        "against 14.9"
    ),
    ("selected_range_dq_kernel", 64): (
        "3 stages, at most 168 registers: 0.311 ms of backward against 0.330 without a limit"
    ),
    ("selected_range_dkv_kernel", 64): (
        "3 stages, with 1 or 64 query heads per group: 0.308 ms against 0.317 with 2"
    ),
    ("select_token_max_kernel", 64): (
        "queries that stay on chip: 5.85 ms at 65,536 tokens against 6.00"
    ),
    ("select_kernel", 64): (
        "at most 168 registers, so that three programs share a multiprocessor: 1.03 ms against "
        "1.14 without a limit"
    ),
    ("select_kernel", 128): "32 blocks a step, 7.4 ms against 9.6 with 16",
    ("select_kernel", 192): "64 queries by 64 blocks, 3 stages: 0.265 ms against 0.360",
    ("range_dq_kernel", 192): (
        "64 by 32, 4 warps: compressed 4.17 ms against 4.44, window 7.06 against 7.52"
    ),
    ("range_dkv_kernel", 192): "compressed, 128 by 64: 2.68 ms against 4.65",
    ("selected_dq_kernel", 192): (
        "64 by 32, 4 warps: 17.9 ms of forward and backward against 18.9"
    ),
    ("selected_gather_bwd_kernel", 192): ("dK and dV alone, 128 by 64: 13.6 ms against 14.8"),
}

# Bytes of stack that are allowed, by architecture and function. Heads of 128: a limit on registers
# avoids the stack, but then fewer programs run at once. Decode: 8 queries in fp32, 16 heads a
# group, gated products. Projection: up to two registers, in layers with separate keys for each
# branch. Loss of an index over all blocks: 128 tokens a block, or 64 heads a group. All but the
# projection's are for GPUs that this project has not measured.
ALLOWED_STACK_BYTES = dict.fromkeys(
    [
        *((arch, f"decode_{name}_kernel") for arch in (86, 89) for name in ("scan", "merge")),
        *((120, f"{name}_kernel") for name in ("selected_delta", "decode_merge", "linear", "key")),
    ],
    8,
)
ALLOWED_STACK_BYTES |= {(arch, "heads_kernel"): 16 for arch in SHARED_MEMORY_LIMIT}
ALLOWED_STACK_BYTES |= {(120, f"index_loss_{name}_kernel"): 64 for name in ("all", "dk")}


@dataclass(frozen=True)
class Case:
    """One call of a layer's attention.

    Attributes:
        head_dim: D.
        value_dim: Dv.
        group_size: G.
        dtype: key of ``DTYPES``.
        longest: promised length of the longest sequence; None makes a dense batch.
        changes: other fields of the config that differ from the default.
        queries: queries of a sequence in a decode step; 0 for forward and backward.
        max_tokens: tokens of a sequence in the decode cache.
    """

    head_dim: int
    value_dim: int
    group_size: int
    dtype: str = "bf16"
    longest: int | None = PARTS
    changes: tuple[tuple[str, Any], ...] = ()
    queries: int = 0
    max_tokens: int = 4096

    def launch(self) -> None:
        """Launch every kernel of the case."""
        heads = {"num_heads": 2 * self.group_size, "num_kv_heads": 2}
        sizes = {"head_dim": self.head_dim, "value_dim": self.value_dim}
        config = NSAConfig(**{**heads, **sizes, **dict(self.changes)})
        if self.queries:
            decode(config, DTYPES[self.dtype], self.queries, self.max_tokens)
        else:
            attend(config, DTYPES[self.dtype], self.longest)


def usual(head_dim: int, value_dim: int, group_size: int, dtype: str = "bf16") -> list[Case]:
    """Cases with all kernels at these sizes and the default pattern."""
    case = Case(head_dim, value_dim, group_size, dtype)
    phis = [replace(case, changes=(("phi", phi),)) for phi in ("linear", "mlp")]
    return [case, replace(case, longest=LONG), *phis]


def steps(head_dim: int, value_dim: int, group_size: int, dtype: str = "bf16") -> list[Case]:
    """Decode steps: one query with few tokens, and 8 with so many that selections are merged."""
    case = Case(head_dim, value_dim, group_size, dtype, changes=(("phi", "mlp"),), queries=1)
    return [case, replace(case, queries=8, max_tokens=200_000)]


def variations() -> list[Case]:
    """Cases that differ in other settings than the sizes of heads."""
    case = Case(64, 64, 6, longest=SHORT)
    small = {"compress_block_size": 8, "compress_stride": 4, "block_size": 16, "window_size": 32}
    changes: list[dict[str, Any]] = [
        {**small, "num_selected_blocks": 4},
        {"block_size": 32},
        {"block_size": 128},
        {"num_selected_blocks": 5},
        {"num_selected_blocks": 32},
        {"num_selected_blocks": 64},
        {"num_selected_blocks_table": ((-1, 4096, 8),)},
        {"coarse_block_size": 512, "num_coarse_blocks": 8},
        {"score_precision": "fp8"},
        {"window_size": 4096},
        {"compress_rope": "start", "rotary_dim": 32},
        {"branches": ("slc", "win")},
        {"scores": "token_max"},
        {"scores": "token_max", "block_size": 16, "compress_block_size": 16},
        {"scores": "token_max", "block_size": 128, "branches": ("slc",)},
        {"scores": "token_max", "score_precision": "fp8"},
        {"scores": "random"},
        {"scores": "index"},
        {"scores": "index", "index_dim": 32, "index_heads": 4, "index_keys": "shared"},
    ]
    found = [replace(case, changes=tuple(change.items())) for change in changes]
    scattered = [replace(one, longest=LONG) for one in found[1:3]]
    one, many = steps(64, 64, 6)
    decoded = [replace(one, changes=found[i].changes) for i in (0, 10, 11)]
    decoded += [replace(many, changes=found[i].changes) for i in (2, 5, 6)]
    by_token = (("scores", "token_max"), ("branches", ("slc", "win")))
    decoded += [replace(step, changes=by_token) for step in (one, many)]
    decoded += [replace(step, changes=found[-1].changes) for step in (one, many)]
    low = ("score_precision", "fp8")
    decoded += [replace(step, changes=(*by_token, low)) for step in (one, many)]
    return [replace(case, longest=DENSE), case, *found, *scattered, *decoded]


# Architectures and cases that `make test-faults` compiles; `make test` compiles some of them.
ARCHS = (80, 90, 100)
TWO_STAGE = (("coarse_block_size", 512), ("num_coarse_blocks", 8))
BY_TOKEN = (("scores", "token_max"),)
SHARED = (("scores", "random"), ("share_kv", True))
PART = {
    sizes: [
        *usual(*sizes, 6),
        *usual(*sizes, 16),
        *(Case(*sizes, 6, changes=changes) for changes in (TWO_STAGE, BY_TOKEN)),
        Case(64, 64, 6, changes=SHARED),
        steps(*sizes, 6)[0],
        steps(*sizes, 16)[1],
    ]
    for sizes in ((64, 64), (192, 128))
}
GROUP_SIZES = {
    (64, 64): (1, 3, 4, 6, 8, 12, 16, 64),
    (128, 128): (4, 16, 64),
    (192, 128): (6, 16, 64),
}
HEAD_SIZES = ((16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256))


def whole() -> list[list[Case]]:
    """All cases in parts; cases of one part share kernels."""
    found = [
        [case for g in GROUP_SIZES.get(sizes, (6, 64)) for case in usual(*sizes, g)]
        for sizes in HEAD_SIZES
    ]
    found += [usual(*sizes, 6, "fp16") for sizes in HEAD_SIZES]
    found += [[case for g in (6, 16) for case in usual(*sizes, g, "fp32")] for sizes in HEAD_SIZES]
    found += [[case for g in (6, 16, 64) for case in steps(*sizes, g)] for sizes in HEAD_SIZES]
    found += [[case for g in (6, 16) for case in steps(*sizes, g, "fp32")] for sizes in HEAD_SIZES]
    by_token = (*BY_TOKEN, ("share_kv", True), ("branches", ("slc", "win")))
    found += [
        [
            Case(*sizes, g, dtype, SHORT, by_token)
            for dtype in ("bf16", "fp32")
            for g in GROUP_SIZES.get(sizes, (6, 64))
        ]
        for sizes in HEAD_SIZES
    ]
    return [*found, variations()]


@dataclass(frozen=True)
class Tuning:
    """Source of tiles: a committed table, then the defaults of its GPU, or only the defaults.

    Attributes:
        arch: compute capability as two or three digits.
        name: name of the table; ``defaults`` without one.
        table: None for the defaults only.
    """

    arch: int
    name: str = "defaults"
    table: TileTable | None = field(default=None, repr=False)

    def tile(self, key: TileKey, _: Tile) -> Tile:
        """Tile that a GPU of this kind looks up."""
        found = None if self.table is None else self.table.find(key)
        return found or default_tile(key, divmod(self.arch, 10))

    def head_size_of_row(self, kernel: str, size: int) -> int | None:
        """Head size of the row that a kernel uses for heads of a size; None without a row."""
        family = kernel.partition("_")[0]
        names = ("compressed", "window") if family == "range" else (family,)
        keys = [] if self.table is None else list(self.table.rows)
        rows = [key.head_size for key in keys if key.kernel.startswith(names)]
        return min((row for row in rows if row >= size), default=None)


def tunings(arch: int) -> list[Tuning]:
    """The defaults of an architecture, and its committed tables."""
    names = [name for capability, name in RELATIVES.items() if capability == divmod(arch, 10)]
    tables = [Tuning(arch, name, load_table(TABLES / f"{name}.json")) for name in names]
    return [Tuning(arch), *tables]


@dataclass(frozen=True)
class Record:
    """Resources that a kernel needs in a case.

    Attributes:
        tuning: source of its tile.
        case: the call that compiled it. Later calls of the same kernel have no record.
        usage: its resources.
    """

    tuning: Tuning
    case: Case
    usage: Usage

    def __str__(self) -> str:
        tuning, usage = self.tuning, self.usage
        return f"sm_{tuning.arch} {tuning.name}: {usage}, {self.case}"

    def fault(self, lenient: bool) -> str | None:
        """Reason why the kernel needs too much; None if it does not.

        Args:
            lenient: whether stack above head size 128 is allowed.
        """
        limit = SHARED_MEMORY_LIMIT[self.tuning.arch]
        if self.usage.shared > limit:
            return f"{self}: more than {limit} bytes of shared memory"
        if self.usage.hazards:
            return f"{self}: overwrites {', '.join(self.usage.hazards)} while a product reads it"
        size = max(self.case.head_dim, self.case.value_dim)
        if lenient and size > 128:
            return None
        kernel = self.usage.kernel
        row = (kernel, self.tuning.head_size_of_row(kernel, size))
        is_faster = self.tuning.name == H200 and row in STACK_THAT_WINS
        stack = ALLOWED_STACK_BYTES.get((self.tuning.arch, kernel), 0)
        allowed = MAX_STACK_BYTES if is_faster else stack
        return f"{self}: more than {allowed} bytes of stack" if self.usage.stack > allowed else None


def compiled(some: Iterable[Tuning], cases: Iterable[Case]) -> Iterator[Record]:
    """Compile every kernel that cases launch, each once, for tunings of one architecture."""
    some, cases = tuple(some), tuple(cases)
    with absent_gpu(some[0].arch) as usages:
        for tuning in some:
            with tiles_chosen_by(tuning.tile):
                for case in cases:
                    before = len(usages)
                    case.launch()
                    yield from (Record(tuning, case, usage) for usage in usages[before:])


def part_of_matrix(arch: int, number: int) -> list[Record]:
    """Records of one part of ``whole`` on an architecture, with each of its tunings."""
    torch.set_num_threads(1)
    fp8 = ("score_precision", "fp8")
    cases = [case for case in whole()[number] if arch >= FP8_ARCH or fp8 not in case.changes]
    return list(compiled(tunings(arch), cases))
