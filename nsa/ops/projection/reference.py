"""Heads and gates of a projection: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nsa.ops.projection.layout import Columns, Gates
from nsa.rope import Rope, apply_rope


def project_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    positions: Tensor,
    columns: Columns,
    rope: Rope,
) -> list[Tensor]:
    """See :func:`nsa.ops.projection.project`; the dtype of autocast is that of PyTorch's products."""
    found = []
    # the weight of the gates comes last
    for part, weight in zip(columns.parts, weights, strict=False):
        heads = functional.linear(x, weight).unflatten(-1, (part.number, part.size))
        found += [] if part.rotated == "yes" else [heads]
        found += [] if part.rotated == "no" else [apply_rope(heads, positions, rope)]
    if columns.gates is not None:
        found.append(activate(functional.linear(x, weights[-1], bias), columns.gates))
    return found


def activate(logits: Tensor, gates: Gates) -> Tensor:
    """Gates ``[T, Hq, 3]``, fp32 at least, from logits ``[T, Hq * branches]``; 0 for a branch that is off."""
    logits = logits.unflatten(-1, (gates.heads, len(gates.branches)))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    active = (
        logits.sigmoid()
        if gates.activation == "sigmoid"
        else (logits / gates.temperature).softmax(-1)
    )
    if len(gates.branches) == 3:
        return active
    found = [active.new_zeros(active.shape[:-1])] * 3
    for index, branch in enumerate(gates.branches):
        found[branch] = active[..., index]
    return torch.stack(found, dim=-1)
