"""Column layout of a layer's projection, and packing of its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nsa.fields import settle
from nsa.ops._plan import Constants

# Rows of the packed weights are padded to a multiple of this: Triton specializes only on strides
# that are multiples of 16, which allow 16-byte loads.
ALIGNMENT = 16

Rotated = Literal["no", "yes", "both"]


@dataclass(frozen=True)
class Heads:
    """Heads in adjacent columns of a projection.

    Attributes:
        number: number of heads.
        size: columns of each head.
        rotated: whether they are rotated by the token's position; ``both`` returns them unrotated
            and rotated.
    """

    number: int
    size: int
    rotated: Rotated = "no"

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
        activation: ``sigmoid``, or ``softmax`` over the branches.
        temperature: divisor of the ``softmax`` logits.
    """

    heads: int
    branches: tuple[int, ...]
    activation: Literal["sigmoid", "softmax"] = "sigmoid"
    temperature: float = 1.0

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

    @property
    def sharpness(self) -> float:
        """Factor on the ``softmax`` logits; 0 for ``sigmoid``."""
        return 0.0 if self.activation == "sigmoid" else 1.0 / self.temperature


@dataclass(frozen=True)
class Columns:
    """Column layout of a projection, in order.

    Attributes:
        parts: heads, one part for each weight.
        gates: the gates after them, with the last weight; None without gates.
        text: both as JSON, which registered operators accept as an argument.
        without_gates: the layout of the parts alone.
    """

    parts: tuple[Heads, ...]
    gates: Gates | None = None
    text: ClassVar[str]
    without_gates: ClassVar[Columns]

    def __post_init__(self) -> None:
        settle(self)
        object.__setattr__(self, "text", json.dumps(asdict(self)))
        alone = self if self.gates is None else Columns(self.parts)
        object.__setattr__(self, "without_gates", alone)

    @classmethod
    @cache
    def from_text(cls, text: str) -> Columns:
        """Parse :attr:`text`."""
        return cls(**json.loads(text))

    @property
    def sizes(self) -> list[int]:
        """Number of columns of each weight."""
        return [x.columns for x in (*self.parts, self.gates) if x is not None]

    def outputs(self) -> Iterator[tuple[int, Heads, bool]]:
        """Yield first column, heads and whether they are rotated, for each output tensor."""
        wanted = {"no": (False,), "yes": (True,), "both": (False, True)}
        for start, part in zip(accumulate(self.sizes, initial=0), self.parts, strict=False):
            yield from ((start, part, rotated) for rotated in wanted[part.rotated])


def padded(rows: int) -> int:
    """Number of rows including padding."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


@torch.no_grad()
def packed(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy weights ``[n, width]`` to one matrix ``[N, width]``, which ends with rows of zeros."""
    rows = [weight.shape[0] for weight in weights]
    used = sum(rows)
    whole = weights[0].new_empty(padded(used), weights[0].shape[1], dtype=dtype)
    torch._foreach_copy_(whole[:used].split(rows), list(weights))
    whole[used:].zero_()
    return whole
