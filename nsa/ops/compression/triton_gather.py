"""The tokens of every compression block side by side, as the matrix product of phi ``mlp`` wants them, and the gradient."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import VARYING, find_tile, sequence_rows


@kernel(do_not_specialize=VARYING)
def gather_fwd_kernel(
    x_ptr, out_ptr, cu_ptr, cu_cmp_ptr, len_x, len_cmp, num_sequences, num_rows, stride_x, stride_xh,
    D: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``BLOCK_C`` blocks of one head, ``[l, D]`` each."""
    head = tl.program_id(1)
    sequence, tile = find_tile(cu_cmp_ptr, tl.program_id(0), num_sequences, len_cmp, BLOCK_C)
    if sequence < num_sequences:
        first_x, _ = sequence_rows(cu_ptr, sequence, len_x)
        first_y, num_y = sequence_rows(cu_cmp_ptr, sequence, len_cmp)
        block = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        d = tl.arange(0, BLOCK_D)
        mask = (block < num_y)[:, None] & (d < D)[None, :]
        source = (
            x_ptr
            + head * stride_xh
            + (first_x + block * STRIDE).to(tl.int64)[:, None] * stride_x
            + d[None, :]
        )
        target = (
            out_ptr
            + (head.to(tl.int64) * num_rows + first_y + block)[:, None] * (L * D)
            + d[None, :]
        )
        for i in tl.range(0, L):
            tl.store(target + i * D, tl.load(source, mask=mask, other=0.0), mask=mask)
            source += stride_x


@kernel(do_not_specialize=VARYING)
def gather_bwd_kernel(
    dblocks_ptr, dx_ptr, cu_ptr, cu_cmp_ptr, len_x, len_cmp, num_sequences, num_rows,
    HKV: tl.constexpr, D: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx of the tokens of ``BLOCK_C`` strides of one head: the sum over the blocks c, c - 1, .. that hold a token."""
    head = tl.program_id(1)
    OVERLAP: tl.constexpr = L // STRIDE
    sequence, tile = find_tile(cu_ptr, tl.program_id(0), num_sequences, len_x, BLOCK_C * STRIDE)
    if sequence < num_sequences:
        first_x, num_x = sequence_rows(cu_ptr, sequence, len_x)
        first_y, num_y = sequence_rows(cu_cmp_ptr, sequence, len_cmp)
        c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        d = tl.arange(0, BLOCK_D)
        for i in tl.range(0, STRIDE):
            token = c * STRIDE + i
            total = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
            for back in tl.static_range(OVERLAP):
                block = c - back
                mask = ((block >= 0) & (block < num_y))[:, None] & (d < D)[None, :]
                row = (head.to(tl.int64) * num_rows + first_y + block) * L + (i + back * STRIDE)
                total += tl.load(
                    dblocks_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0
                ).to(tl.float32)
            out = ((first_x + token).to(tl.int64) * HKV + head) * D
            mask = (token < num_x)[:, None] & (d < D)[None, :]
            tl.store(
                dx_ptr + out[:, None] + d[None, :], total.to(dx_ptr.dtype.element_ty), mask=mask
            )
