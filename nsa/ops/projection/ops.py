"""``nsa::project``, registered with PyTorch: schema, fake, autograd. Triton is loaded when an operator first runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops._register import register
from nsa.ops._replay import replayed
from nsa.ops.projection.layout import Columns, padded, stacked
from nsa.rope import Rope

_TOKENS = (
    "Tensor? positions, Tensor? cu, SymInt num_sequences, SymInt length, str columns, str rope"
)


def _open(
    positions: Tensor | None,
    cu: Tensor | None,
    num_sequences: int,
    length: int,
    columns: str,
    rope: str,
) -> Any:
    from nsa.ops.projection.triton_launch import Tokens

    return (
        Columns.from_text(columns),
        Tokens(positions, cu, num_sequences, length),
        Rope.from_text(rope),
    )


def _forward(x: Tensor, weights: list[Tensor], bias: Tensor | None, *rest: Any) -> list[Tensor]:
    return _project(x, stacked(weights, x.dtype), bias, *rest)


def _backward(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], bias: Tensor | None, gates: Tensor | None, needs: list[bool],
    *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, of all weights as one and of the bias, of those that are needed."""
    weight = stacked(weights, x.dtype) if needs[0] else None
    return _project_backward(grads, x, weight, bias, gates, needs, weights[0].dtype, *rest)


@replayed
def _project(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    from nsa.ops.projection.triton_launch import open_columns

    return open_columns(torch.mm(x, weight.t()), bias, *_open(*rest))


@replayed
def _project_backward(
    grads: list[Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None, gates: Tensor | None, needs: list[bool],
    dtype: torch.dtype, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """``weight``: all as one, where the gradient of x is needed; ``dtype``: of the weights themselves."""
    from nsa.ops.projection.triton_launch import close_columns

    columns, tokens, rope = _open(*rest)
    dproduct = close_columns([grad.contiguous() for grad in grads], gates, columns, tokens, rope, x)
    found = []
    if weight is not None:
        found.append(torch.mm(dproduct, weight))
    if needs[1]:
        found.append(torch.mm(dproduct.t(), x).to(dtype))
    if needs[2] and bias is not None:
        end = sum(columns.sizes)
        found.append(
            dproduct[:, end - bias.shape[0] : end].sum(0, dtype=torch.float32).to(bias.dtype)
        )
    return found


def _fake(x: Tensor, weights: list[Tensor], bias: Tensor | None, *rest: Any) -> list[Tensor]:
    columns = Columns.from_text(rest[-2])
    found = [x.new_empty(x.shape[0], part.number, part.size) for _, part, _ in columns.outputs()]
    if columns.gates is not None:
        found.append(x.new_empty(x.shape[0], columns.gates.heads, 3, dtype=torch.float32))
    return found


def _fake_backward(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], bias: Tensor | None, gates: Tensor | None, needs: list[bool],
    *rest: Any,
) -> list[Tensor]:  # fmt: skip
    found = [x.new_empty(x.shape)] if needs[0] else []
    if needs[1]:
        rows = padded(sum(Columns.from_text(rest[-2]).sizes))
        found.append(x.new_empty(rows, x.shape[1], dtype=weights[0].dtype))
    return [*found, bias.new_empty(bias.shape)] if needs[2] and bias is not None else found


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, positions, cu, *ctx.rest = inputs
    has_gates = Columns.from_text(ctx.rest[-2]).gates is not None
    ctx.save_for_backward(x, bias, positions, cu, output[-1] if has_gates else None, *weights)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    x, bias, positions, cu, gates, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_bias = ctx.needs[:3]
    needs = [needs_x, any(needs_weights), needs_bias]
    found = iter(
        project_backward_op(list(grads), x, weights, bias, gates, needs, positions, cu, *ctx.rest)
    )
    dx = next(found) if needs[0] else None
    dweights: list[Tensor | None] = [None] * len(weights)
    if needs[1]:
        sizes = Columns.from_text(ctx.rest[-2]).sizes
        rows = next(found).split([*sizes, padded(sum(sizes)) - sum(sizes)])
        # without the filling
        dweights = [
            part if needed else None for part, needed in zip(rows, needs_weights, strict=False)
        ]
    return dx, dweights, next(found) if needs[2] else None, *((None,) * (2 + len(ctx.rest)))


project_op = register(
    "project", f"(Tensor x, Tensor[] weights, Tensor? bias, {_TOKENS}) -> Tensor[]", _forward, _fake,
    setup_context=_setup_context, backward=_differentiate, replay=False,
)  # fmt: skip
project_backward_op = register(
    "project_backward",
    f"(Tensor[] grads, Tensor x, Tensor[] weights, Tensor? bias, Tensor? gates, bool[] needs, {_TOKENS}) -> Tensor[]",
    _backward, _fake_backward, replay=False,
)  # fmt: skip
