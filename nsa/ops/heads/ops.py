"""``nsa::split_heads``, registered with PyTorch: schema, fake, autograd. Triton is loaded when an operator first runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa.ops._register import register

_WHAT = "Tensor positions, Tensor frequency, int[] numbers, int[] sizes, bool[] rotated, float magnitude, int position_offset"


def _forward(x: Tensor, *what: Any) -> list[Tensor]:
    from nsa.ops.heads.triton_rotate import split_forward

    return split_forward(x.contiguous(), *what)


def _backward(grads: list[Tensor], *what: Any) -> Tensor:
    from nsa.ops.heads.triton_rotate import split_backward

    return split_backward([grad.contiguous() for grad in grads], *what)


def _fake(x: Tensor, positions: Tensor, frequency: Tensor, numbers: list[int], sizes: list[int], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape[0], number, size) for number, size in zip(numbers, sizes, strict=True)]


def _fake_backward(
    grads: list[Tensor], positions: Tensor, frequency: Tensor, numbers: list[int], sizes: list[int], *_: Any
) -> Tensor:
    columns = sum(number * size for number, size in zip(numbers, sizes, strict=True))
    return grads[0].new_empty(grads[0].shape[0], columns)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, positions, frequency, *ctx.rest = inputs
    ctx.save_for_backward(positions, frequency)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return split_heads_backward_op(list(grads), *ctx.saved_tensors, *ctx.rest), *((None,) * (2 + len(ctx.rest)))


split_heads_op = register(
    "split_heads", f"(Tensor x, {_WHAT}) -> Tensor[]", _forward, _fake, setup_context=_setup_context, backward=_differentiate
)
split_heads_backward_op = register("split_heads_backward", f"(Tensor[] grads, {_WHAT}) -> Tensor", _backward, _fake_backward)
