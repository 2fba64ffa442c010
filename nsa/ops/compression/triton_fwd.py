"""Compression of blocks by mean or learned weights, with the rotation of the result (phi of Eq. 7)."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.rotation import partner_column, rotation
from nsa.ops._triton.tiles import VARYING, find_tile, sequence_rows


@kernel(do_not_specialize=VARYING)
def compress_fwd_kernel(
    x_ptr, weight_ptr, frequency_ptr, y_ptr, cu_ptr, cu_cmp_ptr, len_x, len_cmp, num_sequences, stride_x, stride_xh,
    magnitude, position_offset, HKV: tl.constexpr, D: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, ROTARY: tl.constexpr,
    MIDDLE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``BLOCK_C`` compressed rows of one head."""
    head = tl.program_id(1)
    sequence, tile = find_tile(cu_cmp_ptr, tl.program_id(0), num_sequences, len_cmp, BLOCK_C)
    if sequence < num_sequences:
        first_x, _ = sequence_rows(cu_ptr, sequence, len_x)
        first_y, num_y = sequence_rows(cu_cmp_ptr, sequence, len_cmp)
        block = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        d = tl.arange(0, BLOCK_D)
        ok = (block < num_y)[:, None] & (d < D)[None, :]
        row = (first_x + block * STRIDE).to(tl.int64) * stride_x + head * stride_xh
        acc = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
        partner = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
        swapped = partner_column(d, ROTARY)
        for i in tl.range(0, L):
            x = tl.load(x_ptr + row[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
            if weight_ptr is not None:
                weights = weight_ptr + (head * L + i) * D
                x *= tl.load(weights + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            acc += x
            if ROTARY > 0:
                x = tl.load(x_ptr + row[:, None] + swapped[None, :], mask=ok, other=0.0).to(
                    tl.float32
                )
                if weight_ptr is not None:
                    x *= tl.load(
                        weight_ptr + (head * L + i) * D + swapped, mask=d < D, other=0.0
                    ).to(tl.float32)[None, :]
                partner += x
            row += stride_x
        if weight_ptr is None:
            acc *= 1.0 / L
            partner *= 1.0 / L
        if ROTARY > 0:
            position = block * STRIDE + MIDDLE + position_offset
            same, other = rotation(frequency_ptr, position, d, magnitude, ROTARY)
            acc = acc * same + partner * other
        y_row = ((first_y + block).to(tl.int64) * HKV + head) * D
        tl.store(y_ptr + y_row[:, None] + d[None, :], acc.to(y_ptr.dtype.element_ty), mask=ok)
