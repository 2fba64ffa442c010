"""Launches of the library's kernels through its own module and operators, without a GPU."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import nsa
from nsa import NativeSparseAttention, NSACache, NSAConfig, combine
from nsa.ops._backend import as_on_gpu
from nsa.ops._operator import Call
from nsa.ops._sequences import open_sequences
from nsa.ops._triton.kernel import Kernel
from nsa.ops.embedding import embed
from nsa.ops.index_loss import IndexLossInputs, run_index_loss
from nsa.ops.linear import Linear
from nsa.ops.statistics import new_statistics
from nsa.testing import packed_offsets
from nsa.train.execution.kernels_ahead import run_update
from tools.compile_only.driver import kernels_take_cpu_tensors

# Lengths of the longest sequence that a caller promises; None makes a dense batch. Launchers choose
# kernels by it, so that few tokens cover the kernels of many: SHORT sums no gradient in parts,
# PARTS some; LONG uses the kernels for very many keys and for scattered selections.
SHORT, PARTS, LONG, DENSE = 96, 4096, 65_536, None
WIDTH = 32


def attention(
    config: NSAConfig, dtype: torch.dtype, longest: int | None
) -> tuple[Tensor, list[Tensor]]:
    """Output and leaves of a layer that reads two sequences of 96 tokens, packed or dense."""
    layer = NativeSparseAttention(WIDTH, config).to(dtype)
    layer.statistics = new_statistics("cpu")
    x = torch.zeros(2, 96, WIDTH, dtype=dtype, requires_grad=True)
    with as_on_gpu():
        if longest is None:
            out = layer(x)
        else:
            out = layer(x.flatten(0, 1), cu_seqlens=packed_offsets([96, 96]), max_seqlen=longest)
    return out, [x, *(w for w in layer.parameters() if w.requires_grad)]


def attend(config: NSAConfig, dtype: torch.dtype, longest: int | None) -> None:
    """Launch the kernels of a layer, gated sum, embedding, update and index loss, with backward."""
    heads = torch.zeros(64, config.num_heads, config.value_dim, dtype=dtype, requires_grad=True)
    cmp, slc, win = (heads if name in config.branches else None for name in ("cmp", "slc", "win"))
    table = torch.zeros(40, config.num_heads * config.head_dim, dtype=dtype, requires_grad=True)
    out, leaves = attention(config, dtype, longest)
    with as_on_gpu():
        gates = heads.new_zeros(64, config.num_heads, 3)
        outputs = [out, combine(cmp, slc, win, gates), embed(torch.zeros(64).long(), table)]
        gradients = [torch.zeros_like(x) for x in outputs]
        torch.autograd.grad(outputs, [*leaves, heads, table], gradients, allow_unused=True)
        run_update()
        train_index(config, dtype)


def train_index(config: NSAConfig, dtype: torch.dtype) -> None:
    """Launch the loss of two index heads per group, over selected and over all blocks.

    Over selected blocks with and without results of the selected branch.
    """
    num_heads, num_kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    q, k = (torch.zeros(64, heads, size, dtype=dtype) for heads in (num_heads, num_kv_heads))
    shapes = (64, 2 * num_kv_heads, 64), (64, num_kv_heads, 64)
    q_idx, k_idx = (torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    ids = torch.zeros(64, num_kv_heads, config.num_selected_blocks, dtype=torch.int32)
    sequences = open_sequences(q, (64,), None, None, None, None, "triton")
    call = Call(config, sequences, size**-0.5)
    results = q.new_zeros(q.shape[:2], dtype=torch.float32), ids.new_zeros(ids.numel())
    for rest in ((ids, *results), (ids,), (None,)):
        total, _ = run_index_loss(IndexLossInputs(q_idx, k_idx, q, k, *rest), call, "triton")
        torch.autograd.grad(total, [q_idx, k_idx])


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
    for rows in (2 * queries, 40):  # 40: a step of more sequences
        linear_layers(dtype, rows)
    layer = NativeSparseAttention(WIDTH, config).to(dtype).requires_grad_(False)
    cache = NSACache(config, 1, 2, max_tokens=max_tokens, num_pages=4)
    with as_on_gpu():
        layer(torch.zeros(2, queries, WIDTH, dtype=dtype), cache=cache.layers[0])


def linear_layers(dtype: torch.dtype, rows: int, width: int = 768) -> None:
    """Launch the linear layers around attention in a decoder, with and without gates."""
    x = torch.zeros(rows, width, dtype=dtype)
    weight = torch.zeros(2 * width, width, dtype=dtype)
    Linear(weight, gate=weight, eps=1e-6)(x, backend="triton")
    Linear(weight, eps=1e-6)(x, backend="triton")
    Linear(weight[:width])(x, x, backend="triton")
