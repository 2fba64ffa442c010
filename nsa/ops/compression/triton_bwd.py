"""Backward of compression: gradient of the raw rows, and of learned weights."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.rotation import partner_column, rotation
from nsa.ops._triton.tiles import VARYING, find_tile, sequence_rows


@triton.jit
def load_unrotated(
    dy_ptr, frequency_ptr, row, block, ok, d, magnitude, position_offset, D: tl.constexpr, STRIDE: tl.constexpr,
    ROTARY: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    """Gradient of the compressed rows before their rotation, ``[N, BLOCK_D]`` fp32: the transposed rotation of dy."""
    mask = ok[:, None] & (d < D)[None, :]
    dy = tl.load(dy_ptr + row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTARY > 0:
        swapped = partner_column(d, ROTARY)
        partner = tl.load(dy_ptr + row[:, None] + swapped[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        same, other = rotation(
            frequency_ptr, block * STRIDE + MIDDLE + position_offset, d, magnitude, ROTARY
        )
        dy = dy * same - partner * other
    return dy


@kernel(do_not_specialize=VARYING)
def compress_dx_kernel(
    dy_ptr, weight_ptr, frequency_ptr, dx_ptr, cu_ptr, cu_cmp_ptr, len_x, len_cmp, num_sequences, magnitude, position_offset,
    HKV: tl.constexpr, D: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, ROTARY: tl.constexpr, MIDDLE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx of the tokens of ``BLOCK_C`` strides of one head: token ``c * d + i`` lies in blocks c, c - 1, .. c - l / d + 1."""
    head = tl.program_id(1)
    OVERLAP: tl.constexpr = L // STRIDE
    TILE: tl.constexpr = BLOCK_C * STRIDE
    sequence, tile = find_tile(cu_ptr, tl.program_id(0), num_sequences, len_x, TILE)
    if sequence < num_sequences:
        first_x, num_x = sequence_rows(cu_ptr, sequence, len_x)
        first_y, num_y = sequence_rows(cu_cmp_ptr, sequence, len_cmp)
        c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        d = tl.arange(0, BLOCK_D)
        if weight_ptr is None:
            total = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
            for back in tl.static_range(OVERLAP):
                block = c - back
                ok = (block >= 0) & (block < num_y)
                row = ((first_y + block).to(tl.int64) * HKV + head) * D
                total += load_unrotated(
                    dy_ptr,
                    frequency_ptr,
                    row,
                    block,
                    ok,
                    d,
                    magnitude,
                    position_offset,
                    D,
                    STRIDE,
                    ROTARY,
                    MIDDLE,
                )
            total *= 1.0 / L
        for i in tl.range(0, STRIDE):
            token = c * STRIDE + i
            if weight_ptr is not None:
                total = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
                for back in tl.static_range(OVERLAP):
                    block = c - back
                    ok = (block >= 0) & (block < num_y)
                    row = ((first_y + block).to(tl.int64) * HKV + head) * D
                    dy = load_unrotated(
                        dy_ptr,
                        frequency_ptr,
                        row,
                        block,
                        ok,
                        d,
                        magnitude,
                        position_offset,
                        D,
                        STRIDE,
                        ROTARY,
                        MIDDLE,
                    )
                    weights = weight_ptr + (head * L + i + back * STRIDE) * D
                    total += (
                        dy * tl.load(weights + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
                    )
            out = ((first_x + token).to(tl.int64) * HKV + head) * D
            mask = (token < num_x)[:, None] & (d < D)[None, :]
            tl.store(
                dx_ptr + out[:, None] + d[None, :], total.to(dx_ptr.dtype.element_ty), mask=mask
            )


@kernel(do_not_specialize=VARYING)
def compress_dw_kernel(
    dy_ptr, x_ptr, frequency_ptr, dw_ptr, cu_ptr, cu_cmp_ptr, len_x, len_cmp, num_sequences, num_tiles, stride_x, stride_xh,
    magnitude, position_offset, HKV: tl.constexpr, D: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, ROTARY: tl.constexpr,
    MIDDLE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Partial gradient of ``BLOCK_L`` rows of the weights ``[l, D]`` of one head, from every num_programs-th tile of blocks."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    mask = (i < L)[:, None] & (d < D)[None, :]
    total = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    for number in tl.range(part, num_tiles, tl.num_programs(0)):
        sequence, tile = find_tile(cu_cmp_ptr, number, num_sequences, len_cmp, BLOCK_C)
        if sequence < num_sequences:
            first_x, _ = sequence_rows(cu_ptr, sequence, len_x)
            first_y, num_y = sequence_rows(cu_cmp_ptr, sequence, len_cmp)
            for c in tl.range(tile * BLOCK_C, tl.minimum(tile * BLOCK_C + BLOCK_C, num_y)):
                block = c + tl.zeros([1], tl.int32)
                row = ((first_y + block).to(tl.int64) * HKV + head) * D
                dy = load_unrotated(
                    dy_ptr,
                    frequency_ptr,
                    row,
                    block,
                    block >= 0,
                    d,
                    magnitude,
                    position_offset,
                    D,
                    STRIDE,
                    ROTARY,
                    MIDDLE,
                )
                x_row = (first_x + c * STRIDE + i).to(tl.int64) * stride_x + head * stride_xh
                total += dy * tl.load(x_ptr + x_row[:, None] + d[None, :], mask=mask, other=0.0).to(
                    tl.float32
                )
    out = ((part.to(tl.int64) * HKV + head) * L + i) * D
    tl.store(dw_ptr + out[:, None] + d[None, :], total, mask=mask)
