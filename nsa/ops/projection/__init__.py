"""Projection of a layer's input to queries, keys, values and gates, including rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._packed import locate
from nsa.ops._sequences import Sequences
from nsa.ops.projection.layout import (
    Columns,
    Gates,
    Heads,
    activate,
    packed,
    split_reference,
)
from nsa.ops.projection.ops import project_op
from nsa.rope import Rope

__all__ = ["Columns", "Gates", "Heads", "activate", "packed", "project"]


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
    found = [tuple(weight.shape) for weight in weights]
    check(found in ([], shapes), "weights", f"have shapes {shapes}", found)
    device = x.device.type
    if choose_backend(backend, x, "x") == "reference":
        products = [functional.linear(x, weight) for weight in weights] or columns.split(x)
        sequence, positions, _ = locate(x.shape[0], sequences.cu_q)
        if before is not None:
            positions = positions + before[sequence]
        return split_reference(products, bias, positions, columns, rope)
    if not weights:
        x = x.contiguous()
    elif torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    cu, _, num_sequences, length, _ = sequences.kernel_arguments()
    where = (before, cu, num_sequences, length, columns.text, rope.text)
    return list(project_op(x, list(weights), bias, *where))
