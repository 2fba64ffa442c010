"""Rows as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from nsa.bench.rows import Row
from nsa.bench.targets import DENSE, figures, outcome, ratio

_HEADER = ("case", "provider", "S", "choice", "mode", "ms", "p20", "p80", "TFLOP/s", "MiB", "of dense", "of nsa", "target")


def progress_line(row: Row) -> str:
    """One row as it comes in."""
    name = f"  {row.case:22} {row.provider:14} {row.mode:8}"
    if row.ms_p50 is None:
        return f"{name} {'WRONG: ' if row.correct is False else ''}{row.note}"
    worst = max(row.errors.values(), default=0.0)
    recall = "" if row.recall is None else f", recall {row.recall:.4f}"
    return f"{name} {row.ms_p50:9.4f} ms ({row.ms_p20:.4f} to {row.ms_p80:.4f}), error {worst:.2g}{recall}, {row.timing}"


def result_table(rows: Sequence[Row]) -> str:
    """All rows with a time, their ratios to dense attention and to ours in the same run, and the targets of this GPU."""
    by = figures(rows)
    lines = [_HEADER]
    for row in rows:
        if row.ms_p50 is None or row.ms_p20 is None or row.ms_p80 is None:
            continue
        dense = ratio(row, by, case="attention", provider=DENSE, choice=row.choice)
        ours = None if row.provider == "nsa" else ratio(row, by, case=row.case, provider="nsa", choice=row.choice)
        reached = outcome(row, by)
        lines.append((
            row.case, row.provider, f"{row.seq_len:,}", row.choice, row.mode, f"{row.ms_p50:.4f}", f"{row.ms_p20:.4f}",
            f"{row.ms_p80:.4f}", "" if row.tflops_useful is None else f"{row.tflops_useful:.0f}",
            "" if row.peak_mib is None else f"{row.peak_mib:,.0f}", "" if dense is None else f"{dense:.3f}",
            "" if ours is None else f"{ours:.3f}",
            "" if reached is None else str(reached),
        ))  # fmt: skip
    left = [f"without a figure: {row.case} {row.provider} {row.mode} S {row.seq_len:,}: {row.note}" for row in rows if row.note]
    return "\n".join([*align(lines), *left])


def align(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width; the first two and the last are words, the others numbers or short."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = []
    for line in lines:
        cells = [
            cell.ljust(width) if column in (0, 1, 3, 4, len(line) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return texts
