"""Kernels of Muon's update."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel


@triton.jit
def pointer_of(pointers, index):
    """Element ``index`` of a tuple of pointers."""
    found = pointers[0]
    for i in tl.static_range(1, len(pointers)):
        found = tl.where(index == i, pointers[i], found)
    return found


@triton.jit
def own_range(numel, BLOCK: tl.constexpr):
    """First and last element, exclusive, of this program: a whole number of blocks."""
    size = tl.cdiv(tl.cdiv(numel, BLOCK), tl.num_programs(0)) * BLOCK
    begin = tl.program_id(0) * size
    return begin, tl.minimum(begin + size, numel)


@kernel(do_not_specialize=[])
def muon_momentum_kernel(
    cancel_ptr,
    momenta,
    gradients,
    ahead_ptr,
    squares_ptr,
    numel,
    MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the momenta, and write Nesterov's estimates and partial sums of their squares.

    Program (p, i) handles the p-th part of matrix i. If the update is cancelled, the momentum
    replaces the gradient, which may be NaN.
    """
    matrix, live = tl.program_id(1), tl.load(cancel_ptr) == 0
    momentum_ptr, gradient_ptr = pointer_of(momenta, matrix), pointer_of(gradients, matrix)
    ahead_ptr += matrix.to(tl.int64) * numel
    begin, end = own_range(numel, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        ok = at < numel
        momentum = tl.load(momentum_ptr + at, mask=ok, other=0.0)
        gradient = tl.load(gradient_ptr + at, mask=ok, other=0.0)
        gradient = tl.where(live, gradient, momentum)
        momentum += (1 - MOMENTUM) * (gradient - momentum)
        ahead = momentum + (1 - MOMENTUM) * (gradient - momentum)
        ahead = ahead.to(ahead_ptr.dtype.element_ty)
        tl.store(momentum_ptr + at, momentum, mask=ok & live)
        tl.store(ahead_ptr + at, ahead, mask=ok)
        squares += ahead.to(tl.float32) * ahead.to(tl.float32)
    place = matrix * tl.num_programs(0) + tl.program_id(0)
    tl.store(squares_ptr + place, tl.sum(squares, 0))


@kernel(do_not_specialize=[])
def muon_normalize_kernel(
    x_ptr,
    squares_ptr,
    numel,
    MAX_PARTS: tl.constexpr,
    LEAST_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divide matrices by their norms; the programs are those of ``muon_momentum_kernel``."""
    matrix, num_parts = tl.program_id(1), tl.num_programs(0)
    part = tl.arange(0, MAX_PARTS)
    squares = tl.load(squares_ptr + matrix * num_parts + part, mask=part < num_parts, other=0.0)
    scale = 1 / tl.maximum(tl.sqrt(tl.sum(squares, 0)), LEAST_NORM)
    x_ptr += matrix.to(tl.int64) * numel
    begin, end = own_range(numel, BLOCK)
    for first in tl.range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < numel).to(tl.float32)
        tl.store(x_ptr + at, (x * scale).to(x_ptr.dtype.element_ty), mask=at < numel)


@kernel(do_not_specialize=[])
def muon_weight_kernel(
    cancel_ptr,
    weights,
    update_ptr,
    lr_ptr,
    numel,
    stride_update,
    decay,
    factor,
    BLOCK: tl.constexpr,
):
    """Decay the weights and subtract their updates; a cancelled update writes nothing."""
    if tl.load(cancel_ptr) == 0:
        matrix, lr = tl.program_id(1), tl.load(lr_ptr).to(tl.float32)
        weight_ptr = pointer_of(weights, matrix)
        update_ptr += matrix.to(tl.int64) * stride_update
        begin, end = own_range(numel, BLOCK)
        for first in tl.range(begin, end, BLOCK):
            at = first + tl.arange(0, BLOCK)
            weight = tl.load(weight_ptr + at, mask=at < numel)
            update = tl.load(update_ptr + at, mask=at < numel).to(tl.float32)
            weight = weight * (1 - lr * decay) - lr * factor * update
            tl.store(weight_ptr + at, weight, mask=at < numel)
