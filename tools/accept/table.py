"""Rows for a terminal, and as the page beside the committed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from nsa.bench.table import align, number
from tools.accept.rows import QUICK, Row, read_rows

HEADER = (
    "case",
    "passed",
    "tokens/s",
    "MFU",
    "compiled",
    "slowest",
    "host ms",
    "peak MiB",
    "plan MiB",
    "loss first",
    "loss last",
    "s",
    "note",
)
NOTE_SHOWN = 60  # characters on a terminal

_INTRODUCTION = """\
# Acceptance

Made by `python -m tools.accept page` from the rows beside it. What the acceptance run does, and how
each figure is computed: [docs/acceptance.md](../../docs/acceptance.md).
"""


def cells(row: Row) -> tuple[str, ...]:
    """One row in the order of the header."""
    return (
        row.config,
        "yes" if row.passed else "NO",
        number(row.tokens_per_s, ",.0f"),
        number(row.mfu, ".3f"),
        number(row.compilations_after_5, "d"),
        number(row.slowest_over_median, ".2f"),
        number(row.host_ms, ".1f"),
        number(row.peak_mib, ",.0f"),
        number(row.plan_mib, ",.0f"),
        number(row.loss_first, ".4f"),
        number(row.loss_last, ".4f"),
        f"{row.seconds:.0f}",
        row.note,
    )


def terminal_table(rows: Sequence[Row]) -> str:
    """Aligned columns, notes cut short, and how many passed."""
    lines = [(*line[:-1], line[-1][:NOTE_SHOWN]) for line in map(cells, rows)]
    passed = sum(row.passed for row in rows)
    total = f"{passed} of {len(rows)} cases passed"
    return "\n".join([*align([HEADER, *lines]), "", total])


def page(files: Iterable[Path]) -> str:
    """Markdown: a table of the full run and one of the quick run for each kind of GPU."""
    parts = [_INTRODUCTION]
    for file in sorted(files):
        rows = read_rows(file)
        parts.append(f"## {file.stem}\n\n{_origins(rows)}\n")
        for title, quick in (("Full run", False), ("Quick run", True)):
            chosen = [row for row in rows if (row.leg == QUICK) == quick]
            if chosen:
                passed = sum(row.passed for row in chosen)
                title = f"### {title}, {file.stem}: {passed} of {len(chosen)} cases passed"
                parts.append(f"{title}\n\n{_markdown_table(chosen)}\n")
    return "\n".join(parts)


def _markdown_table(rows: Sequence[Row]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _origins(rows: Sequence[Row]) -> str:
    """GPU, commit and days of the rows."""
    commits = sorted({row.commit for row in rows})
    days = sorted({row.date[:10] for row in rows})
    gpus = sorted({row.gpu for row in rows})
    return f"{', '.join(gpus)}; commit {', '.join(commits)}; {', '.join(days)}."
