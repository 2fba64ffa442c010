"""Kernels of compression (phi of Eq. 7) by mean or weights, including the rotation of the result.

Block c of a sequence contains the tokens ``[c * d, c * d + l)``; the result y is ``[C, Hkv, D]``.
With ``WHOLE`` nothing is summed: y then contains the tokens of every block, ``[Hkv, C, l, D]``, for
the matmuls of phi ``mlp``.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import (
    VARYING,
    find_tile,
    load_fp32,
    partner_column,
    rotation,
    sequence_rows,
)


class Sizes(NamedTuple):
    """Sizes, as compile-time constants.

    Attributes:
        HKV: KV heads.
        D: head size.
        L: compression block size.
        STRIDE: compression stride.
        ROTARY: number of rotated columns of a head.
        WHOLE: whether y contains the tokens of every block.
        BLOCK_C: blocks (or strides of tokens) per tile.
        BLOCK_D: columns of a tile.
        AHEAD: tokens of a block that are loaded at a time.
    """

    HKV: int
    D: int
    L: int
    STRIDE: int
    ROTARY: int
    WHOLE: bool
    BLOCK_C: int
    BLOCK_D: int
    AHEAD: int


@triton.jit
def y_offset(first_y, block, head, num_rows, SIZES: tl.constexpr):
    """Element offset in y of blocks of one head and sequence."""
    if SIZES.WHOLE:
        return (head.to(tl.int64) * num_rows + first_y + block) * (SIZES.L * SIZES.D)
    else:
        return ((first_y + block).to(tl.int64) * SIZES.HKV + head) * SIZES.D


@triton.jit
def first_position(starts_ptr, sequence, position_offset):
    """Position at which the first block of a sequence is rotated."""
    if starts_ptr is None:
        return position_offset
    else:
        return position_offset + tl.load(starts_ptr + sequence)


@triton.jit
def load_unrotated(dy_ptr, rope, offset, block, ok, d, SIZES: tl.constexpr):
    """Gradient of the compressed rows before rotation: the transposed rotation of dy.

    ``[N, BLOCK_D]`` fp32 for blocks ``[N]`` at ``offset``.
    """
    mask = ok[:, None] & (d < SIZES.D)[None, :]
    dy = load_fp32(dy_ptr + offset[:, None] + d[None, :], mask)
    if SIZES.ROTARY > 0:
        frequency_ptr, magnitude, first = rope
        swapped = partner_column(d, SIZES.ROTARY)
        partner = load_fp32(dy_ptr + offset[:, None] + swapped[None, :], mask)
        position = block * SIZES.STRIDE + first
        same, other = rotation(frequency_ptr, position, d, magnitude, SIZES.ROTARY)
        dy = dy * same - partner * other
    return dy


@kernel(do_not_specialize=VARYING)
def compress_fwd_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    cu_ptr,
    cu_cmp_ptr,
    len_x,
    len_cmp,
    num_sequences,
    num_rows,
    frequency_ptr,
    magnitude,
    position_offset,
    starts_ptr,
    stride_x,
    stride_xh,
    SIZES: tl.constexpr,
):
    """Write y; program (i, h) computes head h of the i-th tile of ``BLOCK_C`` blocks."""
    head = tl.program_id(1)
    number = tl.program_id(0)
    sequence, tile = find_tile(cu_cmp_ptr, number, num_sequences, len_cmp, SIZES.BLOCK_C)
    if sequence < num_sequences:
        first_x, _ = sequence_rows(cu_ptr, sequence, len_x)
        first_y, num_y = sequence_rows(cu_cmp_ptr, sequence, len_cmp)
        block = tile * SIZES.BLOCK_C + tl.arange(0, SIZES.BLOCK_C)
        d = tl.arange(0, SIZES.BLOCK_D)
        mask = (block < num_y)[:, None] & (d < SIZES.D)[None, :]
        row = (first_x + block * SIZES.STRIDE).to(tl.int64) * stride_x + head * stride_xh
        y = y_ptr + y_offset(first_y, block, head, num_rows, SIZES)[:, None] + d[None, :]
        total = tl.zeros(mask.shape, tl.float32)  # [BLOCK_C, BLOCK_D]
        partner = tl.zeros(mask.shape, tl.float32)
        swapped = partner_column(d, SIZES.ROTARY)
        for i in tl.range(0, SIZES.L, loop_unroll_factor=SIZES.AHEAD):
            x = tl.load(x_ptr + row[:, None] + d[None, :], mask=mask, other=0.0)
            if SIZES.WHOLE:
                tl.store(y + i * SIZES.D, x, mask=mask)
            else:
                weights = (head * SIZES.L + i) * SIZES.D
                total += weighted(x, weight_ptr, weights + d, d < SIZES.D)
                if SIZES.ROTARY > 0:
                    x = tl.load(x_ptr + row[:, None] + swapped[None, :], mask=mask, other=0.0)
                    partner += weighted(x, weight_ptr, weights + swapped, d < SIZES.D)
            row += stride_x
        if not SIZES.WHOLE:
            if weight_ptr is None:
                total *= 1.0 / SIZES.L
                partner *= 1.0 / SIZES.L
            if SIZES.ROTARY > 0:
                place = first_position(starts_ptr, sequence, position_offset)
                position = block * SIZES.STRIDE + place
                same, other = rotation(frequency_ptr, position, d, magnitude, SIZES.ROTARY)
                total = total * same + partner * other
            tl.store(y, total, mask=mask)


@triton.jit
def weighted(x, weight_ptr, at, mask):
    """x ``[N, BLOCK_D]`` in fp32, multiplied by the weights ``[BLOCK_D]`` if there are any."""
    x = x.to(tl.float32)
    if weight_ptr is not None:
        x *= load_fp32(weight_ptr + at, mask)[None, :]
    return x


@triton.jit
def token_gradient(source, c, i, head, SIZES: tl.constexpr):
    """Gradient ``[BLOCK_C, BLOCK_D]`` of the i-th token of each stride c, over all its blocks."""
    dy_ptr, weight_ptr, rope, first_y, num_y, num_rows = source
    d = tl.arange(0, SIZES.BLOCK_D)
    total = 0.0
    for back in tl.static_range(SIZES.L // SIZES.STRIDE):
        block = c - back
        ok = (block >= 0) & (block < num_y)
        offset = y_offset(first_y, block, head, num_rows, SIZES)
        token = i + back * SIZES.STRIDE  # index in the block
        if SIZES.WHOLE:
            offset += token * SIZES.D
        dy = load_unrotated(dy_ptr, rope, offset, block, ok, d, SIZES)
        weights = (head * SIZES.L + token) * SIZES.D
        total += weighted(dy, weight_ptr, weights + d, d < SIZES.D)
    return total


@kernel(do_not_specialize=VARYING)
def compress_dx_kernel(
    dy_ptr,
    weight_ptr,
    dx_ptr,
    cu_ptr,
    cu_cmp_ptr,
    len_x,
    len_cmp,
    num_sequences,
    num_rows,
    frequency_ptr,
    magnitude,
    position_offset,
    starts_ptr,
    SIZES: tl.constexpr,
):
    """Write dx ``[T, Hkv, D]``; program (i, h) computes head h of the i-th tile of strides.

    Token ``c * d + i`` is in the blocks c, c - 1, .. c - l / d + 1.
    """
    head = tl.program_id(1)
    number = tl.program_id(0)
    TILE: tl.constexpr = SIZES.BLOCK_C * SIZES.STRIDE
    MEAN: tl.constexpr = weight_ptr is None and not SIZES.WHOLE
    sequence, tile = find_tile(cu_ptr, number, num_sequences, len_x, TILE)
    if sequence < num_sequences:
        first_x, num_x = sequence_rows(cu_ptr, sequence, len_x)
        first_y, num_y = sequence_rows(cu_cmp_ptr, sequence, len_cmp)
        place = first_position(starts_ptr, sequence, position_offset)
        rope = (frequency_ptr, magnitude, place)
        source = (dy_ptr, weight_ptr, rope, first_y, num_y, num_rows)
        c = tile * SIZES.BLOCK_C + tl.arange(0, SIZES.BLOCK_C)
        d = tl.arange(0, SIZES.BLOCK_D)
        if MEAN:  # equal for all tokens of a stride
            total = token_gradient(source, c, 0, head, SIZES) * (1.0 / SIZES.L)
        for i in tl.range(0, SIZES.STRIDE):
            if not MEAN:
                total = token_gradient(source, c, i, head, SIZES)
            token = c * SIZES.STRIDE + i
            out = ((first_x + token).to(tl.int64) * SIZES.HKV + head) * SIZES.D
            mask = (token < num_x)[:, None] & (d < SIZES.D)[None, :]
            tl.store(dx_ptr + out[:, None] + d[None, :], total, mask=mask)


@kernel(do_not_specialize=VARYING)
def compress_dw_kernel(
    dy_ptr,
    x_ptr,
    dw_ptr,
    cu_ptr,
    cu_cmp_ptr,
    len_x,
    len_cmp,
    num_sequences,
    num_tiles,
    frequency_ptr,
    magnitude,
    position_offset,
    starts_ptr,
    stride_x,
    stride_xh,
    SIZES: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Partial gradients of the weights, fp32 ``[parts, Hkv, l, D]``.

    Program (p, h, j) computes the j-th ``BLOCK_L`` weights of head h, summed over tiles of blocks
    p, p + num_programs, ...
    """
    part = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    d = tl.arange(0, SIZES.BLOCK_D)
    mask = (i < SIZES.L)[:, None] & (d < SIZES.D)[None, :]
    total = tl.zeros(mask.shape, tl.float32)  # [BLOCK_L, BLOCK_D]
    for number in tl.range(part, num_tiles, tl.num_programs(0)):
        sequence, tile = find_tile(cu_cmp_ptr, number, num_sequences, len_cmp, SIZES.BLOCK_C)
        if sequence < num_sequences:
            first_x, _ = sequence_rows(cu_ptr, sequence, len_x)
            first_y, num_y = sequence_rows(cu_cmp_ptr, sequence, len_cmp)
            begin = tile * SIZES.BLOCK_C
            place = first_position(starts_ptr, sequence, position_offset)
            rope = (frequency_ptr, magnitude, place)
            for c in tl.range(begin, tl.minimum(begin + SIZES.BLOCK_C, num_y)):
                block = c + tl.zeros([1], tl.int32)
                offset = y_offset(first_y, block, head, 0, SIZES)
                dy = load_unrotated(dy_ptr, rope, offset, block, block >= 0, d, SIZES)
                row = (first_x + c * SIZES.STRIDE + i).to(tl.int64) * stride_x + head * stride_xh
                total += dy * load_fp32(x_ptr + row[:, None] + d[None, :], mask)
    out = ((part.to(tl.int64) * SIZES.HKV + head) * SIZES.L + i) * SIZES.D
    tl.store(dw_ptr + out[:, None] + d[None, :], total, mask=mask)
