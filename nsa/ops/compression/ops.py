"""``nsa::compress``: launchers of its kernels, and its registration with PyTorch.

Triton is loaded when an operator first runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops._limits import check_keys
from nsa.ops._range import rows
from nsa.ops._register import register
from nsa.ops._sequences import Sequences
from nsa.rope import Rope, frequency_table

BLOCK_ROWS = 16
WEIGHT_PARTS = 64
WEIGHT_TILE = 2048  # elements of a tile of weights, at most
# Where registers are plentiful, ptxas may still spill one for the sake of one more program on a
# multiprocessor; told how many it may use, it does not.
REGISTERS = 128


class Blocks(NamedTuple):
    """The last arguments of the operators: sequences, and what becomes of their blocks.

    Attributes:
        cu: int32 ``[B + 1]`` offsets of the tokens; None when all sequences have the same length.
        cu_cmp: offsets of the compressed rows.
        starts: position of the first token of each sequence, int32 ``[B]``; None: all 0.
        num_sequences: B.
        len_x: tokens of each sequence when ``cu`` is None.
        len_cmp: compressed rows of each.
        size: compression block size.
        stride: compression stride.
        whole: give the tokens of every block, not their sum.
        rope: of :attr:`Rope.text`; empty for a result that is not rotated.
        middle: rotated position inside a block.
    """

    cu: Tensor | None
    cu_cmp: Tensor | None
    starts: Tensor | None
    num_sequences: int
    len_x: int
    len_cmp: int
    size: int
    stride: int
    whole: bool
    rope: str
    middle: int

    def sequences(self, like: Tensor) -> Sequences:
        """Where the sequences lie, in tokens and in compressed rows."""
        offsets = None if self.cu is None or self.cu_cmp is None else (self.cu, self.cu_cmp)
        return Sequences(offsets, self.num_sequences, self.len_x, self.len_cmp, like.device)

    def launch(self, like: Tensor, num_heads: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What every kernel takes of the rotation, and its constants and options.

        The rotation is radians a position, fp32 ``[rope.dim / 2]``, factor, position of a block at
        the start of a sequence, and :attr:`starts`.
        """
        from nsa.ops._triton.sizes import next_power_of_2
        from nsa.ops.compression.kernels import Sizes

        rotary = 0
        rotation: tuple[Any, ...] = (None, 1.0, 0, None)
        if self.rope:
            rope = Rope.from_text(self.rope)
            table = frequency_table(rope, like.device)
            rotary = rope.dim
            offset = rope.position_offset + self.middle
            rotation = (table, rope.magnitude, offset, self.starts)
        size = like.shape[-1]
        tile = (BLOCK_ROWS, next_power_of_2(size))
        sizes = Sizes(num_heads, size, self.size, self.stride, rotary, self.whole, *tile)
        # As many warps as keep a tile in registers.
        options = {"num_warps": 4 if size <= 128 else 8}
        if self.whole:
            options["maxnreg"] = REGISTERS
        return rotation, {"SIZES": sizes, **options}


def _forward(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    from nsa.ops.compression.kernels import compress_fwd_kernel

    blocks, sequences = Blocks(*rest), Blocks(*rest).sequences(x)
    check_keys("compress", "x", x)
    x, y = rows(x), _result(x, weight, *rest)
    num_rows, num_heads = x.shape[0] // blocks.stride, x.shape[1]
    num_tiles = sequences.num_tiles(num_rows, BLOCK_ROWS, blocks.len_cmp)
    rotation, constants = blocks.launch(x, num_heads)
    if num_tiles and num_rows:
        compress_fwd_kernel[(num_tiles, num_heads)](
            x,
            None if weight is None else weight.contiguous(),
            y,
            *sequences.arguments(),
            num_rows,
            *rotation,
            x.stride(0),
            x.stride(1),
            **constants,
        )
    return y


def _result(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    """``[C, Hkv, D]`` or, if whole, ``[Hkv, C, l, D]``; 0 in rows that no block owns."""
    blocks, (num_tokens, num_heads, size) = Blocks(*rest), x.shape
    num_rows = num_tokens // blocks.stride
    if blocks.whole:
        return x.new_zeros(num_heads, num_rows, blocks.size, size)
    return x.new_zeros(num_rows, num_heads, size)


def _backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, num_tokens: int, *rest: Any
) -> list[Tensor]:
    """dx ``[num_tokens, Hkv, D]`` and, with weights, their gradient ``[Hkv, l, D]``."""
    from nsa.ops._triton.sizes import cdiv, next_power_of_2
    from nsa.ops.compression.kernels import compress_dw_kernel, compress_dx_kernel

    blocks, sequences = Blocks(*rest), Blocks(*rest).sequences(dy)
    dy, weight = dy.contiguous(), None if weight is None else weight.contiguous()
    dx, *_ = _gradients(dy, x, weight, num_tokens, *rest)
    num_heads = dx.shape[1]
    rotation, constants = blocks.launch(dx, num_heads)
    num_rows = num_tokens // blocks.stride
    num_tiles = sequences.num_tiles(num_tokens, BLOCK_ROWS * blocks.stride, blocks.len_x)
    if num_tiles and num_tokens:
        compress_dx_kernel[(num_tiles, num_heads)](
            dy, weight, dx, *sequences.arguments(), num_rows, *rotation, **constants
        )
    if weight is None or x is None:
        return [dx]
    x, num_tiles = rows(x), sequences.num_tiles(num_rows, BLOCK_ROWS, blocks.len_cmp)
    parts = max(1, min(WEIGHT_PARTS, num_tiles))
    dw = x.new_empty(parts, *weight.shape, dtype=torch.float32)
    tile = min(next_power_of_2(blocks.size), WEIGHT_TILE // constants["SIZES"].BLOCK_D)
    compress_dw_kernel[(parts, num_heads, cdiv(blocks.size, tile))](
        dy,
        x,
        dw,
        *sequences.arguments(),
        num_tiles,
        *rotation,
        x.stride(0),
        x.stride(1),
        **constants,
        BLOCK_L=tile,
        maxnreg=REGISTERS,
    )
    return [dx, dw.sum(0).to(weight.dtype)]


def _gradients(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, num_tokens: int, *rest: Any
) -> list[Tensor]:
    num_heads = dy.shape[0 if Blocks(*rest).whole else 1]
    dx = dy.new_empty(num_tokens, num_heads, dy.shape[-1])
    return [dx] if weight is None else [dx, weight.new_empty(weight.shape)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cu, cu_cmp, starts, *ctx.rest = inputs
    ctx.num_tokens = x.shape[0]
    # Without weights the gradient needs no values of x.
    ctx.save_for_backward(None if weight is None else x, weight, cu, cu_cmp, starts)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, *places = ctx.saved_tensors
    grads = compress_backward_op(dy, x, weight, ctx.num_tokens, *places, *ctx.rest)
    return *grads, *(None,) * (5 + len(ctx.rest) - len(grads))


_BLOCKS = (
    "Tensor? cu, Tensor? cu_cmp, Tensor? starts, SymInt num_sequences, SymInt len_x, "
    "SymInt len_cmp, int size, int stride, bool whole, str rope, int middle"
)
compress_op = register(
    "compress",
    f"(Tensor x, Tensor? weight, {_BLOCKS}) -> Tensor",
    _forward,
    _result,
    setup_context=_setup_context,
    backward=_differentiate,
)
compress_backward_op = register(
    "compress_backward",
    f"(Tensor dy, Tensor? x, Tensor? weight, SymInt num_tokens, {_BLOCKS}) -> Tensor[]",
    _backward,
    _gradients,
)
