"""Operators of PyTorch that keep something else on a GPU than on a CPU, as the GPU has them; for fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nsa.ops._backend import as_on_gpu


class _FusedRMSNorm(torch.autograd.Function):
    """One kernel on a GPU, which keeps its input and a number a row; on a CPU five operations, which keep more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float | None = None) -> Tensor:
    result = _FusedRMSNorm.apply(x, weight)
    assert isinstance(result, Tensor)
    return result


@contextmanager
def gpu_operators() -> Iterator[None]:
    """Within, tensors on the CPU, which have to be fake, are treated as those of a GPU, by our operators and by PyTorch's."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("rms_norm", _rms_norm, "AutogradCPU")
    try:
        with as_on_gpu():
            yield
    finally:
        library._destroy()
