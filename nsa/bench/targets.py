"""What a figure should reach, and whether it did. The targets are for one GPU; on others there are none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from nsa.bench.rows import Row

FILE = Path(__file__).with_name("targets.json")
DENSE = "dense-cudnn"
UNMASKED = "dense-unmasked"  # of training: the dense model whose documents see each other
# What a row of a case is divided by: case and provider.
_DENSE_OF_TRAINING = ("train", "dense")
_DENSE_OF_ATTENTION = ("attention", DENSE)


@dataclass(frozen=True)
class Target:
    """A bound on one figure.

    Attributes:
        case, shape, choice, seq_len, mode: which figure.
        unit: ``ms``; ``of dense-cudnn``: divided by dense attention in the same run; ``of random``: divided by the same case
            with random choice in the same run; ``tokens/s``; ``MiB of dense``: peak memory divided by the dense twin's in the
            same run.
        must: largest value that passes, of ``tokens/s`` the smallest.
        goal: what it should come to; None where there is no separate one.
        provider: whose figure; ours, or the dense twin, which a ratio is void without.
        batch: sequences of the point; None means any number.
        masked: of training, whether documents do not see each other.
    """

    case: str
    shape: str
    choice: str
    seq_len: int
    mode: str
    unit: str
    must: float
    goal: float | None
    provider: str = "nsa"
    batch: int | None = None
    masked: bool = False

    def reached(self, bound: float, value: float) -> bool:
        """Whether ``value`` is on the right side of ``bound``."""
        return value >= bound if self.unit == "tokens/s" else value <= bound


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
        return self.target.reached(self.target.must, self.value)

    def __str__(self) -> str:
        """Measured value, must, goal and verdict."""
        target = self.target
        goal = "" if target.goal is None else f", goal {self._bound(target.goal)}"
        unit = "" if target.unit == "ms" else f" {target.unit}"
        return f"{self._number(self.value)}{unit}: must {self._bound(target.must)}{goal}"

    def _bound(self, bound: float) -> str:
        shown = self._number(bound) if self.target.unit == "tokens/s" else f"{bound:g}"
        return f"{shown} {'pass' if self.target.reached(bound, self.value) else 'FAIL'}"

    def _number(self, value: float) -> str:
        return f"{value:,.0f}" if self.target.unit == "tokens/s" else f"{value:.3g}"


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


@cache
def targets() -> tuple[str, str, tuple[Target, ...]]:
    """GPU and dtype that the targets are for, and the targets."""
    content = _content()
    return content["gpu"], content["dtype"], tuple(Target(**row) for row in content["rows"])


def speed_up_target(gpu: str | None, config: str, processes: int) -> float | None:
    """How many times as fast as one process so many must be on GPUs of this name; None where there is no such target."""
    found: float | None = _content()["speed_up"].get(config, {}).get(str(processes)) if gpu == _content()["gpu"] else None
    return found


@dataclass(frozen=True)
class HostTarget:
    """Bounds on what a layer costs the host.

    Attributes:
        mode, weights, tokens, shape, width: which layer.
        unit: ``of llama``: host time over that of transformers' Llama layer in the same run; ``launches``.
        must: largest value that passes.
        goal: what it should come to.
    """

    mode: str
    weights: str
    tokens: int
    shape: str
    width: int
    unit: Literal["of llama", "launches"]
    must: float
    goal: float

    def is_of(self, row: Mapping[str, Any]) -> bool:
        """Whether it is a bound on this row of ``nsa bench host``."""
        point = ("mode", "weights", "tokens", "shape", "width")
        is_layer = (row["case"], row["provider"]) == ("host.module", "nsa")
        return is_layer and all(row[name] == getattr(self, name) for name in point)


@cache
def host_targets(gpu: str | None) -> tuple[HostTarget, ...]:
    """Targets of ``nsa bench host`` on GPUs of this name."""
    return tuple(HostTarget(**row) for row in _content()["host"]) if gpu == _content()["gpu"] else ()


Figures = Mapping[tuple[str, str, str, str, str, int, str], Row]


def figures(rows: Iterable[Row]) -> Figures:
    """Rows with a time by run, case, provider, shape, choice, length and mode; the last one of a kind counts."""
    return {
        (row.run_id, row.case, row.provider, row.shape, row.choice, row.seq_len, row.mode): row
        for row in rows
        if row.ms_p50 is not None
    }


def ratio(
    row: Row, by: Figures, *, case: str, provider: str, choice: str, field: Literal["ms_p50", "peak_mib"] = "ms_p50"
) -> float | None:
    """Time (or memory) of a row over that of another one of the same run, shape, length, batch and mode; None without it."""
    other = by.get((row.run_id, case, provider, row.shape, choice, row.seq_len, row.mode))
    if other is None or other.batch != row.batch:
        return None
    ours, theirs = getattr(row, field), getattr(other, field)
    return ours / theirs if ours is not None and theirs else None


def of_dense(row: Row, by: Figures, field: Literal["ms_p50", "peak_mib"] = "ms_p50") -> float | None:
    """The row divided by dense attention, or by the dense twin, in the same run; None without it."""
    case, provider = _dense_of(row)
    return ratio(row, by, case=case, provider=provider, choice=row.choice, field=field)


def _dense_of(row: Row) -> tuple[str, str]:
    return _DENSE_OF_TRAINING if row.case == "train" else _DENSE_OF_ATTENTION


def is_void(row: Row, by: Figures) -> bool:
    """Whether what the row is divided by is slower than it must be, so that the ratio says nothing."""
    dense = by.get((row.run_id, *_dense_of(row), row.shape, row.choice, row.seq_len, row.mode))
    return dense is not None and not all(found.passed for found in outcomes(dense, by))


def outcomes(row: Row, by: Figures) -> list[Outcome]:
    """How a row stands to its targets; none on another GPU, or without what it is divided by."""
    gpu, dtype, known = targets()
    if row.gpu != gpu or row.dtype != dtype or row.ms_p50 is None:
        return []
    key = (row.provider, row.case, row.shape, row.choice, row.seq_len, row.mode, row.is_masked)
    found = []
    for target in known:
        point = (target.case, target.shape, target.choice, target.seq_len, target.mode)
        same = (target.provider, *point, target.masked) == key
        if same and target.batch in (None, row.batch) and (value := _value(row, target.unit, by)) is not None:
            found.append(Outcome(target, value))
    return found


def _value(row: Row, unit: str, by: Figures) -> float | None:
    if unit == "ms":
        return row.ms_p50
    if unit == "tokens/s":
        return row.tokens_per_s
    if unit == "of random":
        return ratio(row, by, case=row.case, provider=row.provider, choice="random")
    return of_dense(row, by, "peak_mib" if unit == "MiB of dense" else "ms_p50")
