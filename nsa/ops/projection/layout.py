"""What the columns of a layer's projection are, and weights that lie together in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

# Rows of weights are filled up to a multiple of this, so that rows of the product lie in steps of
# 16 bytes.
ALIGNMENT = 8

Rotated = Literal["no", "yes", "both"]


@dataclass(frozen=True)
class Heads:
    """Neighbouring columns of a projection that belong together.

    Attributes:
        number: heads.
        size: columns of each.
        rotated: whether they are rotated by their token's position; ``both``: wanted as they are
            and rotated.
    """

    number: int
    size: int
    rotated: Rotated = "no"

    @property
    def columns(self) -> int:
        """All of them."""
        return self.number * self.size


@dataclass(frozen=True)
class Gates:
    """The last columns of a projection as gates of heads and branches.

    Attributes:
        heads: query heads.
        branches: which of the three (0 cmp, 1 slc, 2 win) are on; a head has a column for each of
            these.
        activation: ``sigmoid``, or ``softmax`` over the branches.
        temperature: what the logits of ``softmax`` are divided by.
    """

    heads: int
    branches: tuple[int, ...]
    activation: Literal["sigmoid", "softmax"] = "sigmoid"
    temperature: float = 1.0

    @property
    def columns(self) -> int:
        """All of them."""
        return self.heads * len(self.branches)


@dataclass(frozen=True)
class Columns:
    """The columns of a projection, in order.

    Attributes:
        parts: heads, one part for each weight.
        gates: gates behind them, whose weight is the last one; None without.
        text: the same as JSON: in this form a registered operator can be given it.
    """

    parts: tuple[Heads, ...]
    gates: Gates | None = None
    text: str = field(init=False)

    def __post_init__(self) -> None:
        values = {
            "parts": [asdict(part) for part in self.parts],
            "gates": None if self.gates is None else asdict(self.gates),
        }
        object.__setattr__(self, "text", json.dumps(values))

    @classmethod
    @cache
    def from_text(cls, text: str) -> Columns:
        """The columns whose :attr:`text` this is."""
        values = json.loads(text)
        gates = values["gates"]
        if gates is not None:
            gates = Gates(**{**gates, "branches": tuple(gates["branches"])})
        return cls(tuple(Heads(**part) for part in values["parts"]), gates)

    @property
    def sizes(self) -> list[int]:
        """Columns of each weight."""
        return [part.columns for part in self.parts] + (
            [] if self.gates is None else [self.gates.columns]
        )

    def outputs(self) -> Iterator[tuple[int, Heads, bool]]:
        """First column, part, and whether it is rotated, of each tensor of heads: twice for a part that is wanted both ways."""
        start = 0
        for part in self.parts:
            if part.rotated != "yes":
                yield start, part, False
            if part.rotated != "no":
                yield start, part, True
            start += part.columns


def padded(rows: int) -> int:
    """Rows with those that fill up."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def lay_together(weights: Sequence[Tensor]) -> None:
    """Move the memory of weights ``[N, width]`` into one, row behind row, so that one product can take them all.

    The parameters stay what they are, by themselves. Rows of zeros fill the memory up. Weights of
    different dtypes or devices, and those that are no plain parameters (the shards of FSDP2), stay
    where they are.
    """
    first = weights[0]
    if any(
        type(w) is not nn.Parameter or (w.dtype, w.device) != (first.dtype, first.device)
        for w in weights
    ):
        return
    with torch.no_grad():
        together = first.new_zeros(padded(sum(w.shape[0] for w in weights)), first.shape[1])
        row = 0
        for weight in weights:
            place = together[row : row + weight.shape[0]]
            place.copy_(weight)
            weight.data = place
            row += weight.shape[0]


class TogetherModule(nn.Module):
    """A module whose projection's weights lie together, also after it was moved, converted or copied."""

    def projection_weights(self) -> list[Tensor]:
        """The weights, in the order of the projection's columns."""
        raise NotImplementedError

    def lay_together(self) -> None:
        """Call it at the end of the constructor."""
        lay_together(self.projection_weights())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.lay_together()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lay_together()


@torch.no_grad()
def stacked(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All weights as one, ``[N, width]`` with N filled up, in ``dtype``: where they lie if that is together, or copied."""
    first, rows = weights[0], sum(w.shape[0] for w in weights)
    shape = (padded(rows), first.shape[1])
    if _lie_together(weights, shape[0]):
        return first.as_strided(shape, (shape[1], 1)).to(dtype)
    whole = first.new_empty(shape, dtype=dtype)
    torch.cat([w.to(dtype) for w in weights], out=whole[:rows])
    whole[rows:].zero_()
    return whole


def _lie_together(weights: Sequence[Tensor], rows: int) -> bool:
    first = weights[0]
    memory, step = first.untyped_storage(), first.shape[1] * first.element_size()
    place = first.data_ptr()
    if place + rows * step > memory.data_ptr() + memory.nbytes():
        return False
    for weight in weights:
        if weight.data_ptr() != place or weight.dtype != first.dtype or not weight.is_contiguous():
            return False
        place += weight.shape[0] * step
    return True
