"""Rows of the acceptance run: what they hold, and how those of several legs become one file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nsa.configs import RENAMED
from nsa.errors import check, fail

COMMITTED = Path("benchmarks/acceptance")
QUICK = "quick"


@dataclass(frozen=True)
class Row:
    """One case on one machine; docs/acceptance.md says how each figure is computed.

    Attributes:
        config: the case: a configuration's name, or what was done with it.
        tokens_per_s: training speed without the first steps; None where nothing was trained.
        mfu: model FLOPs utilisation at that speed.
        compilations_after_5: graphs compiled or captured after step 5.
        slowest_over_median: longest step after step 5 over the median.
        host_ms: time the host takes to issue a step, median.
        peak_mib: most GPU memory in tensors.
        plan_mib: the same as ``nsa plan`` says.
        loss_first: loss of the first row of metrics, nats per token.
        loss_last: loss of the last row.
        passed: whether all criteria that apply are met.
        gpu: name of the GPU; ``cpu`` without one.
        commit: of the checkout.
        date: when the case ended, UTC.
        note: what was added to the command line, what else there is to know, and why it failed.
        seconds: from the case's start to its end.
        leg: number of the leg, or ``quick``.
    """

    config: str
    tokens_per_s: float | None
    mfu: float | None
    compilations_after_5: int | None
    slowest_over_median: float | None
    host_ms: float | None
    peak_mib: float | None
    plan_mib: float | None
    loss_first: float | None
    loss_last: float | None
    passed: bool
    gpu: str
    commit: str
    date: str
    note: str
    seconds: float
    leg: str

    @property
    def key(self) -> tuple[str, bool]:
        """What a newer row replaces: the same case of the same kind of run."""
        # A row of a release before may have the older name of its configuration.
        name, colon, what = self.config.partition(":")
        return RENAMED.get(name, name) + colon + what, self.leg == QUICK

    @property
    def steps(self) -> str | None:
        """Number of steps given on the command line; None for that of the configuration."""
        found = re.search(r"--steps (\d+)", self.note)
        return None if found is None else found[1]


def append_row(path: Path, row: Row) -> None:
    """Add a row to a JSONL file, which is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a JSONL file anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """Rows of a file, in its order.

    Raises:
        UserError: a line is not a row.
    """
    names = {field.name for field in fields(Row)}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            values: Any = json.loads(line)
        except json.JSONDecodeError as error:
            fail(f"{path}:{number}", "line", "be a row in JSON", error)
        same = isinstance(values, dict) and values.keys() == names
        check(same, f"{path}:{number}", "fields", f"be {sorted(names)}", line[:80])
        found.append(Row(**values))
    return found


def gpu_stem(gpu: str) -> str:
    """The kind of GPU in names of files: ``h200``, ``h100``, ``rtx-4090``; ``cpu`` without one.

    Args:
        gpu: name as the driver gives it, for example ``NVIDIA H100 80GB HBM3``.
    """
    words = re.sub(r"[^a-z0-9]+", " ", gpu.lower()).split()
    words = [word for word in words if word not in ("nvidia", "geforce")]
    last = next((i for i, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return "-".join(words[: last + 1])


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of each case the newest row, in the order in which the cases first appear."""
    found: dict[tuple[str, bool], Row] = {}
    for row in rows:
        before = found.get(row.key)
        if before is None or row.date >= before.date:
            found[row.key] = row
    return list(found.values())


def merge(sources: Sequence[Path], target: Path, *, allow_mixed: bool) -> list[Row]:
    """Bring the rows of several legs into one file; the newest row of a case stays.

    Args:
        sources: files of rows, or folders that hold them as ``*.jsonl``.
        target: the file, named after the kind of GPU; made if need be.
        allow_mixed: whether the result may hold rows of several commits.

    Returns:
        The rows written.

    Raises:
        UserError: no rows, rows of another kind of GPU than the file's name says, or of several
            commits.
    """
    files = [file for path in sources for file in _jsonl_files(path)]
    ours = [row for file in files for row in read_rows(file)]
    check(bool(ours), "merge", "FOLDER", "hold files with rows", ", ".join(map(str, sources)))
    rows = newest([*(read_rows(target) if target.exists() else []), *ours])
    rows.sort(key=lambda row: (row.leg != QUICK, row.leg, row.date))
    for row in rows:
        rule = f"be named after the GPU of every row ({gpu_stem(row.gpu)}.jsonl for {row.gpu})"
        check(gpu_stem(row.gpu) == target.stem, "merge", "--into", rule, target.name)
    commits = sorted({row.commit for row in rows})
    hint = "Measure the other cases again, or give --allow-mixed."
    cases = "; ".join(f"{commit[:12]}: {_cases(rows, commit)}" for commit in commits)
    check(len(commits) == 1 or allow_mixed, "merge", "rows", "be of one commit", cases, hint)
    write_rows(target, rows)
    return rows


def _jsonl_files(path: Path) -> list[Path]:
    check(path.exists(), "merge", "FOLDER", "exist", path)
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def _cases(rows: Iterable[Row], commit: str) -> str:
    return ", ".join(row.config for row in rows if row.commit == commit)


def committed_loss(row: Row, committed: Iterable[Row]) -> float | None:
    """``loss_last`` that a row is compared with: of the same case, steps and kind of GPU."""
    what = row.key, row.steps, gpu_stem(row.gpu)
    alike = (other for other in committed if (other.key, other.steps, gpu_stem(other.gpu)) == what)
    return next((other.loss_last for other in alike), None)
