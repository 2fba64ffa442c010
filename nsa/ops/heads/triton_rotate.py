"""Heads of a projection, rotated on the way; backward is the same the other way round with the angles' signs turned."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops._triton.rotation import cos_sin
from nsa.ops._triton.tiles import VARYING

BLOCK_ROWS = 32


@triton.jit(do_not_specialize=VARYING)
def rotate_heads_kernel(
    x_ptr, y_ptr, positions_ptr, frequency_ptr, num_rows, stride_x, stride_y, magnitude, position_offset,
    HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, INVERSE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """All heads of ``BLOCK_R`` tokens, one after another, from x to y; the first ``ROTARY`` of their columns are rotated."""
    HALF: tl.constexpr = ROTARY // 2
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = row < num_rows
    x_row = x_ptr + row[:, None] * stride_x
    y_row = y_ptr + row[:, None] * stride_y
    if ROTARY > 0:
        i = tl.arange(0, BLOCK_HALF)
        mask = ok[:, None] & (i < HALF)[None, :]
        frequency = tl.load(frequency_ptr + i, mask=i < HALF, other=0.0)
        position = (tl.load(positions_ptr + row, mask=ok, other=0) + position_offset).to(tl.float32)
        cosine, sine = cos_sin(position[:, None] * frequency[None, :])
        cosine *= magnitude
        sine *= -magnitude if INVERSE else magnitude
        for head in tl.range(0, HEADS):
            at = head * D + i[None, :]
            first = tl.load(x_row + at, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(x_row + at + HALF, mask=mask, other=0.0).to(tl.float32)
            tl.store(y_row + at, (first * cosine - second * sine).to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_row + at + HALF, (second * cosine + first * sine).to(y_ptr.dtype.element_ty), mask=mask)
    if ROTARY < D:
        j = ROTARY + tl.arange(0, BLOCK_REST)
        rest = ok[:, None] & (j < D)[None, :]
        for head in tl.range(0, HEADS):
            at = head * D + j[None, :]
            tl.store(y_row + at, tl.load(x_row + at, mask=rest), mask=rest)


def split_forward(
    x: Tensor, positions: Tensor, frequency: Tensor, numbers: Sequence[int], sizes: Sequence[int], rotated: Sequence[bool],
    magnitude: float, position_offset: int,
) -> list[Tensor]:  # fmt: skip
    """``[T, number, size]`` of each part of ``x`` ``[T, columns]``, which is contiguous."""
    heads, column = [], 0
    for number, size, turned in zip(numbers, sizes, rotated, strict=True):
        y = x.new_empty(x.shape[0], number, size)
        _rotate(
            x[:, column : column + number * size], y.flatten(1), positions, frequency if turned else None, number, size,
            magnitude, position_offset, inverse=False,
        )  # fmt: skip
        heads.append(y)
        column += number * size
    return heads


def split_backward(
    grads: Sequence[Tensor], positions: Tensor, frequency: Tensor, numbers: Sequence[int], sizes: Sequence[int],
    rotated: Sequence[bool], magnitude: float, position_offset: int,
) -> Tensor:  # fmt: skip
    """Gradient of the projection from those of the parts, which are contiguous."""
    columns = sum(number * size for number, size in zip(numbers, sizes, strict=True))
    dx = grads[0].new_empty(grads[0].shape[0], columns)
    column = 0
    for grad, number, size, turned in zip(grads, numbers, sizes, rotated, strict=True):
        _rotate(
            grad.flatten(1), dx[:, column : column + number * size], positions, frequency if turned else None, number, size,
            magnitude, position_offset, inverse=True,
        )  # fmt: skip
        column += number * size
    return dx


def _rotate(
    x: Tensor, y: Tensor, positions: Tensor, frequency: Tensor | None, number: int, size: int, magnitude: float,
    position_offset: int, *, inverse: bool,
) -> None:  # fmt: skip
    """Columns ``[T, number * size]`` of x to those of y."""
    rotary = 0 if frequency is None else 2 * frequency.shape[0]
    if x.numel():
        rotate_heads_kernel[(triton.cdiv(x.shape[0], BLOCK_ROWS),)](
            x, y, positions, frequency, x.shape[0], x.stride(0), y.stride(0), magnitude, position_offset,
            HEADS=number, D=size, ROTARY=rotary, INVERSE=inverse, BLOCK_R=BLOCK_ROWS,
            BLOCK_HALF=triton.next_power_of_2(max(rotary // 2, 1)), BLOCK_REST=triton.next_power_of_2(max(size - rotary, 1)),
            num_warps=4,
        )  # fmt: skip
