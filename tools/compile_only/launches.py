"""What is launched on a GPU that is not there: the whole of the library's attention, through its own launchers."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import nsa
import nsa.attention
from nsa import NSAConfig, PhiWeights, Rope, combine, native_sparse_attention
from nsa.ops._sequences import Sequences
from nsa.ops._triton.kernel import Kernel
from nsa.ops.embedding import embed
from nsa.ops.projection import Columns, Gates, Heads, project
from nsa.ops.statistics import new_statistics
from nsa.testing import packed_offsets
from tools.compile_only.driver import kernels_take_cpu_tensors


@dataclass(frozen=True)
class Batch:
    """Two sequences of 64 queries and 96 keys each, packed or dense.

    Attributes:
        longest: tokens of the longest sequence that the caller promises: launchers choose kernels
            by it, so that few tokens show what many need. None makes a dense batch.
    """

    longest: int | None

    def tensor(self, tokens: int, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Zeros for so many tokens of each sequence, that want a gradient."""
        shape = (2 * tokens, *sizes) if self.longest else (2, tokens, *sizes)
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    def offsets(self) -> dict[str, Any]:
        """The arguments that say where sequences lie."""
        if self.longest is None:
            return {}
        queries, keys = packed_offsets([64, 64]), packed_offsets([96, 96])
        return {
            "cu_seqlens_q": queries,
            "cu_seqlens_k": keys,
            "max_seqlen_q": self.longest,
            "max_seqlen_k": self.longest,
        }


# No gradient is summed in parts; some are; and so long that kernels for very many keys and
# scattered choices run.
SHORT, PARTS, LONG, DENSE = Batch(96), Batch(4096), Batch(65_536), Batch(None)


def attend(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> None:
    """The attention of one layer, forward and backward, its projection's heads, the gated sum alone, and an embedding."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    q = batch.tensor(64, heads, config.head_dim, dtype=dtype)
    pair = (config.head_dim, config.value_dim) * 3
    keys = [batch.tensor(96, kv_heads, size, dtype=dtype) for size in pair]
    gates = batch.tensor(64, heads, 3, dtype=dtype)
    phi = None
    if config.phi != "mean":
        phi = (
            phi_weights(config, config.head_dim, dtype),
            phi_weights(config, config.value_dim, dtype),
        )
    parameters = [x for weights in phi or () for x in vars(weights).values() if x is not None]
    rope = Rope.from_config(config)
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = keys
    watched = partial(nsa.attention.attend, statistics=new_statistics("cpu"))
    with mock.patch("nsa.attention.attend", watched):
        out = native_sparse_attention(
            q,
            k_cmp,
            v_cmp,
            k_slc,
            v_slc,
            k_win,
            v_win,
            gates,
            phi,
            config,
            rope=rope,
            backend="triton",
            **batch.offsets(),
        )
    torch.autograd.grad(
        out, [q, *keys, gates, *parameters], torch.zeros_like(out), allow_unused=True
    )
    branches = [
        out.detach().requires_grad_() if name in config.branches else None
        for name in ("cmp", "slc", "win")
    ]
    total = combine(branches[0], branches[1], branches[2], gates, backend="triton")
    torch.autograd.grad(
        total, [gates, *(x for x in branches if x is not None)], torch.zeros_like(total)
    )
    parts = (
        Heads(heads, config.head_dim, "both"),
        Heads(kv_heads, config.head_dim, "yes"),
        Heads(kv_heads, config.value_dim),
    )
    columns = Columns(parts, Gates(heads, (0, 1, 2)))
    weights = [torch.zeros(size, 32, dtype=dtype) for size in columns.sizes]
    x, bias = (
        torch.zeros(*shape, dtype=dtype, requires_grad=True)
        for shape in ((64, 32), (columns.sizes[-1],))
    )
    sequences = Sequences(None, 1, 64, 64, x.device)
    if batch.longest is not None:
        sequences = Sequences.packed(batch.offsets()["cu_seqlens_q"], 64)
    found = project(x, weights, bias, columns, sequences, rope, backend="triton")
    torch.autograd.grad(found, [x, bias], [torch.zeros_like(y) for y in found])
    table = torch.zeros(40, heads * config.head_dim, dtype=dtype, requires_grad=True)
    embedded = embed(torch.zeros(64, dtype=torch.int64), table, backend="triton")
    torch.autograd.grad(embedded, [table], torch.zeros_like(embedded))


def phi_weights(config: NSAConfig, size: int, dtype: torch.dtype) -> PhiWeights:
    """Zeros for the parameters of phi."""

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(config.num_kv_heads, *sizes, dtype=dtype, requires_grad=True)

    length = config.compress_block_size
    if config.phi == "linear":
        return PhiWeights(weight=zeros(length, size))
    return PhiWeights(
        position=zeros(length, size), w1=zeros(length * size, 2 * size), w2=zeros(2 * size, size)
    )


@contextmanager
def launches() -> Iterator[set[JITFunction[Any]]]:
    """Let launchers take CPU tensors; a launch compiles nothing and runs nothing.

    Yields:
        A set to which every kernel is added that is launched.
    """
    launched: set[JITFunction[Any]] = set()

    def note(kernel: JITFunction[Any], *_: Any, **__: Any) -> None:
        launched.add(kernel)

    with mock.patch.object(Kernel, "run", note), kernels_take_cpu_tensors():
        yield launched


def jitted_functions() -> set[JITFunction[Any]]:
    """Every function of the operators that Triton compiles; those that the benchmark compares with are none of theirs."""
    found: set[JITFunction[Any]] = set()
    root = Path(nsa.__file__).parent
    for path in sorted((root / "ops").rglob("*.py")):
        if "import triton" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(
                ".".join(path.relative_to(root.parent).with_suffix("").parts)
            )
            found |= {value for value in vars(module).values() if isinstance(value, JITFunction)}
    return found


def reached_from(kernels: Iterable[JITFunction[Any]]) -> set[JITFunction[Any]]:
    """Kernels, the functions that they call, and so on."""
    reached: set[JITFunction[Any]] = set()
    waiting = list(kernels)
    while waiting:
        function = waiting.pop()
        if function in reached:
            continue
        reached.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        waiting += [
            x for name in names if isinstance(x := function.fn.__globals__.get(name), JITFunction)
        ]
    return reached
