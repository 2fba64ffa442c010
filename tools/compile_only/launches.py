"""Launches of the library's attention through its own launchers, without a GPU."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence
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
from nsa import NSACache, NSAConfig, PhiWeights, Rope, combine, native_sparse_attention
from nsa.attention import AttentionInputs
from nsa.ops._sequences import Sequences
from nsa.ops._triton.kernel import Kernel
from nsa.ops.embedding import embed
from nsa.ops.linear import Linear
from nsa.ops.projection import Columns, Gates, Heads, project
from nsa.ops.statistics import new_statistics
from nsa.testing import packed_offsets
from tools.compile_only.driver import kernels_take_cpu_tensors


@dataclass(frozen=True)
class Batch:
    """Two sequences of 64 queries and 96 keys each, packed or dense.

    Attributes:
        longest: length of the longest sequence that the caller promises. Launchers choose kernels
            by it, so that few tokens cover the kernels of many. None makes a dense batch.
    """

    longest: int | None

    def tensor(self, tokens: int, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Zeros for a number of tokens of each sequence; they require a gradient."""
        shape = (2 * tokens, *sizes) if self.longest else (2, tokens, *sizes)
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    def offsets(self) -> dict[str, Any]:
        """Arguments for packed sequences; none for a dense batch."""
        if self.longest is None:
            return {}
        offsets = {f"cu_seqlens_{x}": packed_offsets([n, n]) for x, n in (("q", 64), ("k", 96))}
        return {**offsets, "max_seqlen_q": self.longest, "max_seqlen_k": self.longest}


# SHORT sums no gradient in parts, PARTS some; LONG uses the kernels for very many keys and for
# scattered selections.
SHORT, PARTS, LONG, DENSE = Batch(96), Batch(4096), Batch(65_536), Batch(None)


# Outputs of an operator, and its inputs that require a gradient.
Call = tuple[Sequence[Tensor], Sequence[Tensor]]


def attend(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> None:
    """Launch the kernels of a layer with this attention, forward and backward."""
    for operator in (attention, gated_sum, projection, embedding):
        outputs, inputs = operator(config, dtype, batch)
        gradients = [torch.zeros_like(out) for out in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def attention(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> Call:
    """Whole attention."""
    q = batch.tensor(64, config.num_heads, config.head_dim, dtype=dtype)
    pairs = (config.head_dim, config.value_dim) * 3
    keys = [batch.tensor(96, config.num_kv_heads, size, dtype=dtype) for size in pairs]
    gates = batch.tensor(64, config.num_heads, 3, dtype=dtype)
    phi = None
    if config.phi != "mean":
        head_dim, value_dim = (phi_weights(config, size, dtype) for size in pairs[:2])
        phi = (head_dim, value_dim)
    parameters = [x for weights in phi or () for x in vars(weights).values() if x is not None]
    observed = partial(nsa.attention.attend, statistics=new_statistics("cpu"))
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = keys
    with mock.patch("nsa.attention.attend", observed):
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
            rope=Rope.from_config(config),
            backend="triton",
            **batch.offsets(),
        )
    return [out], [q, *keys, gates, *parameters]


def gated_sum(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> Call:
    """Gated sum of the branches as a separate operator."""
    heads, size = config.num_heads, config.value_dim
    gates = batch.tensor(64, heads, 3, dtype=dtype)
    used = {name: batch.tensor(64, heads, size, dtype=dtype) for name in config.branches}
    cmp, slc, win = (used.get(name) for name in ("cmp", "slc", "win"))
    return [combine(cmp, slc, win, gates, backend="triton")], [gates, *used.values()]


def projection(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> Call:
    """Projection of a layer's input to heads and gates."""
    parts = (
        Heads(config.num_heads, config.head_dim, "both"),
        Heads(config.num_kv_heads, config.head_dim, "yes"),
        Heads(config.num_kv_heads, config.value_dim),
    )
    columns = Columns(parts, Gates(config.num_heads, (0, 1, 2)))
    weights = [torch.zeros(size, 32, dtype=dtype) for size in columns.sizes]
    x = torch.zeros(64, 32, dtype=dtype, requires_grad=True)
    bias = torch.zeros(columns.sizes[-1], dtype=dtype, requires_grad=True)
    sequences = Sequences(None, 1, 64, 64, x.device)
    if batch.longest is not None:
        sequences = Sequences.packed(batch.offsets()["cu_seqlens_q"], 64)
    rope = Rope.from_config(config)
    found = project(x, weights, bias, columns, sequences, rope, backend="triton")
    return [*found], [x, bias]


def embedding(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> Call:
    """Embedding of tokens."""
    width = config.num_heads * config.head_dim
    table = torch.zeros(40, width, dtype=dtype, requires_grad=True)
    return [embed(torch.zeros(64, dtype=torch.int64), table, backend="triton")], [table]


def phi_weights(config: NSAConfig, size: int, dtype: torch.dtype) -> PhiWeights:
    """Parameters of phi, all zero."""

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(config.num_kv_heads, *sizes, dtype=dtype, requires_grad=True)

    length = config.compress_block_size
    if config.phi == "linear":
        return PhiWeights(weight=zeros(length, size))
    w1, w2 = zeros(length * size, 2 * size), zeros(2 * size, size)
    return PhiWeights(position=zeros(length, size), w1=w1, w2=w2)


@contextmanager
def launches() -> Iterator[set[JITFunction[Any]]]:
    """Context manager in which launches take CPU tensors, and nothing compiles or runs.

    Yields:
        Set to which every launched kernel is added.
    """
    launched: set[JITFunction[Any]] = set()

    def note(kernel: JITFunction[Any], *_: Any, **__: Any) -> None:
        launched.add(kernel)

    with mock.patch.object(Kernel, "run", note), kernels_take_cpu_tensors():
        yield launched


def jitted_functions() -> set[JITFunction[Any]]:
    """All functions of the operators that Triton compiles."""
    found: set[JITFunction[Any]] = set()
    root = Path(nsa.__file__).parent
    for path in sorted((root / "ops").rglob("*.py")):
        if "import triton" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            values = vars(importlib.import_module(name)).values()
            found |= {value for value in values if isinstance(value, JITFunction)}
    return found


def reached_from(kernels: Iterable[JITFunction[Any]]) -> set[JITFunction[Any]]:
    """Kernels and all functions that they call, directly or not."""
    reached: set[JITFunction[Any]] = set()
    waiting = list(kernels)
    while waiting:
        function = waiting.pop()
        if function in reached:
            continue
        reached.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        called = map(function.fn.__globals__.get, names)
        waiting += [value for value in called if isinstance(value, JITFunction)]
    return reached


def decode(config: NSAConfig, dtype: torch.dtype, queries: int, max_tokens: int) -> None:
    """Launch the kernels of a decoder layer for a step of two sequences."""
    for rows in (tokens := 2 * queries, 40):  # and of more sequences
        linear_layers(dtype, rows)
    cache = NSACache(config, 1, 2, max_tokens=max_tokens, num_pages=4)

    def zeros(heads: int, size: int) -> Tensor:
        return torch.zeros(tokens, heads, size, dtype=dtype)

    sizes = (config.head_dim, config.value_dim) * 3
    phi = None
    if config.phi != "mean":
        key_phi, value_phi = (phi_weights(config, size, dtype) for size in sizes[:2])
        phi = (key_phi, value_phi)
    q, gates = zeros(config.num_heads, config.head_dim), zeros(config.num_heads, 3)
    keys = [zeros(config.num_kv_heads, size) for size in sizes]
    inputs = AttentionInputs._make((q, *keys, gates, phi, None))
    sequences = Sequences(None, 2, queries, queries, gates.device)
    with mock.patch("nsa.cache.cache.choose_backend", return_value="triton"):
        cache.layers[0].attend(inputs, rope=Rope.from_config(config), sequences=sequences)


def linear_layers(dtype: torch.dtype, rows: int, width: int = 768) -> None:
    """Launch the linear layers around attention in a decoder, with and without gates."""
    x = torch.zeros(rows, width, dtype=dtype)
    weight = torch.zeros(2 * width, width, dtype=dtype)
    Linear(weight, gate=weight, eps=1e-6)(x, backend="triton")
    Linear(weight, eps=1e-6)(x, backend="triton")
    Linear(weight[:width])(x, x, backend="triton")
