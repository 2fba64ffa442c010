"""Attention from range to range of keys, a program for each query and group of heads: the plainest kernel for such a choice.

Nothing is shared between queries, and the gradients of keys and values are added up with atomics, in any order. This is what
the selected branch is compared with, and no part of it.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def load_tile(ptr, rows, ok, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``[rows, BLOCK]``, 0 where a row or a column is not there."""
    columns = tl.arange(0, BLOCK)
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=ok[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def place(first_ptr, num_tokens, HKV: tl.constexpr, N: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of this program: query, position in its sequence, first token of that, group, ranges, and its rows of ``[T, Hq]``."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = token % num_tokens
    r = tl.arange(0, BLOCK_M)
    return t, token - t, head, first_ptr + (token * HKV + head) * N, (token * HKV + head) * G + r, r < G


@triton.jit
def ranges_fwd_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, out_ptr, lse_ptr, num_tokens, scale, HKV: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """out ``[T, Hq, Dv]`` and lse ``[T, Hq]`` (base 2)."""
    t, start, head, first_ptr, rows, ok = place(first_ptr, num_tokens, HKV, N, G, BLOCK_M)
    last_ptr += (tl.program_id(0).to(tl.int64) * HKV + head) * N
    q = load_tile(q_ptr, rows, ok, D, D, BLOCK_D)
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in range(N):
        first, last = tl.load(first_ptr + i), tl.minimum(tl.load(last_ptr + i), (t + 1).to(tl.int32))
        for n in range(first, last, BLOCK_N):
            key = n + tl.arange(0, BLOCK_N)
            at = (start + key) * HKV + head
            k = load_tile(k_ptr, at, key < last, D, D, BLOCK_D)
            v = load_tile(v_ptr, at, key < last, DV, DV, BLOCK_DV)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            s = tl.where((key < last)[None, :], s, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            p = tl.exp2(s - new_max[:, None])
            shrink = tl.exp2(row_max - new_max)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            row_max = new_max
    columns = tl.arange(0, BLOCK_DV)
    mask = ok[:, None] & (columns < DV)[None, :]
    tl.store(out_ptr + rows[:, None] * DV + columns[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + rows, row_max + tl.log2(total), mask=ok)


@triton.jit
def ranges_bwd_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, lse_ptr, delta_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, num_tokens, scale,
    factor, HKV: tl.constexpr, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dq, and what this query adds to dk and dv, which are fp32 and begin with zeros."""
    t, start, head, first_ptr, rows, ok = place(first_ptr, num_tokens, HKV, N, G, BLOCK_M)
    last_ptr += (tl.program_id(0).to(tl.int64) * HKV + head) * N
    q = load_tile(q_ptr, rows, ok, D, D, BLOCK_D)
    dout = load_tile(dout_ptr, rows, ok, DV, DV, BLOCK_DV)
    lse = tl.load(lse_ptr + rows, mask=ok, other=0.0)
    delta = tl.load(delta_ptr + rows, mask=ok, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    d_columns, dv_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for i in range(N):
        first, last = tl.load(first_ptr + i), tl.minimum(tl.load(last_ptr + i), (t + 1).to(tl.int32))
        for n in range(first, last, BLOCK_N):
            key = n + tl.arange(0, BLOCK_N)
            at = (start + key) * HKV + head
            k = load_tile(k_ptr, at, key < last, D, D, BLOCK_D)
            v = load_tile(v_ptr, at, key < last, DV, DV, BLOCK_DV)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
            p = tl.where((key < last)[None, :] & ok[:, None], p, 0.0)
            ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None]) * factor
            dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
            dk = tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
            dv = tl.dot(tl.trans(p).to(dout.dtype), dout, input_precision="ieee")
            k_mask = (key < last)[:, None] & (d_columns < D)[None, :]
            v_mask = (key < last)[:, None] & (dv_columns < DV)[None, :]
            tl.atomic_add(dk_ptr + at[:, None] * D + d_columns[None, :], dk, mask=k_mask, sem="relaxed")
            tl.atomic_add(dv_ptr + at[:, None] * DV + dv_columns[None, :], dv, mask=v_mask, sem="relaxed")
    mask = ok[:, None] & (d_columns < D)[None, :]
    tl.store(dq_ptr + rows[:, None] * D + d_columns[None, :], dq.to(dq_ptr.dtype.element_ty), mask=mask)


class RangeAttention(torch.autograd.Function):
    """Attention of each query over the ranges ``first <= key < last`` of its group, up to itself."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """out ``[B, S, Hq, Dv]`` of q ``[B, S, Hq, D]``, k, v ``[B, S, Hkv, *]`` and int32 ranges ``[B, S, Hkv, n]``."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
        grid, scale, sizes = _launch(q, k, v, first)
        ranges_fwd_kernel[grid](q, k, v, first, last, out, lse, q.shape[1], scale * LOG2_E, **sizes)
        ctx.save_for_backward(q, k, v, first, last, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, first, last, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        delta = (dout.float() * out.float()).sum(-1)
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        grid, scale, sizes = _launch(q, k, v, first)
        tensors = (q, k, v, first, last, lse, delta, dout, dq, dk, dv)
        ranges_bwd_kernel[grid](*tensors, q.shape[1], scale * LOG2_E, scale, **sizes)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _launch(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> tuple[tuple[int, int], float, dict[str, int]]:
    """Grid, factor on the scores, and sizes."""
    (batch, tokens, heads, size), group = q.shape, k.shape[2]
    sizes = {"HKV": group, "G": heads // group, "N": first.shape[3], "D": size, "DV": v.shape[3], "BLOCK_N": 64}
    blocks = {"BLOCK_M": max(16, heads // group), "BLOCK_D": size, "BLOCK_DV": v.shape[3]}
    return (batch * tokens, group), size**-0.5, sizes | {name: triton.next_power_of_2(n) for name, n in blocks.items()}
