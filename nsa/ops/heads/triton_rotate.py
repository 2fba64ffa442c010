"""Heads of a projection, rotated on the way; backward is the same the other way round with the angles' signs turned."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops._triton.rotation import cos_sin
from nsa.ops._triton.tiles import VARYING

# Tokens of a program, and the programs that share the heads of the same tokens.
BLOCK_ROWS = 32
HEAD_PROGRAMS = 2


@triton.jit
def move_heads(
    source, target, ok, cosine, sine, HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """This program's heads of one part, from rows at ``source`` ``[R, 1]`` to rows at ``target``."""
    HALF: tl.constexpr = ROTARY // 2
    for head in tl.range(tl.program_id(1), HEADS, tl.num_programs(1)):
        if ROTARY > 0:
            i = tl.arange(0, BLOCK_HALF)
            mask = ok[:, None] & (i < HALF)[None, :]
            at = head * D + i[None, :]
            first = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)  # [R, HALF]
            second = tl.load(source + at + HALF, mask=mask, other=0.0).to(tl.float32)
            rotated = first * cosine - second * sine
            tl.store(target + at, rotated.to(target.dtype.element_ty), mask=mask)
            rotated = second * cosine + first * sine
            tl.store(target + at + HALF, rotated.to(target.dtype.element_ty), mask=mask)
        if ROTARY < D:
            j = ROTARY + tl.arange(0, BLOCK_REST)
            rest = ok[:, None] & (j < D)[None, :]
            at = head * D + j[None, :]
            tl.store(target + at, tl.load(source + at, mask=rest), mask=rest)


@triton.jit(do_not_specialize=VARYING)
def rotate_heads_kernel(
    x_ptr, part_ptrs, positions_ptr, frequency_ptr, num_rows, stride_x, magnitude, position_offset,
    HEADS: tl.constexpr, SIZES: tl.constexpr, ROTARY: tl.constexpr, RESTS: tl.constexpr, BACKWARD: tl.constexpr,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """All parts of ``BLOCK_R`` tokens: from columns of x ``[T, columns]`` to the parts ``[T, HEADS, SIZES]``, or back.

    ``HEADS``, ``SIZES``, ``ROTARY`` and ``RESTS`` have an entry for each part: heads, their size, how many of their columns are
    rotated, and a block that holds the others; ``HALF`` is the number of frequencies.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = row < num_rows
    cosine = tl.zeros([BLOCK_R, BLOCK_HALF], tl.float32)
    sine = cosine
    if frequency_ptr is not None:
        i = tl.arange(0, BLOCK_HALF)
        frequency = tl.load(frequency_ptr + i, mask=i < HALF, other=0.0)
        position = (tl.load(positions_ptr + row, mask=ok, other=0) + position_offset).to(tl.float32)
        cosine, sine = cos_sin(position[:, None] * frequency[None, :])
        cosine *= magnitude
        sine *= -magnitude if BACKWARD else magnitude
    x_row = x_ptr + row[:, None] * stride_x
    for part in tl.static_range(len(HEADS)):
        part_row = part_ptrs[part] + row[:, None] * (HEADS[part] * SIZES[part])
        if BACKWARD:
            move_heads(part_row, x_row, ok, cosine, sine, HEADS[part], SIZES[part], ROTARY[part], BLOCK_HALF, RESTS[part])
        else:
            move_heads(x_row, part_row, ok, cosine, sine, HEADS[part], SIZES[part], ROTARY[part], BLOCK_HALF, RESTS[part])
        x_row += HEADS[part] * SIZES[part]


def split_forward(
    x: Tensor, positions: Tensor, frequency: Tensor, numbers: Sequence[int], sizes: Sequence[int], rotated: Sequence[bool],
    magnitude: float, position_offset: int,
) -> list[Tensor]:  # fmt: skip
    """``[T, number, size]`` of each part of ``x`` ``[T, columns]``, which is contiguous."""
    heads = [x.new_empty(x.shape[0], number, size) for number, size in zip(numbers, sizes, strict=True)]
    _rotate(x, heads, positions, frequency, rotated, magnitude, position_offset, backward=False)
    return heads


def split_backward(
    grads: Sequence[Tensor], positions: Tensor, frequency: Tensor, numbers: Sequence[int], sizes: Sequence[int],
    rotated: Sequence[bool], magnitude: float, position_offset: int,
) -> Tensor:  # fmt: skip
    """Gradient of the projection from those of the parts, which are contiguous."""
    columns = sum(number * size for number, size in zip(numbers, sizes, strict=True))
    dx = grads[0].new_empty(grads[0].shape[0], columns)
    _rotate(dx, grads, positions, frequency, rotated, magnitude, position_offset, backward=True)
    return dx


def _rotate(
    x: Tensor, parts: Sequence[Tensor], positions: Tensor, frequency: Tensor, rotated: Sequence[bool], magnitude: float,
    position_offset: int, *, backward: bool,
) -> None:  # fmt: skip
    """Columns of ``x`` to the parts, or back."""
    if not x.numel():
        return
    heads, sizes = (tuple(part.shape[dim] for part in parts) for dim in (1, 2))
    rotary = tuple(2 * frequency.shape[0] * turned for turned in rotated)
    rests = tuple(triton.next_power_of_2(max(size - columns, 1)) for size, columns in zip(sizes, rotary, strict=True))
    rotate_heads_kernel[(triton.cdiv(x.shape[0], BLOCK_ROWS), HEAD_PROGRAMS)](
        x, tuple(parts), positions, frequency if any(rotated) else None, x.shape[0], x.stride(0), magnitude, position_offset,
        HEADS=heads, SIZES=sizes, ROTARY=rotary, RESTS=rests, BACKWARD=backward, HALF=frequency.shape[0], BLOCK_R=BLOCK_ROWS,
        BLOCK_HALF=triton.next_power_of_2(max(frequency.shape[0], 1)), num_warps=4,
    )  # fmt: skip
