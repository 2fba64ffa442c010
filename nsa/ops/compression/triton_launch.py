"""Launchers of the compression kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nsa.ops._triton.sizes import cdiv, next_power_of_2
from nsa.ops.compression.triton_bwd import compress_dw_kernel, compress_dx_kernel
from nsa.ops.compression.triton_fwd import compress_fwd_kernel
from nsa.ops.compression.triton_gather import gather_bwd_kernel, gather_fwd_kernel
from nsa.rope import Rope, frequency_table

BLOCK_ROWS = 16
WEIGHT_PARTS = 64
WEIGHT_TILE = 2048  # elements of a tile of weights, at most
# Where registers are plentiful, ptxas may still spill a word for the sake of one more program on a
# multiprocessor; told how many it may use, it does not.
REGISTERS = 128


@dataclass(frozen=True)
class CompressLayout:
    """Sequences and blocks of a compression.

    Attributes:
        cu: int32 ``[B + 1]`` offsets of the tokens; None when all sequences are alike.
        cu_cmp: offsets of the compressed rows.
        num_sequences: B.
        len_x: tokens of each sequence when ``cu`` is None.
        len_cmp: compressed rows of each.
        size: compression block size.
        stride: compression stride.
        frequency: fp32 ``[rotary_dim / 2]``, radians a position; None leaves the result unrotated.
        middle: rotated position inside a block.
        magnitude: factor on cosine and sine.
        position_offset: added to every position.
    """

    cu: Tensor | None
    cu_cmp: Tensor | None
    num_sequences: int
    len_x: int
    len_cmp: int
    size: int
    stride: int
    frequency: Tensor | None = None
    middle: int = 0
    magnitude: float = 1.0
    position_offset: int = 0

    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """What every kernel takes."""
        return self.cu, self.cu_cmp, self.len_x, self.len_cmp, self.num_sequences

    def constants(self, x: Tensor) -> dict[str, int]:
        """What every kernel is compiled for."""
        return {
            "HKV": x.shape[1], "D": x.shape[2], "L": self.size, "STRIDE": self.stride,
            "ROTARY": 0 if self.frequency is None else 2 * self.frequency.shape[0], "MIDDLE": self.middle,
            "BLOCK_C": BLOCK_ROWS, "BLOCK_D": next_power_of_2(x.shape[2]), "num_warps": warps_of(x.shape[2]),
        }  # fmt: skip

    def num_tiles(self, rows: int, each: int, tile: int) -> int:
        """Tiles that cover ``rows`` packed rows."""
        return (
            self.num_sequences * -(-each // tile)
            if self.cu is None
            else rows // tile + self.num_sequences
        )


def layout_of(like: Tensor, *arguments: Any) -> CompressLayout:
    """The layout from the registered operator's arguments, rotation included, for tensors on the device of ``like``."""
    *where, text, middle = arguments
    layout = CompressLayout(*where)
    if not text:
        return layout
    rope = Rope.from_text(text)
    frequency = frequency_table(rope, like.device)
    return replace(
        layout,
        frequency=frequency,
        middle=middle,
        magnitude=rope.magnitude,
        position_offset=rope.position_offset,
    )


def warps_of(size: int) -> int:
    """Warps a program, by head size: as many as keep its tile in registers."""
    return 4 if size <= 128 else 8


def compress_forward(x: Tensor, weight: Tensor | None, layout: CompressLayout) -> Tensor:
    """``[S // d, Hkv, D]``, rotated if the layout says so; 0 in rows that no block owns."""
    num_rows = x.shape[0] // layout.stride
    y = torch.zeros(num_rows, *x.shape[1:], dtype=x.dtype, device=x.device)
    grid = (layout.num_tiles(num_rows, layout.len_cmp, BLOCK_ROWS), x.shape[1])
    if grid[0] and num_rows:
        compress_fwd_kernel[grid](
            x, weight, layout.frequency, y, *layout.arguments(), x.stride(0), x.stride(1), layout.magnitude,
            layout.position_offset, **layout.constants(x),
        )  # fmt: skip
    return y


def compress_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, num_tokens: int, layout: CompressLayout
) -> tuple[Tensor, Tensor | None]:
    """dx ``[num_tokens, Hkv, D]``, and the fp32 gradient of the weights ``[Hkv, l, D]`` (None for the mean)."""
    num_heads, size = dy.shape[1:]
    dx = torch.empty(num_tokens, num_heads, size, dtype=dy.dtype, device=dy.device)
    constants = layout.constants(dx)
    rotation = (layout.magnitude, layout.position_offset)
    grid = (layout.num_tiles(num_tokens, layout.len_x, BLOCK_ROWS * layout.stride), num_heads)
    if grid[0] and num_tokens:
        compress_dx_kernel[grid](
            dy, weight, layout.frequency, dx, *layout.arguments(), *rotation, **constants
        )  # fmt: skip
    if weight is None or x is None:
        return dx, None
    num_tiles = layout.num_tiles(num_tokens // layout.stride, layout.len_cmp, BLOCK_ROWS)
    parts = max(1, min(WEIGHT_PARTS, num_tiles))
    dw = torch.empty(parts, *weight.shape, dtype=torch.float32, device=x.device)
    rows = min(next_power_of_2(layout.size), WEIGHT_TILE // constants["BLOCK_D"])
    compress_dw_kernel[(parts, num_heads, cdiv(layout.size, rows))](
        dy, x, layout.frequency, dw, *layout.arguments(), num_tiles, x.stride(0), x.stride(1), *rotation, **constants,
        BLOCK_L=rows, maxnreg=REGISTERS,
    )  # fmt: skip
    return dx, dw.sum(0)


def gather_forward(x: Tensor, layout: CompressLayout) -> Tensor:
    """The tokens of every block, ``[Hkv, S // d, l, D]``; 0 in rows that no block owns."""
    num_rows, (num_heads, size) = x.shape[0] // layout.stride, x.shape[1:]
    out = torch.zeros(num_heads, num_rows, layout.size, size, dtype=x.dtype, device=x.device)
    grid = (layout.num_tiles(num_rows, layout.len_cmp, BLOCK_ROWS), num_heads)
    if grid[0] and num_rows:
        gather_fwd_kernel[grid](
            x, out, *layout.arguments(), num_rows, x.stride(0), x.stride(1), D=size, L=layout.size, STRIDE=layout.stride,
            BLOCK_C=BLOCK_ROWS, BLOCK_D=next_power_of_2(size), num_warps=warps_of(size), maxnreg=REGISTERS,
        )  # fmt: skip
    return out


def gather_backward(dblocks: Tensor, num_tokens: int, layout: CompressLayout) -> Tensor:
    """Gradient ``[num_tokens, Hkv, D]`` of what :func:`gather_forward` read."""
    num_heads, num_rows, _, size = dblocks.shape
    dx = torch.empty(num_tokens, num_heads, size, dtype=dblocks.dtype, device=dblocks.device)
    grid = (layout.num_tiles(num_tokens, layout.len_x, BLOCK_ROWS * layout.stride), num_heads)
    if grid[0] and num_tokens:
        gather_bwd_kernel[grid](
            dblocks, dx, *layout.arguments(), num_rows, HKV=num_heads, D=size, L=layout.size, STRIDE=layout.stride,
            BLOCK_C=BLOCK_ROWS, BLOCK_D=next_power_of_2(size), num_warps=warps_of(size), maxnreg=REGISTERS,
        )  # fmt: skip
    return dx
