"""Projection to heads and gates: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.ops.projection.layout import Columns, Gates
from nsa.rope import Rope, apply_rope


def split_reference(
    products: Sequence[Tensor],
    bias: Tensor | None,
    positions: Tensor,
    columns: Columns,
    rope: Rope,
) -> list[Tensor]:
    """Heads and gates from the products ``[T, columns]`` with each weight."""
    found = []
    # The product with the gate weight comes last.
    for part, product in zip(columns.parts, products, strict=False):
        heads = product.unflatten(-1, (part.number, part.size))
        found += [] if part.rotated == "yes" else [heads]
        found += [] if part.rotated == "no" else [apply_rope(heads, positions, rope)]
    if columns.gates is not None:
        logits = products[-1] if bias is None else products[-1] + bias.to(products[-1].dtype)
        found.append(activate(logits, columns.gates))
    return found


def activate(logits: Tensor, gates: Gates) -> Tensor:
    """Gates ``[T, Hq, 3]`` from logits ``[T, Hq * branches]``; 0 for a disabled branch.

    They are fp32, or fp64 for fp64 logits.
    """
    logits = logits.unflatten(-1, (gates.heads, len(gates.branches)))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if gates.activation == "sigmoid":
        active = logits.sigmoid()
    else:
        active = (logits / gates.temperature).softmax(-1)
    found = [active.new_zeros(active.shape[:-1])] * 3
    for branch, gate in zip(gates.branches, active.unbind(-1), strict=True):
        found[branch] = gate
    return torch.stack(found, dim=-1)
