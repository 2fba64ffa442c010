"""What a figure should reach, and whether it did. The targets are for one GPU; on others there are none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nsa.bench.rows import Row

FILE = Path(__file__).with_name("targets.json")
DENSE = "dense-cudnn"


@dataclass(frozen=True)
class Target:
    """A bound on one figure of ours.

    Attributes:
        case, shape, choice, seq_len, mode: which figure.
        unit: ``ms``; ``of dense-cudnn``: divided by dense attention in the same run; ``of random``: divided by the same case
            with random choice in the same run.
        must: largest value that passes.
        goal: what it should come to; None where there is no separate one.
    """

    case: str
    shape: str
    choice: str
    seq_len: int
    mode: str
    unit: str
    must: float
    goal: float | None


@dataclass(frozen=True)
class Outcome:
    """A target and what was measured.

    Attributes:
        target: the bound.
        value: in its unit.
    """

    target: Target
    value: float

    @property
    def passed(self) -> bool:
        """Whether the must is reached."""
        return self.value <= self.target.must

    def __str__(self) -> str:
        """Measured value, must, goal and verdict."""
        goal = "" if self.target.goal is None else f", goal {self.target.goal:g} {self._verdict(self.target.goal)}"
        unit = "" if self.target.unit == "ms" else f" {self.target.unit}"
        return f"{self.value:.3g}{unit}: must {self.target.must:g} {self._verdict(self.target.must)}{goal}"

    def _verdict(self, bound: float) -> str:
        return "pass" if self.value <= bound else "FAIL"


@cache
def targets() -> tuple[str, str, tuple[Target, ...]]:
    """GPU and dtype that the targets are for, and the targets."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return content["gpu"], content["dtype"], tuple(Target(**row) for row in content["rows"])


Figures = Mapping[tuple[str, str, str, str, str, int, str], Row]


def figures(rows: Iterable[Row]) -> Figures:
    """Rows with a time by run, case, provider, shape, choice, length and mode; the last one of a kind counts."""
    return {
        (row.run_id, row.case, row.provider, row.shape, row.choice, row.seq_len, row.mode): row
        for row in rows
        if row.ms_p50 is not None
    }


def ratio(row: Row, by: Figures, *, case: str, provider: str, choice: str) -> float | None:
    """Time of a row over that of another one of the same run, shape, length, batch and mode; None without it."""
    other = by.get((row.run_id, case, provider, row.shape, choice, row.seq_len, row.mode))
    if other is None or other.ms_p50 is None or row.ms_p50 is None or other.batch != row.batch:
        return None
    return row.ms_p50 / other.ms_p50


def outcome(row: Row, by: Figures) -> Outcome | None:
    """How a row of ours stands to its target; None without one, on another GPU, or without what it is divided by."""
    gpu, dtype, known = targets()
    if row.provider != "nsa" or row.gpu != gpu or row.dtype != dtype or row.ms_p50 is None:
        return None
    key = (row.case, row.shape, row.choice, row.seq_len, row.mode)
    for target in known:
        if (target.case, target.shape, target.choice, target.seq_len, target.mode) == key:
            value: float | None = row.ms_p50
            if target.unit == f"of {DENSE}":
                value = ratio(row, by, case="attention", provider=DENSE, choice=row.choice)
            elif target.unit == "of random":
                value = ratio(row, by, case=row.case, provider=row.provider, choice="random")
            return None if value is None else Outcome(target, value)
    return None
