"""Kernels of a linear layer for few tokens, fused with the operations around it in a decoder."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel, let_next_start, wait_for_inputs


@triton.jit
def activated(y, of_gate, SILU: tl.constexpr, IS_GATED: tl.constexpr):
    """Apply the gate or SiLU to the product y."""
    if IS_GATED:
        y *= of_gate * tl.sigmoid(of_gate)
    elif SILU:
        y *= tl.sigmoid(y)
    return y


@triton.jit
def store_sum(out_ptr, residual_ptr, at, y, mask):
    """Store y, plus the residual if there is one."""
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=[])
def linear_rows_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    residual_ptr,
    out_ptr,
    eps,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NORMALISE: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Variant of :func:`linear_kernel` for very few rows, bound by reading the weights.

    Program i loads ``BLOCK_N`` rows of the weight at once, before the previous kernel has ended:
    no kernel writes weights.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k  # [BLOCK_N, BLOCK_K]
    mask = (n < N)[:, None] & (k < K)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    gate = weight
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
    wait_for_inputs()
    for m in tl.static_range(ROWS):
        x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0)  # [1, BLOCK_K]
        rounded = x.to(weight.dtype).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * rounded, 1)  # [BLOCK_N]
        of_gate = y
        if gate_ptr is not None:
            of_gate = tl.sum(gate.to(tl.float32) * rounded, 1)
        if NORMALISE:
            x = x.to(tl.float32)
            factor = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / K) + eps)  # [1]
            y *= factor
            of_gate *= factor
        y = activated(y, of_gate, SILU, gate_ptr is not None)
        store_sum(out_ptr, residual_ptr, m * N + n, y, n < N)


@kernel(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    NORMALISE: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out ``[M, N]`` from x ``[M, K]`` and a weight ``[N, K]``, all contiguous.

    Program (i, j) computes the i-th ``BLOCK_N`` columns of the j-th ``BLOCK_M`` rows. With
    ``NORMALISE`` the product is divided by the root mean square of its row of x. ``SILU`` is
    applied to the product or, with ``gate_ptr`` (a second weight), to the product with the gate,
    which is then multiplied by the first. ``residual_ptr`` is added at the end.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    wait_for_inputs(AT_ONCE=False)
    row = m.to(tl.int64)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    of_gate = acc
    # Reduced after the loop: a reduction in each step would stall the matmuls.
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x_at = x_ptr + row * K + k[None, :]
        x_mask = (m < num_rows)[:, None] & (k < K)[None, :]
        x = tl.load(x_at, mask=x_mask, other=0.0)  # [BLOCK_M, BLOCK_K]
        if NORMALISE:
            # A separate load, which the eviction policy prevents from being merged: Hopper's wgmma
            # reads x from shared memory asynchronously. If x is also read into registers, Triton
            # allocates one buffer too few, and a later copy overwrites x during the matmul.
            wide = tl.load(x_at, mask=x_mask, other=0.0, eviction_policy="evict_last")
            wide = wide.to(tl.float32)
            squares += wide * wide
        x = x.to(weight_ptr.dtype.element_ty)
        at = n.to(tl.int64)[None, :] * K + k[:, None]  # [BLOCK_K, BLOCK_N]
        mask = (n < N)[None, :] & (k < K)[:, None]
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
            of_gate = tl.dot(x, gate, of_gate, input_precision="ieee")
    let_next_start()
    if NORMALISE:
        factor = tl.rsqrt(tl.sum(squares, 1) * (1.0 / K) + eps)[:, None]
        acc *= factor
        of_gate *= factor
    acc = activated(acc, of_gate, SILU, gate_ptr is not None)
    at = row * N + n[None, :]
    mask = (m < num_rows)[:, None] & (n < N)[None, :]
    store_sum(out_ptr, residual_ptr, at, acc, mask)
