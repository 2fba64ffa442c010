"""``nsa::compress``: launchers of its kernels, and its registration with PyTorch.

Triton is imported at the first launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops._checks import check_keys
from nsa.ops._layout import cdiv, next_power_of_2, rows
from nsa.ops._packed import compressed_rows
from nsa.ops._plan import is_fake, once
from nsa.ops._register import register
from nsa.ops._sequences import Sequences
from nsa.rope import Rope, frequency_table

if TYPE_CHECKING:
    from nsa.ops._triton.kernel import Launch

BLOCK_ROWS = 16
# Bytes of each block that are loaded at a time: a short batch has too few programs to fill a GPU,
# so each waits for memory.
LOADED_BYTES = 1024
WEIGHT_PARTS = 64
WEIGHT_TILE = 2048  # maximum number of elements of a weight tile
# Registers per thread. With an explicit limit ptxas does not spill a register just to fit one more
# program on a multiprocessor.
REGISTERS = 128


class Blocks(NamedTuple):
    """The last arguments of the operators: sequences and sizes.

    Attributes:
        cu: int32 ``[B + 1]`` offsets of the tokens; None if all sequences have equal length.
        cu_cmp: offsets of the compressed rows.
        starts: position of the first token of each sequence, int32 ``[B]``; None means 0.
        num_sequences: B.
        len_x: tokens of each sequence if ``cu`` is None.
        len_cmp: compressed rows of each sequence if ``cu`` is None.
        size: compression block size.
        stride: compression stride.
        whole: whether to return the tokens of every block instead of their sum.
        ropes: :attr:`Rope.text` of each tensor; empty if its result is not rotated.
        middle: position inside a block at which it is rotated.
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
    ropes: list[str]
    middle: int

    def sequences(self, like: Tensor) -> Sequences:
        """Return the sequence layout, in tokens and in compressed rows."""
        offsets = None if self.cu is None or self.cu_cmp is None else (self.cu, self.cu_cmp)
        return Sequences(offsets, self.num_sequences, self.len_x, self.len_cmp, like.device)

    def rotation(self, like: Tensor, rope_text: str) -> tuple[Any, ...]:
        """Kernel arguments that describe the rotation.

        They are the frequencies in radians per position, fp32 ``[rope.dim / 2]``, the magnitude,
        the position of a block at the start of a sequence, and :attr:`starts`.
        """
        if not rope_text:
            return None, 1.0, 0, None
        rope = Rope.from_text(rope_text)
        table, offset = frequency_table(rope, like.device), rope.position_offset + self.middle
        return table, rope.magnitude, offset, self.starts

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        like: Tensor,
        rope_text: str,
        is_limited: bool,
        **constants: int,
    ) -> Launch:
        """Launch with a grid (tiles, KV heads, ...) for heads as those of ``like``.

        Without ``is_limited`` the registers are limited only if whole blocks are written.
        """
        from nsa.ops._triton.kernel import Launch
        from nsa.ops.compression.kernels import Sizes

        rotary, size = Rope.from_text(rope_text).dim if rope_text else 0, like.shape[-1]
        tile = (BLOCK_ROWS, next_power_of_2(size))
        ahead = max(1, LOADED_BYTES // (tile[1] * like.element_size()))
        sizes = Sizes(grid[1], size, self.size, self.stride, rotary, self.whole, *tile, ahead)
        # Enough warps to keep a tile in registers.
        options = {"num_warps": 4 if size <= 128 else 8}
        if is_limited or self.whole:
            options["maxnreg"] = REGISTERS
        return Launch(kernel, grid, SIZES=sizes, **constants, **options)


def _forward(xs: list[Tensor], weights: list[Tensor | None], *rest: Any) -> list[Tensor]:
    """Results ``[C, Hkv, D]``, or ``[Hkv, C, l, D]`` if whole; unused rows are 0."""
    blocks = Blocks(*rest)
    return [_compress(*given, blocks) for given in zip(xs, weights, blocks.ropes, strict=True)]


def _compress(x: Tensor, weight: Tensor | None, rope: str, blocks: Blocks) -> Tensor:
    num_tokens, num_heads, size = x.shape
    num_rows = compressed_rows(num_tokens, blocks.stride)
    shape = (num_heads, num_rows, blocks.size) if blocks.whole else (num_rows, num_heads)
    y = x.new_zeros(*shape, size)
    if is_fake(x):
        return y
    from nsa.ops.compression.kernels import compress_fwd_kernel

    check_keys("x", x)
    sequences, x = blocks.sequences(x), rows(x)
    grid = (sequences.num_tiles(num_rows, BLOCK_ROWS, blocks.len_cmp), num_heads)
    if grid[0] and num_tokens:
        launch = once(lambda: blocks.launch(compress_fwd_kernel, grid, x, rope, size > 128))
        weight = None if weight is None else weight.contiguous()
        where = (*sequences.arguments(), num_rows, *blocks.rotation(x, rope))
        launch(x, weight, y, *where, *x.stride()[:2])
    return y


def _backward(
    dys: list[Tensor],
    xs: list[Tensor | None],
    weights: list[Tensor | None],
    num_tokens: int,
    *rest: Any,
) -> list[Tensor]:
    """Gradients dx ``[num_tokens, Hkv, D]`` and, with weights, dweight ``[Hkv, l, D]``."""
    blocks, found = Blocks(*rest), list[Tensor]()
    for dy, x, weight, rope in zip(dys, xs, weights, blocks.ropes, strict=True):
        found += _gradients_of(dy, x, weight, rope, num_tokens, blocks)
    return found


def _gradients_of(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, rope: str, num_tokens: int, blocks: Blocks
) -> list[Tensor]:
    dx = dy.new_empty(num_tokens, dy.shape[0 if blocks.whole else 1], dy.shape[-1])
    if is_fake(dy):
        return [dx] if weight is None else [dx, weight.new_empty(weight.shape)]
    from nsa.ops.compression.kernels import compress_dw_kernel, compress_dx_kernel

    sequences = blocks.sequences(dy)
    dy, weight = dy.contiguous(), None if weight is None else weight.contiguous()
    _, num_heads, head_size = dx.shape
    rotation, num_rows = blocks.rotation(dx, rope), compressed_rows(num_tokens, blocks.stride)
    tile = BLOCK_ROWS * blocks.stride
    grid = (sequences.num_tiles(num_tokens, tile, blocks.len_x), num_heads)
    if grid[0] and num_tokens:
        launch = once(lambda: blocks.launch(compress_dx_kernel, grid, dx, rope, False))
        launch(dy, weight, dx, *sequences.arguments(), num_rows, *rotation)
    if weight is None or x is None:
        return [dx]
    x, num_tiles = rows(x), sequences.num_tiles(num_rows, BLOCK_ROWS, blocks.len_cmp)
    parts = max(1, min(WEIGHT_PARTS, num_tiles))
    dw = x.new_empty(parts, *weight.shape, dtype=torch.float32)

    def plan() -> Launch:
        tile = min(next_power_of_2(blocks.size), WEIGHT_TILE // next_power_of_2(head_size))
        grid = (parts, num_heads, cdiv(blocks.size, tile))
        return blocks.launch(compress_dw_kernel, grid, dx, rope, True, BLOCK_L=tile)

    once(plan)(dy, x, dw, *sequences.arguments(), num_tiles, *rotation, *x.stride()[:2])
    return [dx, dw.sum(0).to(weight.dtype)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, weights, cu, cu_cmp, starts, *ctx.rest = inputs
    ctx.num_tokens, ctx.count = xs[0].shape[0], len(xs)
    # Without weights the gradient does not depend on x.
    read = (None if weight is None else x for x, weight in zip(xs, weights, strict=True))
    ctx.save_for_backward(cu, cu_cmp, starts, *read, *weights)


def _differentiate(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
    saved, count = ctx.saved_tensors, ctx.count
    places, xs, weights = saved[:3], [*saved[3 : 3 + count]], [*saved[3 + count :]]
    grads = iter(compress_backward_op(list(dys), xs, weights, ctx.num_tokens, *places, *ctx.rest))
    pairs = [(next(grads), None if weight is None else next(grads)) for weight in weights]
    dxs, dweights = zip(*pairs, strict=True)
    return [*dxs], [*dweights], *(None,) * (3 + len(ctx.rest))


_BLOCKS = (
    "Tensor? cu, Tensor? cu_cmp, Tensor? starts, SymInt num_sequences, SymInt len_x, "
    "SymInt len_cmp, int size, int stride, bool whole, str[] ropes, int middle"
)
compress_op = register(
    "compress",
    f"(Tensor[] xs, Tensor?[] weights, {_BLOCKS}) -> Tensor[]",
    _forward,
    _forward,
    setup_context=_setup_context,
    backward=_differentiate,
)
compress_backward_op = register(
    "compress_backward",
    f"(Tensor[] dys, Tensor?[] xs, Tensor?[] weights, SymInt num_tokens, {_BLOCKS}) -> Tensor[]",
    _backward,
    _backward,
)
