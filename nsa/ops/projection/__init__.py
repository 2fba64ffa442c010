"""Projection of a layer's input to queries, keys, values and gates, including rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nsa.errors import fail
from nsa.ops._backend import choose_backend
from nsa.ops._packed import locate
from nsa.ops._sequences import Sequences
from nsa.ops.projection.layout import Columns, Gates, Heads, packed
from nsa.ops.projection.ops import project_op
from nsa.ops.projection.reference import activate, split_reference
from nsa.rope import Rope

__all__ = [
    "Columns",
    "Gates",
    "Heads",
    "activate",
    "normalise_heads",
    "packed",
    "project",
]


def project(
    x: Tensor,
    weights: Sequence[Tensor] | None,
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
        For each part ``[T, number, size]`` (two tensors if ``rotated`` is ``both``, unrotated
        first), contiguous with ``triton``, in the dtype of ``x`` or autocast; then gates ``[T, Hq,
        3]``, order (cmp, slc, win), fp32 (fp64 for fp64 ``x``), if there are any. Angles and
        rotation follow :func:`nsa.apply_rope`.

    Raises:
        ValueError: the shapes do not match.
    """
    shapes = [(size, x.shape[-1]) for size in columns.sizes]
    found = None if weights is None else [tuple(weight.shape) for weight in weights]
    if x.ndim != 2 or found not in (None, shapes):
        rule = f"have shapes {shapes} for x [T, width] of shape {tuple(x.shape)}"
        fail("weights", rule, found)
    for part in columns.parts:
        if part.rotated != "no" and (rope.dim > part.size or rope.dim % 2):
            rule = f"have an even dim of at most the head size ({part.size})"
            fail("rope", rule, rope.dim)
    if before is not None and before.shape != (sequences.num_sequences,):
        fail("before", f"have shape {(sequences.num_sequences,)}", tuple(before.shape))
    device = x.device.type
    if choose_backend(backend, x, "x") == "reference":
        products: Sequence[Tensor]
        if weights is None:
            products = x[:, : sum(columns.sizes)].split(columns.sizes, -1)
        else:
            products = [functional.linear(x, weight) for weight in weights]
        sequence, positions, _ = locate(x.shape[0], sequences.cu_q)
        if before is not None:
            positions = positions + before[sequence]
        return split_reference(products, bias, positions, columns, rope)
    if weights is None:
        x = x.contiguous()
    elif torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    cu, _, num_sequences, length, _ = sequences.kernel_arguments()
    where = (before, cu, num_sequences, length, columns.text, rope.text)
    return list(project_op(x, list(weights or ()), bias, *where))


def normalise_heads(
    product: Tensor, columns: Columns, norms: Sequence[Callable[[Tensor], Tensor] | None]
) -> Tensor:
    """Normalise the heads of some parts of a product ``[T, N]``.

    Args:
        product: products with all weights side by side; it may end with padding.
        columns: the column layout of the product.
        norms: for each part a norm of ``[T, number, size]``, or None.

    Returns:
        ``[T, N]`` without padding.
    """
    pieces = list(product[:, : sum(columns.sizes)].split(columns.sizes, -1))
    for k, (part, norm) in enumerate(zip(columns.parts, norms, strict=True)):
        if norm is not None:
            pieces[k] = norm(pieces[k].unflatten(-1, (part.number, part.size))).flatten(-2)
    return torch.cat(pieces, dim=-1)
