"""What a figure should reach, and whether it did. Targets are for one kind of GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from nsa.bench.rows import Origin, Row, measured

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
        form, exact = (",.0f", ",.0f") if target.unit == "tokens/s" else (".3g", "g")
        verdicts = []
        for name, bound in (("target", target.target), ("stretch", target.stretch)):
            if bound is not None:
                verdict = "pass" if target.reached(bound, self.value) else "FAIL"
                verdicts.append(f"{name} {bound:{exact}} {verdict}")
        unit = "" if target.unit == "ms" else f" {target.unit}"
        return f"{self.value:{form}}{unit}: {', '.join(verdicts)}"


@cache
def targets() -> tuple[str, tuple[Target, ...]]:
    """Name of the GPU that the targets are for, and the targets."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return content["gpu"], tuple(Target(**target) for target in content["targets"])


def outcomes_of(row: Origin, value: Callable[[str], float | None]) -> list[Outcome]:
    """A row compared with its targets; none on another GPU.

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


Figures = Mapping[tuple[object, ...], Row]


def _key(row: Row) -> tuple[object, ...]:
    """What rows of one run have in common that measured the same work."""
    work = row.case, row.provider, row.shape, row.choice, row.seq_len, row.batch, row.mode
    return row.run_id, *work


def figures(rows: Iterable[Row]) -> Figures:
    """Rows with a time, for ratios between them; of equal ones the last counts."""
    return {_key(row): row for row in measured(rows)}


def other(row: Row, by: Figures, **names: str) -> Row | None:
    """The row of the same run that measured the same but for ``case``, ``provider``, ``choice``."""
    return by.get(_key(replace(row, **names)))  # type: ignore[arg-type]


def ratio(row: Row, by: Figures, field: Field = "ms_p50", **names: str) -> float | None:
    """Time or memory divided by that of another row of the same run; None without it."""
    below = other(row, by, **names)
    value, divisor = getattr(row, field), below and getattr(below, field)
    return value / divisor if value is not None and divisor else None


def _dense(row: Row) -> dict[str, str]:
    """What a ratio to dense attention is made with: dense attention, or the dense model."""
    return (
        {"provider": "dense"} if row.case == "train" else {"case": "attention", "provider": DENSE}
    )


def of_dense(row: Row, by: Figures, field: Field = "ms_p50") -> float | None:
    """Time or memory divided by dense attention's in the same run; None without it."""
    return ratio(row, by, field, **_dense(row))


def is_void(row: Row, by: Figures) -> bool:
    """Whether dense attention misses its own target, so that a ratio to it says nothing."""
    dense = other(row, by, **_dense(row))
    return dense is not None and not all(found.passed for found in outcomes(dense, by))


def outcomes(row: Row, by: Figures) -> list[Outcome]:
    """A row with a time compared with its targets."""
    if row.ms_p50 is None:
        return []
    values = {
        "ms": row.ms_p50,
        "tokens/s": row.tokens_per_s,
        "of random": ratio(row, by, choice="random"),
        "of dense-cudnn": of_dense(row, by),
        "MiB of dense": of_dense(row, by, "peak_mib"),
    }
    return outcomes_of(row, values.get)
