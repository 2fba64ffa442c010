"""Once torch.compile has seen sizes vary, no size or number of sequences compiles anything again.

The operators run as on a GPU, without their kernels: only what is traced around them matters here.
The trainer has a test of its own,
``tests/train/test_trainer.py::test_compiled_once_and_equal_to_eager``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from nsa import NativeSparseAttention
from nsa.ops._backend import as_on_gpu
from nsa.testing import packed_offsets
from tests.ops.cases import small

CONFIG = small(value_dim=16)
# The first two show that sizes vary; sizes of 0 and 1, also of compressed keys, are cases of their
# own for PyTorch.
PACKED = [[32, 32], [16, 0, 48, 32], [1] * 60, [96], [5, 0, 0, 0, 70], [7, 64, 2], [128, 128, 3]]
DENSE = [(2, 32), (3, 48), (4, 17), (5, 65), (2, 128), (7, 3)]


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch):
    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda self, grid: lambda *args, **kwargs: None
    )
    torch.compiler.reset()
    with as_on_gpu():
        yield
    torch.compiler.reset()


@functools.cache
def compiled_module() -> Callable[..., Tensor]:
    layer = NativeSparseAttention(32, CONFIG)
    return torch.compile(layer, backend="aot_eager", fullgraph=True)


def of_module(
    *shape: int, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
) -> Tensor:
    x = torch.randn(*shape, 32, requires_grad=True)
    return compiled_module()(x, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


def test_packed():
    for number, lengths in enumerate(PACKED):
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            cu_seqlens = packed_offsets(lengths)
            of_module(sum(lengths), cu_seqlens=cu_seqlens, max_seqlen=max(lengths)).sum().backward()


def test_dense():
    for number, shape in enumerate(DENSE):
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            of_module(*shape).sum().backward()


def test_one_sequence_without_offsets():
    for number, length in enumerate((32, 48, 17, 65, 200, 9)):
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            of_module(length).sum().backward()
