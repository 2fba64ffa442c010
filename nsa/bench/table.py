"""Rows as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from nsa.bench.rows import Row
from nsa.bench.targets import UNMASKED, Figures, figures, is_void, of_dense, outcomes, ratio

_HEADER = ("case", "provider", "S", "choice", "mode", "ms", "p20", "p80", "TFLOP/s", "MiB", "of dense", "of nsa", "target")
_TRAIN_HEADER = (
    "provider", "S", "B", "mode", "ms", "p20", "p80", "tokens/s", "MFU", "MiB", "reserved", "time of dense", "MiB of dense",
    "loss", "of unmasked", "compiled after 5", "slowest", "host ms", "first s", "target",
)  # fmt: skip


def progress_line(row: Row) -> str:
    """One row as it comes in."""
    name = f"  {row.case:22} {row.provider:14} {row.mode:8}"
    if row.ms_p50 is None:
        return f"{name} {'WRONG: ' if row.correct is False else ''}{row.note}"
    worst = max(row.errors.values(), default=0.0)
    recall = "" if row.recall is None else f", recall {row.recall:.4f}"
    speed = "" if row.tokens_per_s is None else f", {row.tokens_per_s:,.0f} tokens/s"
    return f"{name} {row.ms_p50:9.4f} ms ({row.ms_p20:.4f} to {row.ms_p80:.4f}){speed}, error {worst:.2g}{recall}, {row.timing}"


def result_table(rows: Sequence[Row]) -> str:
    """All rows with a time, their ratios to dense attention and to ours in the same run, and the targets of this GPU."""
    by = figures(rows)
    lines = [_HEADER]
    for row in rows:
        if row.ms_p50 is None or row.ms_p20 is None or row.ms_p80 is None:
            continue
        dense = of_dense(row, by)
        ours = None if row.provider == "nsa" else ratio(row, by, case=row.case, provider="nsa", choice=row.choice)
        lines.append((
            row.case, row.provider, f"{row.seq_len:,}", row.choice, row.mode, f"{row.ms_p50:.4f}", f"{row.ms_p20:.4f}",
            f"{row.ms_p80:.4f}", "" if row.tflops_useful is None else f"{row.tflops_useful:.0f}",
            "" if row.peak_mib is None else f"{row.peak_mib:,.0f}", "" if dense is None else f"{dense:.3f}",
            "" if ours is None else f"{ours:.3f}",
            verdicts(row, by),
        ))  # fmt: skip
    return "\n".join([*align(lines), *_left(rows)])


def train_table(rows: Sequence[Row]) -> str:
    """All rows of training with a time, their ratios to the dense twin in the same run, and the targets of this GPU."""
    by = figures(rows)
    lines: list[tuple[str, ...]] = [_TRAIN_HEADER]
    for row in rows:
        if row.ms_p50 is None:
            continue
        time, memory = of_dense(row, by), of_dense(row, by, "peak_mib")
        lines.append((
            row.provider, f"{row.seq_len:,}", str(row.batch), row.mode, f"{row.ms_p50:.2f}", f"{row.ms_p20:.2f}",
            f"{row.ms_p80:.2f}", number(row.tokens_per_s, ",.0f"), number(row.mfu, ".3f"), number(row.peak_mib, ",.0f"),
            number(row.reserved_mib, ",.0f"), number(time, ".3f") + " void" * (time is not None and is_void(row, by)),
            number(memory, ".3f"), number(row.loss_nats, ".3f"), *run_cells(row, by),
            verdicts(row, by),
        ))  # fmt: skip
    return "\n".join([*align(lines, words=(0, 3)), *_left(rows)])


def run_cells(row: Row, by: Figures) -> tuple[str, ...]:
    """How a run of training went.

    Returns:
        Its time over that of the dense model whose documents see each other; compilations and
        captures after the fifth step; the slowest step over the median; the host's time to issue a
        step, ms; the start up to the end of the first step, seconds. Empty where not known.
    """
    unmasked = ratio(row, by, case="train", provider=UNMASKED, choice=row.choice)
    return (
        number(unmasked, ".3f"),
        number(row.compilations_after_5, "d"),
        number(row.slowest_over_median, ".2f"),
        number(row.host_ms_p50, ".1f"),
        number(row.first_step_s, ".1f"),
    )


def number(value: float | None, form: str = ".3g") -> str:
    """A cell; empty without a value."""
    return "" if value is None else format(value, form)


def verdicts(row: Row, by: Figures) -> str:
    """What was measured beside each target of a row, and whether it passes."""
    return "; ".join(map(str, outcomes(row, by)))


def _left(rows: Sequence[Row]) -> list[str]:
    return [f"without a figure: {row.case} {row.provider} {row.mode} S {row.seq_len:,}: {row.note}" for row in rows if row.note]


def align(lines: Sequence[tuple[str, ...]], words: Sequence[int] = (0, 1, 3, 4)) -> list[str]:
    """Columns of equal width; these and the last are words, the others numbers or short."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = []
    for line in lines:
        cells = [
            cell.ljust(width) if column in (*words, len(line) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return texts
