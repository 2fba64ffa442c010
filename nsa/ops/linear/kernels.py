"""Kernel of a linear layer for few tokens, with what stands before and behind it in a decoder."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

from __future__ import annotations

import triton.language as tl

from nsa.ops._triton.kernel import kernel


@kernel(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out ``[M, N]`` of x ``[M, K]`` and a weight ``[N, K]``, all contiguous.

    Program (i, j) computes the i-th ``BLOCK_N`` columns of the j-th ``BLOCK_M`` rows. With
    ``norm_ptr``, weights of an RMSNorm, x is normalised first: a row's factor is applied to the
    product. ``SILU`` is applied to the product; with ``gate_ptr``, a second weight, to that one's,
    which is multiplied by the first. ``residual_ptr`` is added at the end.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    of_gate = acc
    squares = tl.zeros([BLOCK_M], tl.float32)
    dtype = weight_ptr.dtype.element_ty
    for k0 in tl.range(0, K, BLOCK_K):
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
    if gate_ptr is not None:
        acc *= of_gate * tl.sigmoid(of_gate)
    elif SILU:
        acc *= tl.sigmoid(acc)
    at = row * N + n[None, :]
    mask = (m < num_rows)[:, None] & (n < N)[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)
