"""The columns of a projection as queries, keys and values of each head, rotated where they have to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nsa.errors import check, fail
from nsa.ops._boundary import choose_backend
from nsa.ops.heads.ops import split_heads_op
from nsa.ops.heads.reference import split_heads_reference
from nsa.rope import Rope

__all__ = ["Heads", "split_heads"]


@dataclass(frozen=True)
class Heads:
    """Neighbouring columns of a projection that belong together.

    Attributes:
        number: heads.
        size: columns of each.
        rotated: whether they are rotated by their token's position.
    """

    number: int
    size: int
    rotated: bool = False


def split_heads(x: Tensor, parts: Sequence[Heads], positions: Tensor, rope: Rope, *, backend: str = "auto") -> list[Tensor]:
    """Cut a projection into heads and rotate them, in one pass over its bytes forward and one backward.

    Args:
        x: the projection ``[T, columns]``, part after part, head after head.
        parts: what the columns are; their sizes add up to the columns.
        positions: integer position of each token ``[T]``.
        rope: the rotation.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        For each part ``[T, number, size]``, contiguous with ``triton``, in the dtype of ``x``. Angles and rotation as of
        :func:`nsa.apply_rope`.

    Raises:
        ValueError: the shapes do not fit.
    """
    name = "split_heads"
    columns = sum(part.number * part.size for part in parts)
    check(x.ndim == 2 and x.shape[1] == columns, name, "x", f"have shape [T, {columns}]", tuple(x.shape))
    if positions.shape != x.shape[:1]:
        fail(name, "positions", f"have shape {tuple(x.shape[:1])}", tuple(positions.shape))
    for part in parts:
        fits = not part.rotated or (rope.dim <= part.size and rope.dim % 2 == 0)
        check(fits, name, "rope", f"have an even dim of at most the head size ({part.size})", rope.dim)
    if choose_backend(name, backend, x, "x") == "reference":
        return split_heads_reference(x, [(part.number, part.size, part.rotated) for part in parts], positions, rope)
    shapes = ([part.number for part in parts], [part.size for part in parts], [part.rotated for part in parts])
    frequency = rope.inverse_frequencies(x.device)
    return list(split_heads_op(x, positions, frequency, *shapes, rope.magnitude, rope.position_offset))
