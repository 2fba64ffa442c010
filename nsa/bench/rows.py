"""Rows of results: one JSON object a line, and nothing in a report that is not in a row."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nsa.errors import UserError, check
from nsa.train import environment


@dataclass(frozen=True)
class Origin:
    """What all rows of one process share; see ``docs/benchmarks.md``."""

    run_id: str
    device: str
    gpu: str | None
    driver: str | None
    torch: str | None
    triton: str | None
    commit: str | None
    dirty: bool | None
    date: str


@dataclass(frozen=True)
class Row(Origin):
    """One provider at one point in one mode; every field is explained in ``docs/benchmarks.md``."""

    case: str
    provider: str
    variant: dict[str, Any] | None
    shape: str
    choice: str
    seq_len: int
    batch: int
    dtype: str
    mode: str
    ms_p50: float | None
    ms_p20: float | None
    ms_p80: float | None
    tflops_useful: float | None
    tbps_useful: float | None
    peak_mib: float | None
    correct: bool | None
    errors: dict[str, float]
    note: str | None
    overlap: float | None
    recall: float | None
    timing: str | None
    samples: int | None
    kernels: list[str]
    kernel_us: dict[str, float]
    # Of training alone.
    tokens_per_s: float | None = None
    mfu: float | None = None
    reserved_mib: float | None = None
    loss_nats: float | None = None
    settings: dict[str, Any] | None = None
    # Of training alone; rows of November 2026 and before have none of these.
    changed: dict[str, Any] | None = None
    compilations_after_5: int | None = None
    slowest_over_median: float | None = None
    host_ms_p50: float | None = None
    first_step_s: float | None = None

    @property
    def is_masked(self) -> bool:
        """Whether the documents of a training step did not see each other."""
        return bool((self.settings or {}).get("document_mask"))

    def __post_init__(self) -> None:
        """A row never holds a time without a correct result."""
        timed = [self.ms_p50, self.ms_p20, self.ms_p80, self.tokens_per_s, self.mfu]
        assert self.correct is True or timed == [None] * 5, "a time without a correct result"
        assert self.correct is True or self.note, "a row without a time says why"


def origin(device: torch.device, commit: str | None = None) -> Origin:
    """Where and with what this process measures.

    Args:
        device: of the measurements.
        commit: to record where the checkout has no git; refused where it has.

    Raises:
        ValueError: ``commit`` was given although git knows it.
    """
    code = environment.code_version()
    check(commit is None or code["commit"] is None, "nsa bench", "--commit", "be left out where git knows it", commit)
    now = datetime.now(UTC)
    cuda = device.type == "cuda"
    return Origin(
        run_id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        device=device.type,
        gpu=torch.cuda.get_device_name(device) if cuda else None,
        driver=environment.nvidia_driver() if cuda else None,
        torch=environment.version("torch"),
        triton=environment.version("triton"),
        commit=code["commit"] or commit,
        dirty=code["dirty"],
        date=now.isoformat(timespec="seconds"),
    )


def row_of(origin: Origin, **values: Any) -> Row:
    """A row of this process."""
    return Row(**{**asdict(origin), **values})


class RowFile:
    """Rows appended to a JSONL file, each as soon as it is there; without a path they are only kept."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.rows = path, list[Row]()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a", encoding="utf-8").close()  # a place that cannot be written to is refused before the work

    def add(self, row: Row) -> None:
        """Keep and write one row."""
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Rows of several files.

    Raises:
        ValueError: a line is not a row; the message names file, line and what is wrong.
    """
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                rows.append(_parse(line, f"{path}:{number}"))
    return rows


def _parse(line: str, where: str) -> Row:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(where, "the line", "be JSON", error) from error
    check(isinstance(values, dict), where, "the line", "be an object", type(values).__name__)
    known = {entry.name for entry in fields(Row)}
    required = {entry.name for entry in fields(Row) if entry.default is MISSING}
    missing, unknown = sorted(required - set(values)), sorted(set(values) - known)
    check(not missing, where, "the row", "have every field", f"none of {', '.join(missing)}")
    check(not unknown, where, "the row", "have no other fields", ", ".join(unknown))
    try:
        return Row(**values)
    except AssertionError as error:
        raise UserError(where, "the row", "be one that the benchmark writes", error) from error


def measured(rows: Iterable[Row]) -> list[Row]:
    """Rows with a time."""
    return [row for row in rows if row.ms_p50 is not None]
