"""Rows of the acceptance run: what they hold, how those of several legs become one file, tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nsa.bench.table import align, markdown, number
from nsa.configs import RENAMED
from nsa.errors import check, fail

COMMITTED = Path("benchmarks/acceptance")
QUICK = "quick"
NOTE_SHOWN = 60  # characters on a terminal
# Columns of a table: field and format.
COLUMNS = {
    "case": ("config", ""),
    "passed": ("passed", ""),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "MFU": ("mfu", ".3f"),
    "compiled": ("compilations_after_5", "d"),
    "slowest": ("slowest_over_median", ".2f"),
    "host ms": ("host_ms", ".1f"),
    "peak MiB": ("peak_mib", ",.0f"),
    "plan MiB": ("plan_mib", ",.0f"),
    "loss first": ("loss_first", ".4f"),
    "loss last": ("loss_last", ".4f"),
    "s": ("seconds", ".0f"),
    "note": ("note", ""),
}

_INTRODUCTION = """\
# Acceptance

Made by `python -m tools.accept page` from the rows in this folder. What the acceptance run does,
and how each figure is computed: [docs/acceptance.md](../../docs/acceptance.md).
"""


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
    def compared(self) -> tuple[object, ...]:
        """What two rows whose losses are compared have in common: case, steps and kind of GPU."""
        steps = re.search(r"--steps (\d+)", self.note)
        return self.key, steps and steps[1], gpu_stem(self.gpu)


def append_row(path: Path, row: Row) -> None:
    """Add a row to a JSONL file, which is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Rows of a file, in its order; none where there is no file.

    Raises:
        UserError: a line is not a row.
    """
    names = {field.name for field in fields(Row)}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line_number, line in enumerate(lines, start=1):
        where = f"{path}:{line_number}"
        try:
            values: Any = json.loads(line)
        except json.JSONDecodeError as error:
            fail("read_rows", f"{where}: line", "be a row in JSON", error)
        same = isinstance(values, dict) and values.keys() == names
        check(same, "read_rows", f"{where}: fields", f"be {sorted(names)}", line[:80])
        found.append(Row(**values))
    return found


def committed_row(row: Row, folder: Path) -> Row | None:
    """The committed row that a row's loss is compared with; None without one.

    Args:
        row: a new row.
        folder: with a file for each kind of GPU.
    """
    known = read_rows(folder / f"{gpu_stem(row.gpu)}.jsonl")
    return next((other for other in known if other.compared == row.compared), None)


def gpu_stem(gpu: str) -> str:
    """The kind of GPU in names of files: ``h200``, ``h100``, ``rtx-4090``; ``cpu`` without one.

    Args:
        gpu: name as the driver gives it, for example ``NVIDIA H100 80GB HBM3``.
    """
    words = re.sub(r"nvidia|geforce|[^a-z0-9]+", " ", gpu.lower()).split()
    last = next((i for i, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return "-".join(words[: last + 1])


def merge_rows(sources: Sequence[Path], target: Path, *, allow_mixed: bool) -> list[Row]:
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
    new: list[Row] = []
    for path in sources:
        check(path.exists(), "merge", "FOLDERS", "exist", path)
        for file in path.glob("*.jsonl") if path.is_dir() else [path]:
            new += read_rows(file)
    check(bool(new), "merge", "FOLDERS", "hold files with rows", ", ".join(map(str, sources)))
    by_date = sorted([*read_rows(target), *new], key=lambda row: row.date)
    rows = list({row.key: row for row in by_date}.values())
    rows.sort(key=lambda row: (row.leg != QUICK, row.leg, row.date))
    cases: dict[str, list[str]] = {}
    for row in rows:
        rule = f"be named after the GPU of every row ({gpu_stem(row.gpu)}.jsonl for {row.gpu})"
        check(gpu_stem(row.gpu) == target.stem, "merge", "--into", rule, target.name)
        cases.setdefault(row.commit, []).append(row.config)
    listed = "; ".join(f"{commit[:12]}: {', '.join(names)}" for commit, names in cases.items())
    hint = "Measure the other cases again, or give --allow-mixed."
    check(len(cases) == 1 or allow_mixed, "merge", "rows", "be of one commit", listed, hint)
    target.unlink(missing_ok=True)
    for row in rows:
        append_row(target, row)
    return rows


def passed(rows: Sequence[Row]) -> str:
    """How many cases passed."""
    return f"{sum(row.passed for row in rows)} of {len(rows)} cases passed"


def terminal_table(rows: Sequence[Row]) -> str:
    """Aligned columns, notes cut short, and how many passed."""
    lines = [(*line[:-1], line[-1][:NOTE_SHOWN]) for line in _lines(rows)]
    return "\n".join([*align(lines), "", passed(rows)])


def page(files: Iterable[Path]) -> str:
    """Markdown: a table of the full run and one of the quick run for each kind of GPU."""
    parts = [_INTRODUCTION]
    for file in sorted(files):
        rows = read_rows(file)
        commits, days, gpus = (
            ", ".join(sorted(set(values)))
            for values in zip(*((row.commit, row.date[:10], row.gpu) for row in rows), strict=True)
        )
        parts.append(f"## {file.stem}\n\n{gpus}; commit {commits}; {days}.\n")
        for title, quick in (("Full run", False), ("Quick run", True)):
            chosen = [row for row in rows if (row.leg == QUICK) == quick]
            if chosen:
                table = markdown([[cell.replace("|", "/") for cell in x] for x in _lines(chosen)])
                parts.append(f"### {title}, {file.stem}: {passed(chosen)}\n\n{table}\n")
    return "\n".join(parts)


def _lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Header and rows."""
    return [
        tuple(COLUMNS),
        *(tuple(_cell(row, *column) for column in COLUMNS.values()) for row in rows),
    ]


def _cell(row: Row, name: str, form: str) -> str:
    value = getattr(row, name)
    return number(value, form) if name != "passed" else "yes" if value else "NO"
