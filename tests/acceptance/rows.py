"""Rows of the acceptance run, their tables, and ``python -m tests.acceptance.rows``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks/acceptance"
QUICK = "quick"
# Columns of a table: field and format. Measured fields have a format.
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
MEASURED = [name for name, form in COLUMNS.values() if form and name != "seconds"]
INTRODUCTION = """\
# Acceptance

Made by `python -m tests.acceptance.rows` from the rows in this folder. CONTRIBUTING.md explains the
acceptance run and its numbers.
"""

Row = dict[str, Any]


def append_row(path: Path, row: Row) -> None:
    """Append a row to a JSONL file, which is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Read complete rows of a JSONL file, which may still grow; none if it does not exist."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def gpu_stem(gpu: str) -> str:
    """GPU kind for file names, such as ``h200``, ``rtx-4090`` and ``cpu``.

    Args:
        gpu: name from the driver, for example ``NVIDIA H100 80GB HBM3``.
    """
    found = re.search(r"[a-z ]*[^ -]*\d[^ -]*|cpu", re.sub("nvidia|geforce", "", gpu.lower()))
    assert found, gpu
    return found[0].strip().replace(" ", "-")


def identity(row: Row) -> tuple[bool, str]:
    """Key of a row: a newer row with the same key replaces it."""
    return row["leg"] != QUICK, row["config"]


def committed_loss(row: Row, folder: Path) -> float | None:
    """Last loss in the committed row of the same case, number of steps and GPU kind."""

    def compared(one: Row) -> tuple[Any, ...]:
        return identity(one), re.findall(r"--steps (\d+)", one["note"])

    rows = read_rows(folder / f"{gpu_stem(row['gpu'])}.jsonl")
    return next((one["loss_last"] for one in rows if compared(one) == compared(row)), None)


def merge(sources: Iterable[Path], folder: Path) -> None:
    """Merge rows into the files of their GPU kinds; keep the newest row of each case."""
    for new in (row for source in sources for row in read_rows(source)):
        path = folder / f"{gpu_stem(new['gpu'])}.jsonl"
        rows = sorted([*read_rows(path), new], key=lambda row: str(row["date"]))
        newest = {identity(row): row for row in rows}.values()
        path.unlink(missing_ok=True)
        for row in sorted(newest, key=lambda row: (row["leg"] != QUICK, row["leg"])):
            append_row(path, row)


def table(rows: Sequence[Row]) -> str:
    """Number of passed cases, and an aligned Markdown table."""

    def cell(value: Any, form: str) -> str:
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return "" if value is None else format(value, form).replace("|", "/")

    columns = COLUMNS.values()
    lines = [[cell(row[name], form) for name, form in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    texts = [
        f"| {' | '.join(text.ljust(n) for text, n in zip(line, widths, strict=True))} |"
        for line in ([*COLUMNS], rule, *lines)
    ]
    passed = f"{sum(row['passed'] for row in rows)} of {len(rows)} cases passed"
    return "\n".join([f"{passed}:", "", *texts])


def page(files: Iterable[Path]) -> str:
    """Markdown page with tables of the full and the quick run for each GPU kind."""
    parts = [INTRODUCTION]
    for file in sorted(files):
        rows = read_rows(file)
        commits, days = ({row[name][:10] for row in rows} for name in ("commit", "date"))
        measured = f"commit {', '.join(sorted(commits))}; {', '.join(sorted(days))}"
        parts.append(f"## {rows[0]['gpu']}\n\n{measured}.\n")
        for title, is_quick in (("Full run", False), ("Quick run", True)):
            chosen = [row for row in rows if (row["leg"] == QUICK) == is_quick]
            parts += [f"### {title}, {file.stem}\n\n{table(chosen)}\n"] * bool(chosen)
    return "\n".join(parts)


def main() -> None:
    """Merge new rows into the committed ones and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance.rows", description=main.__doc__
    )
    parser.add_argument("sources", nargs="*", type=Path, help="files of new rows (*.jsonl)")
    merge(parser.parse_args().sources, COMMITTED)
    text = page(COMMITTED.glob("*.jsonl"))
    (COMMITTED / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
