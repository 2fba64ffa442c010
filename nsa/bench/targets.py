"""What a figure should reach, and whether it did. Targets are for one kind of GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from nsa.bench.rows import Origin, Row

FILE = Path(__file__).with_name("targets.json")
DENSE = "dense-cudnn"
UNMASKED = "dense-unmasked"  # in training: dense attention across documents
# Units in which more is better.
_SPEEDS = ("tokens/s", "of one")

Field = Literal["ms_p50", "peak_mib"]


@dataclass(frozen=True)
class Target:
    """A bound on one figure of a row.

    Attributes:
        where: fields of the row that it is for.
        unit: ``ms``; ``of dense-cudnn``: divided by dense attention in the same run; ``of random``:
            by the same case with random selection; ``tokens/s``; ``MiB of dense``: peak memory
            divided by the dense model's; ``of llama``: host time divided by that of transformers'
            Llama layer; ``launches``; ``of one``: speed divided by that of one process.
        target: the bound.
        stretch: a stricter one, or None.
    """

    where: Mapping[str, Any]
    unit: str
    target: float
    stretch: float | None

    def reached(self, bound: float, value: float) -> bool:
        """Whether ``value`` is on the right side of ``bound``."""
        return value >= bound if self.unit in _SPEEDS else value <= bound


@dataclass(frozen=True)
class Outcome:
    """A target and what was measured, in its unit."""

    target: Target
    value: float

    @property
    def passed(self) -> bool:
        """Whether the target is reached."""
        return self.target.reached(self.target.target, self.value)

    def __str__(self) -> str:
        """Measured value, and each bound with its verdict."""
        target = self.target
        bounds = {"target": target.target, "stretch": target.stretch}
        form, exact = (",.0f", ",.0f") if target.unit == "tokens/s" else (".3g", "g")
        said = ", ".join(
            f"{name} {bound:{exact}} {'pass' if target.reached(bound, self.value) else 'FAIL'}"
            for name, bound in bounds.items()
            if bound is not None
        )
        unit = "" if target.unit == "ms" else f" {target.unit}"
        return f"{self.value:{form}}{unit}: {said}"


@cache
def targets() -> tuple[str, tuple[Target, ...]]:
    """Name of the GPU that the targets are for, and the targets."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return content["gpu"], tuple(Target(**target) for target in content["targets"])


def outcomes_of(row: Origin, value: Callable[[str], float | None]) -> list[Outcome]:
    """A row beside its targets; none on another GPU.

    Args:
        row: of any kind.
        value: the row's figure in a unit; None where what it is divided by was not measured.
    """
    gpu, known = targets()
    return [
        Outcome(target, found)
        for target in known
        if row.gpu == gpu
        and all(getattr(row, name, None) == wanted for name, wanted in target.where.items())
        and (found := value(target.unit)) is not None
    ]


Figures = Mapping[tuple[str, str, str, str, str, int, str], Row]


def figures(rows: Iterable[Row]) -> Figures:
    """Rows with a time by run, case, provider, shape, choice, length and mode; the last counts."""
    return {
        (row.run_id, row.case, row.provider, row.shape, row.choice, row.seq_len, row.mode): row
        for row in rows
        if row.ms_p50 is not None
    }


def _other(row: Row, by: Figures, case: str, provider: str, choice: str) -> Row | None:
    """The row of the same run, shape, length and mode, whatever its batch."""
    return by.get((row.run_id, case, provider, row.shape, choice, row.seq_len, row.mode))


def _dense(row: Row, by: Figures) -> Row | None:
    """What a ratio to dense attention is made with: dense attention, or the dense model."""
    case, provider = ("train", "dense") if row.case == "train" else ("attention", DENSE)
    return _other(row, by, case, provider, row.choice)


def _ratio(row: Row, other: Row | None, field: Field = "ms_p50") -> float | None:
    if other is None or other.batch != row.batch:
        return None
    above, below = getattr(row, field), getattr(other, field)
    return above / below if above is not None and below else None


def ratio(row: Row, by: Figures, provider: str, choice: str | None = None) -> float | None:
    """Time divided by that of another implementation (or choice) in the same run."""
    return _ratio(row, _other(row, by, row.case, provider, choice or row.choice))


def of_dense(row: Row, by: Figures, field: Field = "ms_p50") -> float | None:
    """Time or memory divided by dense attention's in the same run; None without it."""
    return _ratio(row, _dense(row, by), field)


def is_void(row: Row, by: Figures) -> bool:
    """Whether dense attention misses its own target, so that a ratio to it says nothing."""
    dense = _dense(row, by)
    return dense is not None and not all(found.passed for found in outcomes(dense, by))


def outcomes(row: Row, by: Figures) -> list[Outcome]:
    """A row with a time beside its targets."""
    if row.ms_p50 is None:
        return []
    values: dict[str, Callable[[], float | None]] = {
        "ms": lambda: row.ms_p50,
        "tokens/s": lambda: row.tokens_per_s,
        "of random": lambda: ratio(row, by, row.provider, "random"),
        "of dense-cudnn": lambda: of_dense(row, by),
        "MiB of dense": lambda: of_dense(row, by, "peak_mib"),
    }
    return outcomes_of(row, lambda unit: values[unit]())
