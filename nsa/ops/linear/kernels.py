"""Kernels of a linear layer for few tokens, with what stands before and behind it in a decoder."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.arrival import is_last
from nsa.ops._triton.kernel import kernel


@triton.jit
def activated(y, of_gate, SILU: tl.constexpr, IS_GATED: tl.constexpr):
    """The product y with its gate, or with SiLU."""
    if IS_GATED:
        y *= of_gate * tl.sigmoid(of_gate)
    elif SILU:
        y *= tl.sigmoid(y)
    return y


@triton.jit
def store_sum(out_ptr, residual_ptr, at, y, mask):
    """Write y, with the residual."""
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=[])
def linear_rows_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    eps,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As :func:`linear_kernel`, for so few rows that reading the weights is all there is to do.

    Program i loads ``BLOCK_N`` rows of the weight at once.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k  # [BLOCK_N, BLOCK_K]
    mask = (n < N)[:, None] & (k < K)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    gate = weight
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
    for m in tl.static_range(ROWS):
        x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0)  # [1, BLOCK_K]
        factor = 1.0
        if norm_ptr is not None:
            x = x.to(tl.float32)
            factor = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / K) + eps)  # [1]
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        x = x.to(weight.dtype).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x, 1) * factor
        of_gate = y
        if gate_ptr is not None:
            of_gate = tl.sum(gate.to(tl.float32) * x, 1) * factor
        y = activated(y, of_gate, SILU, gate_ptr is not None)
        store_sum(out_ptr, residual_ptr, m * N + n, y, n < N)


@kernel(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    norm_ptr,
    residual_ptr,
    partial_ptr,
    counter_ptr,
    out_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    SILU: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out ``[M, N]`` of x ``[M, K]`` and a weight ``[N, K]``, all contiguous.

    Program (i, j, s) computes the i-th ``BLOCK_N`` columns of the j-th ``BLOCK_M`` rows. With
    ``norm_ptr``, weights of an RMSNorm, x is normalised first: a row's factor is applied to the
    product. ``SILU`` is applied to the product; with ``gate_ptr``, a second weight, to that one's,
    which is multiplied by the first. ``residual_ptr`` is added at the end.

    Of a plain product ``SPLITS`` programs s share K: they leave their sums in ``partial_ptr``, fp32
    ``[SPLITS, M, N]``, and the last to arrive adds them in a fixed order.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    of_gate = acc
    squares = tl.zeros([BLOCK_M], tl.float32)
    dtype = weight_ptr.dtype.element_ty
    SHARE: tl.constexpr = ((K + SPLITS - 1) // SPLITS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    begin = tl.program_id(2) * SHARE
    for k0 in tl.range(begin, tl.minimum(begin + SHARE, K), BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + row * K + k[None, :], mask=(m < num_rows)[:, None] & (k < K)[None, :], other=0.0
        )  # [BLOCK_M, BLOCK_K]
        if norm_ptr is not None:
            x = x.to(tl.float32)
            squares += tl.sum(x * x, 1)
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        x = x.to(dtype)
        at = n.to(tl.int64)[None, :] * K + k[:, None]  # [BLOCK_K, BLOCK_N]
        mask = (n < N)[None, :] & (k < K)[:, None]
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
            of_gate = tl.dot(x, gate, of_gate, input_precision="ieee")
    if norm_ptr is not None:
        factor = tl.rsqrt(squares * (1.0 / K) + eps)[:, None]
        acc *= factor
        of_gate *= factor
    at = row * N + n[None, :]
    mask = (m < num_rows)[:, None] & (n < N)[None, :]
    if SPLITS == 1:
        acc = activated(acc, of_gate, SILU, gate_ptr is not None)
        store_sum(out_ptr, residual_ptr, at, acc, mask)
    else:
        size = num_rows.to(tl.int64) * N
        tl.store(partial_ptr + tl.program_id(2) * size + at, acc, mask=mask)
        counter = counter_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if is_last(counter, SPLITS):
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for split in tl.static_range(SPLITS):
                place = partial_ptr + split * size + at
                acc += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
            acc = activated(acc, acc, SILU, False)
            store_sum(out_ptr, residual_ptr, at, acc, mask)
