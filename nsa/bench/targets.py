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
# Dense attention of a decode step; what it computes with, and for SDPA whether query heads that
# share keys are folded into one tile of queries.
DENSE_DECODE = (
    "dense-cudnn",
    "dense-fa2",
    "dense-cudnn-folded",
    "dense-fa2-folded",
    "dense-efficient-folded",
    "dense-flex",
    "dense-scan",
)
# The fastest of these providers is what a ratio to dense is made with, in cases that have their
# own; elsewhere it is DENSE in the case ``attention``.
_DENSE_OF = {"train": ("dense",), "decode.model": ("dense",), "decode.attention": DENSE_DECODE}
# Units in which more is better.
_SPEEDS = ("tokens/s", "of one", "times dense", "of copy bandwidth")

Field = Literal["ms_p50", "peak_mib"]


@dataclass(frozen=True)
class Target:
    """A bound on one figure of a row.

    Attributes:
        where: fields of the row that it is for.
        unit: ``ms``; ``of dense-cudnn``: divided by dense attention in the same run; ``of random``:
            by the same case with random selection; ``tokens/s``; ``MiB of dense``: peak memory
            divided by the dense model's; ``of llama``: host time divided by that of transformers'
            Llama layer; ``launches``; ``of one``: speed divided by that of one process; ``times
            dense``: time of the fastest dense in the same run divided by the row's; ``of copy
            bandwidth``: of that fastest dense.
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
    return _quotient(row, other(row, by, **names), field)


def _quotient(row: Row, below: Row | None, field: Field) -> float | None:
    value, divisor = getattr(row, field), below and getattr(below, field)
    return value / divisor if value is not None and divisor else None


def is_dense(row: Row) -> bool:
    """Whether ratios are made with this row, or with a faster one of its kind."""
    return row.provider in _DENSE_OF.get(row.case, (DENSE,))


def fastest_dense(row: Row, by: Figures) -> Row | None:
    """Dense attention, or the dense model, in the same run; None without it."""
    case = row.case if row.case in _DENSE_OF else "attention"
    names = _DENSE_OF.get(row.case, (DENSE,))
    found = [other(row, by, case=case, provider=name) for name in names]
    return min((each for each in found if each), key=lambda each: each.ms_p50 or 0, default=None)


def of_dense(row: Row, by: Figures, field: Field = "ms_p50") -> float | None:
    """Time or memory divided by dense attention's in the same run; None without it."""
    return _quotient(row, fastest_dense(row, by), field)


def is_void(row: Row, by: Figures) -> bool:
    """Whether dense attention misses its own target, so that a ratio to it says nothing."""
    dense = fastest_dense(row, by)
    return dense is not None and not all(found.passed for found in outcomes(dense, by))


def outcomes(row: Row, by: Figures) -> list[Outcome]:
    """A row with a time compared with its targets."""
    if row.ms_p50 is None:
        return []
    time_of_dense = of_dense(row, by)
    values = {
        "ms": row.ms_p50,
        "tokens/s": row.tokens_per_s,
        "of random": ratio(row, by, choice="random"),
        "of dense-cudnn": time_of_dense,
        "times dense": time_of_dense and 1 / time_of_dense,
        "of copy bandwidth": row.of_copy if time_of_dense == 1 else None,
        "MiB of dense": of_dense(row, by, "peak_mib"),
    }
    return outcomes_of(row, values.get)
