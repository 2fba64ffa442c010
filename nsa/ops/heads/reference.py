"""Heads of a projection: the specification."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nsa.rope import Rope, apply_rope


def split_heads_reference(x: Tensor, parts: Sequence[tuple[int, int, bool]], positions: Tensor, rope: Rope) -> list[Tensor]:
    """See :func:`nsa.ops.heads.split_heads`; a part is its number of heads, their size, and whether they are rotated."""
    columns = x.split([number * size for number, size, _ in parts], dim=-1)
    heads = [column.unflatten(-1, (number, size)) for column, (number, size, _) in zip(columns, parts, strict=True)]
    return [apply_rope(head, positions, rope) if rotated else head for head, (_, _, rotated) in zip(heads, parts, strict=True)]
