"""Rows of results: one JSON object a line. Tables and reports show nothing that is not in a row."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

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


AnyRow = TypeVar("AnyRow", bound=Origin)


@dataclass(frozen=True)
class Row(Origin):
    """One implementation at one point in one mode; ``docs/benchmarks.md`` explains every field."""

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
    # Of decoding alone.
    launches: int | None = None
    mib_read: float | None = None
    of_copy: float | None = None

    @property
    def is_masked(self) -> bool:
        """Whether attention in a training step stayed within documents."""
        return bool((self.settings or {}).get("document_mask"))

    @property
    def kind(self) -> tuple[object, ...]:
        """Rows of one kind are repetitions of one measurement; the newest counts."""
        where = (self.gpu, self.case, self.provider, self.shape, self.choice, self.dtype)
        return *where, self.seq_len, self.batch, self.mode, self.is_masked

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
    known = code["commit"]
    rule = "be left out where git knows it"
    check(commit is None or known is None, "nsa bench", "--commit", rule, commit)
    now = datetime.now(UTC)
    cuda = device.type == "cuda"
    return Origin(
        run_id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        device=device.type,
        gpu=torch.cuda.get_device_name(device) if cuda else None,
        driver=environment.nvidia_driver() if cuda else None,
        torch=environment.version("torch"),
        triton=environment.version("triton"),
        commit=known or commit,
        dirty=code["dirty"],
        date=now.isoformat(timespec="seconds"),
    )


class Results(Generic[AnyRow]):
    """Rows of this process: each is printed, and appended to a JSONL file if there is one.

    Args:
        kind: class of the rows.
        path: of the file, or None.
        device: of the measurements.
        commit: see :func:`origin`.
    """

    def __init__(
        self,
        kind: type[AnyRow],
        path: Path | None,
        device: torch.device,
        commit: str | None,
    ) -> None:
        self._kind, self._path, self.rows = kind, path, list[AnyRow]()
        self._origin = here = origin(device, commit)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a", encoding="utf-8").close()  # fails before the work, not after it
        changes = " with changes" if here.dirty else ""
        print(
            f"run {here.run_id} on {here.gpu or device}, commit {here.commit}{changes}",
            flush=True,
        )

    def add(self, line: Callable[[AnyRow], str], **values: Any) -> None:
        """Keep, write and print a row: numbers have six digits, fields not given are null."""
        given = {name: _rounded(value) for name, value in values.items()}
        empty = dict.fromkeys(entry.name for entry in fields(self._kind))
        row = self._kind(**{**empty, **asdict(self._origin), **given})
        self.rows.append(row)
        print(line(row), flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def finish(self, table: Callable[[list[AnyRow]], str]) -> bool:
        """Print the table; whether no row is wrong."""
        print("\n" + table(self.rows), flush=True)
        return all(getattr(row, "correct", None) is not False for row in self.rows)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Rows of several files.

    Raises:
        ValueError: a line is not a row; the message names file, line and what is wrong.
    """
    return [
        _parse(line, f"{path}:{number}")
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if line.strip()
    ]


def _parse(line: str, where: str) -> Row:
    try:
        return Row(**json.loads(line))
    except (ValueError, TypeError, AssertionError) as error:  # no JSON, other fields, a false time
        argument, rule = f"{where}: the line", "be a row that the benchmark writes"
        raise UserError("read_rows", argument, rule, error) from error


def measured(rows: Iterable[Row]) -> list[Row]:
    """Rows with a time."""
    return [row for row in rows if row.ms_p50 is not None]
