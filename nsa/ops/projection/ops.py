"""``nsa::project``, registered with PyTorch. Triton is imported at the first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops._register import register
from nsa.ops.projection.layout import Columns, packed, padded


def _forward(x: Tensor, weights: list[Tensor], bias: Tensor | None, *tokens: Any) -> list[Tensor]:
    """Heads, and the gates if there are any."""
    from nsa.ops.projection.kernels import move

    columns, gates = Columns.from_text(tokens[4]), None
    product = torch.mm(x, packed(weights, x.dtype).t()) if weights else x
    heads = [x.new_empty(x.shape[0], part.number, part.size) for _, part, _ in columns.outputs()]
    if columns.gates is not None:
        gates = x.new_empty(x.shape[0], columns.gates.heads, 3, dtype=torch.float32)
    move(product, heads, gates, None, bias, columns, False, tokens)
    return heads if gates is None else [*heads, gates]


def _backward(
    grads: list[Tensor],
    x: Tensor | None,
    weights: list[Tensor],
    bias: Tensor | None,
    gates: Tensor | None,
    *tokens: Any,
) -> list[Tensor]:
    """Gradients of x, of the packed weights (if x is given) and of the bias (if it is given).

    Without weights the first is that of the product, including padding. Others are empty.
    """
    from nsa.ops.projection.kernels import move, num_sums

    columns, heads, sums = Columns.from_text(tokens[4]), [x.contiguous() for x in grads], None
    dproduct = heads[0].new_empty(heads[0].shape[0], padded(sum(columns.sizes)))
    if bias is not None:  # gradient by program
        sums = bias.new_empty(num_sums(dproduct), bias.shape[0], dtype=torch.float32)
    dgates = None if gates is None else heads.pop()
    move(dproduct, heads, gates, dgates, sums, columns, True, tokens)
    empty = dproduct.new_empty(0)
    return [
        torch.mm(dproduct, packed(weights, dproduct.dtype)) if weights else dproduct,
        empty if x is None else torch.mm(dproduct.t(), x),
        empty if bias is None or sums is None else sums.sum(0).to(bias.dtype),
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, before, cu, *ctx.rest = inputs
    ctx.num_columns = x.shape[1]
    gates = None if bias is None else output[-1]
    ctx.save_for_backward(x if weights else None, bias, before, cu, gates, *weights)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    x, bias, before, cu, gates, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_bias = ctx.needs[:3]
    needs_weights = needs_weights or []
    dx, dweight, dbias = project_backward_op(
        list(grads),
        x if any(needs_weights) else None,
        weights if needs_x else [],
        bias if needs_bias else None,
        gates,
        before,
        cu,
        *ctx.rest,
    )
    dweights, start = list[Tensor | None](), 0
    for weight, needed in zip(weights, needs_weights, strict=True):
        stop = start + weight.shape[0]
        dweights.append(dweight[start:stop].to(weight.dtype) if needed else None)
        start = stop
    gradients = (dx[:, : ctx.num_columns] if needs_x else None, dweights or None)
    return *gradients, dbias if needs_bias else None, *((None,) * (2 + len(ctx.rest)))


_TOKENS = "Tensor? before, Tensor? cu, SymInt num_sequences, SymInt length, str columns, str rope"
project_op = register(
    "project",
    f"(Tensor x, Tensor[] weights, Tensor? bias, {_TOKENS}) -> Tensor[]",
    _forward,
    _forward,
    setup_context=_setup,
    backward=_differentiate,
)
project_backward_op = register(
    "project_backward",
    "(Tensor[] grads, Tensor? x, Tensor[] weights, Tensor? bias, Tensor? gates, "
    f"{_TOKENS}) -> Tensor[]",
    _backward,
    _backward,
)
