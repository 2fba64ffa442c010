"""Elementwise parts of Muon's update, before and after its matrix products.

On a GPU each part is one kernel for a batch of matrices. Before the products it reads gradient and
momentum (8 bytes per element) and writes momentum, Nesterov's estimate in the dtype of the products
and partial sums of its squares (6 bytes); after them it reads weight and update and writes the
weight (10 bytes). Operation by operation this is 70 bytes. The estimates of a batch stay in the L2
cache until they are normalized and multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nsa.ops._backend import choose_backend
from nsa.ops._layout import cdiv

# Matrices of one launch. Each is an argument: a table of addresses would be copied to the device.
MATRICES = 16
BLOCK = 4096  # elements of a step
MAX_PARTS = 1024  # programs and partial sums of one matrix
MOMENTUM, LEAST_NORM = 0.95, 1e-7
OPTIONS = {"BLOCK": BLOCK, "num_warps": 8}


def update_momenta(
    momenta: list[Tensor],
    gradients: list[Tensor],
    cancel: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Update momenta m in place: ``m += 0.05 (gradient - m)``.

    Args:
        momenta: N fp32 matrices ``[rows, columns]``.
        gradients: their gradients, fp32; overwritten on a CPU.
        cancel: fp32 scalar, 0 or 1; if it is 1, the momenta do not change.
        dtype: dtype of the estimates.

    Returns:
        Nesterov's estimates ``[N, rows, columns]``, ``m + 0.05 (gradient - m)`` with the
        new m, and partial sums of their squares for :func:`normalized`. If the update is cancelled,
        the momentum replaces the gradient, which may be NaN.
    """
    if choose_backend("auto", cancel, "cancel") == "reference":
        keep = cancel.bool()
        for m, gradient in zip(momenta, gradients, strict=True):
            torch.where(keep, m, gradient, out=gradient)
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, momenta, MOMENTUM)
        return torch.stack([gradient.to(dtype) for gradient in gradients]), None
    from nsa.ops.muon.kernels import muon_momentum_kernel

    first, numel = momenta[0], momenta[0].numel()
    ahead = first.new_empty(len(momenta), *first.shape, dtype=dtype)
    squares = first.new_empty(len(momenta), num_parts(numel))
    for some, grid in launches(momenta):
        tensors = (padded(momenta[some]), padded(gradients[some]), ahead[some], squares[some])
        muon_momentum_kernel[grid](cancel, *tensors, numel, MOMENTUM=MOMENTUM, **OPTIONS)
    return ahead, squares


def normalized(x: Tensor, squares: Tensor | None) -> Tensor:
    """Matrices divided by their norms.

    Args:
        x: contiguous ``[N, rows, columns]``; overwritten if ``squares`` is given.
        squares: partial sums of squares from :func:`update_momenta`; None computes the norms.
    """
    if squares is None:
        return x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=LEAST_NORM)
    from nsa.ops.muon.kernels import muon_normalize_kernel

    sizes = {"MAX_PARTS": MAX_PARTS, "LEAST_NORM": LEAST_NORM, **OPTIONS}
    muon_normalize_kernel[squares.shape[::-1]](x, squares, x[0].numel(), **sizes)
    return x


def update_weights(
    weights: list[Tensor],
    updates: Tensor,
    lr: Tensor,
    decay: float,
    factor: float,
    cancel: Tensor,
) -> None:
    """Update weights w in place: ``w = w (1 - lr decay) - lr factor update``.

    Args:
        weights: N fp32 matrices ``[rows, columns]``.
        updates: ``[N, rows, columns]``; each matrix is contiguous.
        lr: learning rate, fp64 scalar on the device.
        decay: weight decay relative to ``lr``.
        factor: factor of the update relative to ``lr``.
        cancel: fp32 scalar, 0 or 1; if it is 1, the weights do not change.
    """
    if choose_backend("auto", cancel, "cancel") == "reference":
        live = 1 - cancel
        torch._foreach_mul_(weights, (live * (1 - lr * decay) + cancel).float())
        rate = (live * (lr * factor)).float()
        for weight, update in zip(weights, updates, strict=True):
            weight.addcmul_(update, rate, value=-1)
        return
    from nsa.ops.muon.kernels import muon_weight_kernel

    sizes = (weights[0].numel(), updates.stride(0), decay, factor)
    for some, grid in launches(weights):
        muon_weight_kernel[grid](
            cancel, padded(weights[some]), updates[some], lr, *sizes, **OPTIONS
        )


def num_parts(numel: int) -> int:
    """Number of programs of a matrix."""
    return min(cdiv(numel, BLOCK), MAX_PARTS)


def launches(matrices: Sequence[Tensor]) -> Iterator[tuple[slice, tuple[int, int]]]:
    """At most ``MATRICES`` matrices at a time, with the grid; none if they are empty."""
    parts = num_parts(matrices[0].numel())
    for first in range(0, len(matrices) if parts else 0, MATRICES):
        yield slice(first, first + MATRICES), (parts, min(MATRICES, len(matrices) - first))


def padded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Contiguous tensors as an argument of constant length, so that one kernel is compiled."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (*tensors, *[tensors[0]] * (MATRICES - len(tensors)))
