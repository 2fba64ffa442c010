"""Projection of a layer's input to queries, keys, values and gates, including rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._layout import packed, padded
from nsa.ops._packed import locate
from nsa.ops._register import register
from nsa.ops._sequences import Sequences
from nsa.ops.projection.layout import Columns, Gates, Heads, activate
from nsa.rope import Rope, apply_rope

__all__ = ["Columns", "Gates", "Heads", "activate", "project"]


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    columns: Columns,
    sequences: Sequences,
    rope: Rope,
    *,
    before: Tensor | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """Project, split into heads and rotate.

    With kernels this takes one matmul and one pass over its output, forward and backward.

    Args:
        x: the layer's input ``[T, width]``; without weights ``[T, N]``, products with all weights
            side by side, which may end with padding.
        weights: one matrix ``[columns, width]`` for each part and, last, for the gates. On a GPU
            they are packed into one matrix in the dtype of the product.
        bias: bias of the gate logits; None without gates.
        columns: the column layout of the products.
        sequences: the sequence layout of the tokens.
        rope: the rotation.
        before: number of earlier tokens of each sequence, int32 ``[B]``; None means 0.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        A tensor ``[T, number, size]`` for each of ``outputs`` of each part, contiguous with
        ``triton``, in the dtype of ``x`` or autocast; then gates ``[T, Hq, 3]``, order (cmp, slc,
        win), fp32 (fp64 for fp64 ``x``), if there are any. Angles and rotation follow
        :func:`nsa.apply_rope`.

    Raises:
        ValueError: a weight has another shape than its columns.
    """
    shapes = [(size, x.shape[-1]) for size in columns.sizes]
    given = [tuple(weight.shape) for weight in weights]
    check(given in ([], shapes), "weights", f"have shapes {shapes}", given)
    device = x.device.type
    if choose_backend(backend, x, "x") == "reference":
        parts = zip(weights, columns.detached, strict=False)
        products = [functional.linear(x.detach() if cut else x, w) for w, cut in parts]
        if not weights:
            products = columns.split(x)
        sequence, positions, _ = locate(x.shape[0], sequences.cu_q)
        if before is not None:
            positions = positions + before[sequence]
        found: list[Tensor] = []
        # The product with the gate weight comes last.
        for part, product in zip(columns.parts, products, strict=False):
            heads = product.unflatten(-1, (part.number, part.size))
            where = (positions, rope, part.rotary)
            found += [apply_rope(heads, *where) if x else heads for x in part.outputs]
        if columns.gates is not None and bias is not None:
            logits = products[-1] + bias.to(products[-1].dtype)
            found.append(activate(logits, columns.gates))
        return found
    if not weights:
        x = x.contiguous()
    elif torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    cu, _, length, _, num_sequences = sequences.arguments()
    tokens = (before, cu, num_sequences, length, columns.text, rope.text)
    return list(project_op(x, list(weights), bias, *tokens))


def _forward(x: Tensor, weights: list[Tensor], bias: Tensor | None, *tokens: Any) -> list[Tensor]:
    """Heads, and the gates if there are any."""
    from nsa.ops.projection.kernels import move

    columns, gates = Columns.from_text(tokens[4]), None
    product = torch.mm(x, packed(weights, x.dtype).t()) if weights else x
    each = [part for part in columns.parts for _ in part.outputs]
    heads = [x.new_empty(x.shape[0], part.number, part.size) for part in each]
    if columns.gates is not None:
        gates = x.new_empty(x.shape[0], columns.gates.heads, 3, dtype=torch.float32)
    move(product, heads, gates, None, bias, tokens, backward=False)
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

    Without weights the first is that of the product. Others are empty.
    """
    from nsa.ops.projection.kernels import move

    columns, heads = Columns.from_text(tokens[4]), [grad.contiguous() for grad in grads]
    used = sum(columns.sizes)
    dproduct = heads[0].new_empty(heads[0].shape[0], padded(used))
    empty = dproduct.new_empty(0)
    dbias = empty if bias is None else torch.empty_like(bias)
    dgates = None if gates is None else heads.pop()
    move(dproduct, heads, gates, dgates, None if bias is None else dbias, tokens, backward=True)
    dweight = empty if x is None else torch.mm(dproduct.t(), x)
    if not weights:
        return [dproduct[:, :used], dweight, dbias]
    for part, detached in zip(columns.split(dproduct), columns.detached, strict=True):
        if detached:
            part.zero_()
    return [torch.mm(dproduct, packed(weights, dproduct.dtype)), dweight, dbias]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, before, cu, *ctx.rest = inputs
    gates = None if bias is None else output[-1]
    ctx.save_for_backward(x if weights else None, bias, before, cu, gates, *weights)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    x, bias, before, cu, gates, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_bias = ctx.needs[:3]
    needs_weights = bool(weights) and any(needs_weights)
    given = (x if needs_weights else None, weights if needs_x else [], bias if needs_bias else None)
    tokens = (before, cu, *ctx.rest)
    dx, dweight, dbias = project_backward_op(list(grads), *given, gates, *tokens)
    dweights = None
    if needs_weights:
        rows = [weight.shape[0] for weight in weights]
        dweights = list(dweight[: sum(rows)].to(weights[0].dtype).split(rows))
    gradients = (dx if needs_x else None, dweights, dbias if needs_bias else None)
    return *gradients, *[None] * len(tokens)


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
