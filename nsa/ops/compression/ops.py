"""``nsa::compress`` and ``nsa::gather_blocks``, registered with PyTorch: schema, fake, autograd.

Triton is loaded when an operator first runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa.ops._limits import check_keys
from nsa.ops._range import rows
from nsa.ops._register import register

_WHERE = "Tensor? cu, Tensor? cu_cmp, SymInt num_sequences, SymInt len_x, SymInt len_cmp, int size, int stride"
_ROTATION = "str rope, int middle"


def _compress(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    from nsa.ops.compression.triton_launch import compress_forward, layout_of

    check_keys("compress", "x", x)
    return compress_forward(
        rows(x), None if weight is None else weight.contiguous(), layout_of(x, *rest)
    )


def _compress_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, num_tokens: int, *rest: Any
) -> list[Tensor]:
    from nsa.ops.compression.triton_launch import compress_backward, layout_of

    x, weight = None if x is None else rows(x), None if weight is None else weight.contiguous()
    dx, dw = compress_backward(dy.contiguous(), x, weight, num_tokens, layout_of(dy, *rest))
    return [dx] if weight is None or dw is None else [dx, dw.to(weight.dtype)]


def _gather_blocks(x: Tensor, *rest: Any) -> Tensor:
    from nsa.ops.compression.triton_launch import CompressLayout, gather_forward

    check_keys("compress", "x", x)
    return gather_forward(rows(x), CompressLayout(*rest))


def _gather_blocks_backward(dblocks: Tensor, num_tokens: int, *rest: Any) -> Tensor:
    from nsa.ops.compression.triton_launch import CompressLayout, gather_backward

    return gather_backward(dblocks.contiguous(), num_tokens, CompressLayout(*rest))


def _fake_compress(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0] // rest[6], *x.shape[1:])


def _fake_compress_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, num_tokens: int, *rest: Any
) -> list[Tensor]:
    dx = dy.new_empty(num_tokens, *dy.shape[1:])
    return [dx] if weight is None else [dx, weight.new_empty(weight.shape)]


def _fake_gather_blocks(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0] // rest[6], rest[5], x.shape[2])


def _fake_gather_blocks_backward(dblocks: Tensor, num_tokens: int, *rest: Any) -> Tensor:
    return dblocks.new_empty(num_tokens, dblocks.shape[0], dblocks.shape[3])


def _setup_compress(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cu, cu_cmp, *ctx.rest = inputs
    ctx.num_tokens = x.shape[0]
    # The mean's gradient needs no values of x.
    ctx.save_for_backward(None if weight is None else x, weight, cu, cu_cmp)


def _differentiate_compress(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cu, cu_cmp = ctx.saved_tensors
    grads = compress_backward_op(dy, x, weight, ctx.num_tokens, cu, cu_cmp, *ctx.rest)
    return grads[0], None if weight is None else grads[1], *(None,) * (2 + len(ctx.rest))


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cu, cu_cmp, *ctx.lengths = inputs
    ctx.num_tokens = x.shape[0]
    ctx.save_for_backward(cu, cu_cmp)


def _differentiate_gather(ctx: Any, dblocks: Tensor) -> tuple[Tensor | None, ...]:
    return gather_blocks_backward_op(dblocks, ctx.num_tokens, *ctx.saved_tensors, *ctx.lengths), *(
        None,
    ) * 7


compress_op = register(
    "compress", f"(Tensor x, Tensor? weight, {_WHERE}, {_ROTATION}) -> Tensor", _compress, _fake_compress,
    setup_context=_setup_compress, backward=_differentiate_compress,
)  # fmt: skip
compress_backward_op = register(
    "compress_backward", f"(Tensor dy, Tensor? x, Tensor? weight, SymInt num_tokens, {_WHERE}, {_ROTATION}) -> Tensor[]",
    _compress_backward, _fake_compress_backward,
)  # fmt: skip
gather_blocks_op = register(
    "gather_blocks", f"(Tensor x, {_WHERE}) -> Tensor", _gather_blocks, _fake_gather_blocks, setup_context=_setup_gather,
    backward=_differentiate_gather,
)  # fmt: skip
gather_blocks_backward_op = register(
    "gather_blocks_backward", f"(Tensor dblocks, SymInt num_tokens, {_WHERE}) -> Tensor", _gather_blocks_backward,
    _fake_gather_blocks_backward,
)  # fmt: skip
