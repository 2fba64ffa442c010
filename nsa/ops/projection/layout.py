"""Column layout of a layer's projection, and the specification of heads and gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.fields import AsText, settle
from nsa.ops._plan import Constants


@dataclass(frozen=True)
class Heads:
    """Heads in adjacent columns of a projection.

    Attributes:
        number: number of heads.
        size: columns of each head.
        outputs: for each output tensor, unrotated first, whether its heads are rotated by the
            token's position.
        rotary: rotated columns of a head, see :func:`nsa.apply_rope`; None means ``rope.dim``.
        detached: whether their gradient reaches the weight alone, and not the input.
    """

    number: int
    size: int
    outputs: tuple[bool, ...] = (False,)
    rotary: int | None = None
    detached: bool = False

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.number * self.size


@dataclass(frozen=True)
class Gates(Constants):
    """Gates in the last columns of a projection.

    Attributes:
        heads: query heads.
        branches: enabled branches (0 cmp, 1 slc, 2 win); a head has one column for each.
        sharpness: factor on the logits of a softmax over the branches; 0 for a sigmoid.
    """

    heads: int
    branches: tuple[int, ...]
    sharpness: float

    def __post_init__(self) -> None:
        settle(self)
        super().__post_init__()

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.heads * len(self.branches)

    @property
    def off(self) -> tuple[int, ...]:
        """The disabled branches."""
        return tuple({0, 1, 2} - {*self.branches})


@dataclass(frozen=True)
class Columns(AsText):
    """Column layout of a projection, in order.

    Attributes:
        parts: heads, one part for each weight.
        gates: the gates after them, with the last weight; None without gates.
    """

    parts: tuple[Heads, ...]
    gates: Gates | None = None

    @property
    def sizes(self) -> list[int]:
        """Number of columns of each weight."""
        return [x.columns for x in (*self.parts, self.gates) if x is not None]

    @property
    def detached(self) -> list[bool]:
        """Whether the gradient of each weight's columns ends there, see :class:`Heads`."""
        return [x.detached for x in self.parts] + [False] * (self.gates is not None)

    def split(self, product: Tensor) -> list[Tensor]:
        """Columns of each weight in a product ``[T, N]``, which may end with padding."""
        return list(product[:, : sum(self.sizes)].split(self.sizes, -1))


def activate(logits: Tensor, gates: Gates) -> Tensor:
    """Gates ``[T, Hq, 3]`` from logits ``[T, Hq * branches]``; 0 for a disabled branch.

    They are fp32, or fp64 for fp64 logits.
    """
    logits = logits.unflatten(-1, (gates.heads, len(gates.branches)))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    sharpness = gates.sharpness
    active = (logits * sharpness).softmax(-1) if sharpness else logits.sigmoid()
    found = [active.new_zeros(active.shape[:-1])] * 3
    for branch, gate in zip(gates.branches, active.unbind(-1), strict=True):
        found[branch] = gate
    return torch.stack(found, dim=-1)
