"""Decode steps by kernels, against full passes of the reference in fp64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa import NativeSparseAttention, NSACache, NSAConfig
from nsa.cache import LayerCache, cache
from nsa.config import BRANCHES
from nsa.ops._plan import PLANS
from nsa.ops.decode import launch
from nsa.ops.decode.layout import Splits
from nsa.testing import assert_within_budget
from tests import oracle
from tests.ops.cases import offsets, small
from tests.ops.poison import poisoned_memory

WIDTH = 24
MOST = 600
ONE_KV_HEAD = {"num_heads": 2, "num_kv_heads": 1}


def layer(config: NSAConfig, seed: int = 0) -> NativeSparseAttention:
    torch.manual_seed(seed)
    module = NativeSparseAttention(WIDTH, config).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Full:
    """A full pass over one sequence: outputs ``[T, width]``, the same in fp64, its blocks."""

    plain: Tensor
    exact: Tensor
    ids: Tensor | None

    @classmethod
    def of(cls, module: NativeSparseAttention, x: Tensor) -> Full:
        """Full pass over tokens ``[T, width]``."""
        double = NativeSparseAttention(WIDTH, module.config).double()
        double.load_state_dict(module.state_dict())
        seen = list[Tensor | None]()
        double.observer = lambda gates, ids: seen.append(ids)
        with torch.no_grad():
            exact = double(x.double())
            return cls(module(x), exact, seen[0])


@contextmanager
def kernels(**changes: Any) -> Iterator[None]:
    """Steps run on kernels, whose fresh memory is poisoned; attributes of ``launch`` change."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cache, "choose_backend", return_value="triton"))
        for plans in PLANS if changes else ():
            plans.clear()
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(launch, name, value))
        stack.enter_context(poisoned_memory())
        yield


def used_cache(
    module: NativeSparseAttention, batch_size: int, num_pages: int | None = None, layers: int = 1
) -> NSACache:
    """An empty cache whose memory holds NaN, and whose pages are not handed out in order."""
    whole = NSACache(module.config, layers, batch_size, max_tokens=MOST, num_pages=num_pages)
    some = [20 + 16 * (b % 3) for b in range(batch_size)]
    junk = torch.full((sum(some), WIDTH), torch.nan, dtype=module.q_proj.weight.dtype)
    for held in whole.layers:
        module(junk, cu_seqlens=offsets(some), cache=held)
        assert held.tensors is not None
        for x in held.tensors[:8]:
            if x is not None:
                x.fill_(torch.nan)
        held.reads = torch.zeros(batch_size * module.config.num_kv_heads, 3, dtype=torch.int64)
    for b in range(batch_size):
        whole.free(b)
    free = whole._pages._free  # handed out from the end
    assert free != sorted(free, reverse=True) or batch_size == 1
    return whole


def prefill(module: NativeSparseAttention, whole: NSACache, parts: Sequence[Tensor]) -> None:
    """Give every sequence its first tokens, by the reference."""
    if any(len(x) for x in parts):
        lengths = [len(x) for x in parts]
        module(torch.cat([*parts]), cu_seqlens=offsets(lengths), cache=whole.layers[0])


def expected_reads(config: NSAConfig, before: int, count: int, ids: Tensor | None) -> Tensor:
    """Keys that ``count`` queries behind ``before`` tokens read, ``[Hkv, 3]``.

    Those of the window and the compressed ones once, those of selected blocks once a query.
    """
    found = torch.zeros(config.num_kv_heads, 3, dtype=torch.int64)
    if config.scores_blocks:
        size, stride = config.compress_block_size, config.compress_stride
        found[:, 0] = oracle.num_compressed(before + count, size, stride)
    for i in range(count if ids is not None else 0):
        assert ids is not None
        visible = oracle.visible_slc(1, before + i + 1, ids[i : i + 1].numpy(), config.block_size)
        found[:, 1] += torch.tensor([len([*visible(0, h)]) for h in range(config.num_kv_heads)])
    if "win" in config.branches:
        found[:, 2] = min(before, config.window_size - 1) + count
    return found


@dataclasses.dataclass
class Step:
    """A step: outputs ``[B, T, width]``, selected blocks ``[B, T, Hkv, n]``, reads."""

    out: Tensor
    ids: Tensor | None
    reads: Tensor


def take_step(module: NativeSparseAttention, held: LayerCache, x: Tensor, **changes: Any) -> Step:
    """A step of tokens ``[B, T, width]`` by kernels."""
    assert held.reads is not None
    held.reads.zero_()
    with kernels(**changes):
        out = module(x, cache=held)
    assert held.tensors is not None
    assert not held.tensors.counters.any()
    ids = held.block_indices
    return Step(out, ids if ids is None else ids.unflatten(0, x.shape[:2]), held.reads.clone())


def check_steps(
    module: NativeSparseAttention,
    lengths: Sequence[int],
    steps: Sequence[int],
    *,
    poisoned: int | None = None,
    **changes: Any,
) -> list[Step]:
    """Steps of sequences with these lengths give rows, blocks and reads of full passes.

    Args:
        module: the layer.
        lengths: tokens before the steps.
        steps: tokens of each sequence in each step.
        poisoned: a sequence of NaN, which is not looked at.
        changes: attributes of ``launch``.
    """
    config, dtype = module.config, module.q_proj.weight.dtype
    xs = [tokens(n + sum(steps), seed=b).to(dtype) for b, n in enumerate(lengths)]
    full = [Full.of(module, x) for x in xs]
    if poisoned is not None:
        xs[poisoned].fill_(torch.nan)
    whole = used_cache(module, len(xs))
    prefill(module, whole, [x[:n] for x, n in zip(xs, lengths, strict=True)])
    taken, found = [], [list[Tensor]() for _ in xs]
    for count in steps:
        before = whole.lengths
        batch = torch.stack([x[n : n + count] for x, n in zip(xs, before, strict=True)])
        step = take_step(module, whole.layers[0], batch, **changes)
        taken.append(step)
        for b, n in enumerate(before):
            if b == poisoned:
                assert bool(step.out[b].isnan().all())
                continue
            found[b].append(step.out[b])
            ids, expected = None if step.ids is None else step.ids[b], full[b].ids
            assert (ids is None) == (expected is None)
            if ids is not None and expected is not None:
                assert torch.equal(ids, expected[n : n + count])
            reads = step.reads.unflatten(0, (len(xs), -1))[b]
            assert torch.equal(reads, expected_reads(config, n, count, ids))
    seen = [b for b in range(len(xs)) if b != poisoned]
    plain, exact = (
        torch.cat([getattr(full[b], name)[lengths[b] :] for b in seen])
        for name in ("plain", "exact")
    )
    out = torch.cat([y for b in seen for y in found[b]])
    assert_within_budget(out, plain, exact, "decode", 4.0 if dtype == torch.float32 else 2.0)
    return taken


# ------------------------------------------------------------------------------
# what a full pass gives

SUBSETS = [tuple(c) for size in (1, 2) for c in itertools.combinations(BRANCHES, size)]

# Changes of the small pattern, lengths before the steps, tokens of each step.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "usual, from nothing": ({"num_heads": 6}, (0,), (1, 5, 1, 1, 1, 8)),
    "usual, at edges": ({}, (7, 15, 131), (1, 2)),
    "linear, G 3": (
        {"num_heads": 3, "num_kv_heads": 1, "phi": "linear", "compress_rope": "start"},
        (3, 63, 100),
        (1, 4),
    ),
    "mlp, G 1": (
        {"num_heads": 2, "phi": "mlp", "compress_hidden_size": 3, "rotary_dim": 8},
        (14, 121),
        (8,),
    ),
    "mlp, wide, G 6": (
        {
            "num_heads": 6,
            "num_kv_heads": 1,
            "head_dim": 48,
            "value_dim": 80,
            "phi": "mlp",
            "compress_rope": "none",
        },
        (5, 90),
        (3,),
    ),
    "linear, rotary": (
        {**ONE_KV_HEAD, "head_dim": 80, "value_dim": 16, "phi": "linear", "rotary_dim": 24},
        (106,),
        (8,),
    ),
    **{
        "+".join(branches): (
            {**ONE_KV_HEAD, "branches": branches, "phi": ("linear", "mlp")[len(branches) - 1]},
            (6, 70),
            (2,),
        )
        for branches in SUBSETS
    },
    "shared, none": ({**ONE_KV_HEAD, "share_kv": True, "compress_rope": "none"}, (9, 99), (2,)),
    "l = d, l' = d": (
        {**ONE_KV_HEAD, "compress_block_size": 16, "compress_stride": 16},
        (15, 110),
        (2, 1),
    ),
    "l = d": ({**ONE_KV_HEAD, "compress_block_size": 4}, (2, 109), (6,)),
    "l = 3 d": ({**ONE_KV_HEAD, "compress_block_size": 12, "phi": "linear"}, (10, 110), (3,)),
    "l = l'": ({**ONE_KV_HEAD, "compress_block_size": 16}, (14, 124), (3,)),
    "l' = 64": (
        {
            **ONE_KV_HEAD,
            "compress_block_size": 32,
            "compress_stride": 16,
            "block_size": 64,
            "num_selected_blocks": 3,
        },
        (30, 62, 318),
        (3,),
    ),
    "table": (
        {
            **ONE_KV_HEAD,
            "num_selected_blocks": 5,
            "num_selected_blocks_table": ((-1, 104, 3), (-1, 107, 4)),
        },
        (40, 102),
        (8,),
    ),
    "all blocks": ({**ONE_KV_HEAD, "num_selected_blocks": 30}, (3, 99), (2,)),
    "no first blocks": (
        {**ONE_KV_HEAD, "num_init_blocks": 0, "num_local_blocks": 1, "num_selected_blocks": 2},
        (31, 143),
        (3,),
    ),
    "many forced blocks": (
        {**ONE_KV_HEAD, "num_init_blocks": 2, "num_local_blocks": 3, "num_selected_blocks": 6},
        (60, 143),
        (3,),
    ),
    "window 1": ({**ONE_KV_HEAD, "window_size": 1}, (0, 40), (3, 1)),
    "window 7": ({**ONE_KV_HEAD, "window_size": 7}, (3, 40), (8, 1)),
    "window of all": ({**ONE_KV_HEAD, "window_size": 1000}, (3, 100), (3,)),
    "G 20": ({"num_heads": 20, "num_kv_heads": 1, "num_selected_blocks": 3}, (70,), (2,)),
    "gates": ({**ONE_KV_HEAD, "gate": "softmax", "gate_hidden_size": 4}, (70,), (1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_rows_of_a_full_pass(name):
    changes, lengths, steps = CASES[name]
    check_steps(layer(small(**changes)), lengths, steps)


def test_fp16():
    """All blocks are selected, so that rounding decides nothing. The interpreter has no bf16."""
    config = small(num_heads=6, num_kv_heads=1, num_selected_blocks=10, phi="linear")
    check_steps(layer(config).half(), (5, 121), (1, 4))


def test_rows_of_all_queries_and_heads_exceed_a_tile():
    """64 rows in one dtype, 16 in the other: G 10 and 8 queries are 80."""
    config = small(num_heads=10, num_kv_heads=1, num_selected_blocks=5)
    for dtype in (torch.float32, torch.float16):
        splits = Splits(1, 1, 1)
        check_steps(layer(config).to(dtype), (57,), (8,), choose_splits=lambda *_: splits)  # noqa: B023


# ------------------------------------------------------------------------------
# programs that share work


@pytest.mark.parametrize(
    "splits", [Splits(1, 1, 1), Splits(3, 2, 2), Splits(5, 3, 3), Splits(40, 9, 7)], ids=str
)
def test_any_number_of_programs(splits):
    """More than there are keys or blocks, too, and numbers that are no powers of two."""
    module = layer(small(**ONE_KV_HEAD))
    check_steps(module, (2, 300), (3,), choose_splits=lambda *_: splits, STEP_KEYS=16)


@pytest.mark.parametrize("ranked", [16, 32])
def test_selection_in_chunks(ranked):
    """Programs of 15 or 31 blocks each, whose best are merged; most have none of a short one."""
    config = small(**ONE_KV_HEAD, num_selected_blocks=6, num_selected_blocks_table=((-1, 240, 5),))
    module = layer(config)
    check_steps(module, (14, 238, 511), (3,), MOST_RANKED=ranked)


def test_equal_scores_select_the_lowest_blocks():
    """Queries of zeros: only the first block and those at the end score less than others."""
    module = layer(small(**ONE_KV_HEAD, num_selected_blocks=6))
    module.q_proj.weight.zero_()
    for ranked in (16, 1024):
        (step,) = check_steps(module, (400, 14), (2,), MOST_RANKED=ranked)
        assert step.ids is not None
        assert step.ids[0, :, 0].tolist() == [[0, 1, 2, 3, 24, 25]] * 2


def test_the_same_bits_again():
    """A step that is taken back and taken again."""
    module, x = layer(small(**ONE_KV_HEAD)), tokens(2, 103)
    whole = used_cache(module, 2)
    prefill(module, whole, [x[0, :100], x[1, :100]])
    first = take_step(module, whole.layers[0], x[:, 100:])
    for b in (0, 1):
        whole.truncate(b, 100)
    assert whole.lengths == whole.device_lengths.tolist() == [100, 100]
    again = take_step(module, whole.layers[0], x[:, 100:])
    assert torch.equal(first.out, again.out)
    assert first.ids is not None
    assert again.ids is not None
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.reads, again.reads)


# ------------------------------------------------------------------------------
# sequences beside each other


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("poisoned", [0, 1])
def test_nan_reaches_no_other_sequence(poisoned):
    check_steps(layer(small(**ONE_KV_HEAD, phi="mlp")), (30, 71), (1, 2), poisoned=poisoned)


def test_forks_and_truncated_sequences():
    """Two forks of a prefix go on with tokens of their own, one goes back and takes others."""
    module = layer(small(**ONE_KV_HEAD, phi="linear"))
    prefix, other, third = tokens(77), tokens(6, seed=2), tokens(6, seed=3)
    whole = used_cache(module, 3, num_pages=10)
    held = whole.layers[0]
    prefill(module, whole, [prefix, prefix[:0], prefix[:0]])
    whole.fork(0, 1)
    whole.fork(0, 2)
    assert whole.num_free_pages == 5
    texts = [other, third, other]
    step = take_step(module, held, torch.stack([x[:4] for x in texts]))
    assert whole.num_free_pages == 0  # copies of two last pages, and the page behind each
    assert_rows(module, step.out, [torch.cat((prefix, x[:4])) for x in texts], 77)
    whole.truncate(0, 79)
    whole.free(2)
    whole.fork(1, 2)
    whole.truncate(1, 78)
    whole.truncate(2, 80)
    texts = [
        torch.cat((prefix, other[:2])),
        torch.cat((prefix, third[:1])),
        torch.cat((prefix, third[:3])),
    ]
    texts = [torch.cat((x, tokens(2, seed=b))) for b, x in enumerate(texts)]
    step = take_step(module, held, torch.stack([x[-2:] for x in texts]))
    for b, text in enumerate(texts):
        assert_rows(module, step.out[b : b + 1], [text], len(text) - 2)


def assert_rows(
    module: NativeSparseAttention, out: Tensor, texts: Sequence[Tensor], first: int
) -> None:
    """Rows ``[B, T, width]`` are those of full passes from ``first`` on."""
    full = [Full.of(module, x) for x in texts]
    plain = torch.stack([x.plain[first:] for x in full])
    exact = torch.stack([x.exact[first:] for x in full])
    assert_within_budget(out, plain, exact, "decode", 4.0)


def test_chunks_between_steps():
    """A chunk goes on behind steps of kernels, and steps behind the chunk."""
    module, x = layer(small(phi="mlp", compress_hidden_size=3)), tokens(60)
    whole, parts = used_cache(module, 1), list[Tensor]()
    for i, part in enumerate(x.split([10, 3, 25, 2, 1, 18, 1])):
        if i % 2:
            parts.append(take_step(module, whole.layers[0], part[None]).out[0])
        else:
            parts.append(module(part, cache=whole.layers[0]))
    assert_rows(module, torch.cat(parts)[None], [x], 0)


def test_layers_share_lengths():
    """Every layer sees the lengths before the step, which the last one ends."""
    module, x = layer(small(**ONE_KV_HEAD)), tokens(2, 41)
    whole = used_cache(module, 2, layers=2)
    for part in (x[:, :40], x[:, 40:]):
        for i, held in enumerate(whole.layers):
            step = take_step(module, held, (1 + i) * part) if part.shape[1] == 1 else None
            if step is None:
                module((1 + i) * part, cache=held)
            else:
                assert_rows(module, step.out, [*((1 + i) * x)], 40)
    assert whole.lengths == whole.device_lengths.tolist() == [41, 41]


# ------------------------------------------------------------------------------
# keys read


@pytest.mark.parametrize("length", [8192, 16384, 32768, 65536])
def test_keys_read_by_a_step_are_those_of_the_paper(length):
    """Table 4, but for one: the last S tokens hold one block of compression less than S / d."""
    config = NSAConfig(num_heads=1, num_kv_heads=1, head_dim=16, value_dim=16)
    module, whole = layer(config), NSACache(config, 1, max_tokens=length)
    module(tokens(1), cache=whole.layers[0])
    count = [length - 2]
    whole.reserve(count)
    whole.advance(count)  # of zeros, which the memory holds
    whole.device_lengths.add_(length - 2)
    held = whole.layers[0]
    held.reads = torch.zeros(1, 3, dtype=torch.int64)
    step = take_step(module, held, tokens(1, 1))
    table = {8192: 2048, 16384: 2560, 32768: 3584, 65536: 5632}
    assert int(step.reads.sum()) == table[length] - 1
