"""Tables for the terminal and in Markdown, and progress lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from nsa.bench.rows import (
    UNMASKED,
    Figures,
    Row,
    append_row,
    figures,
    is_void,
    measured,
    of_dense,
    of_one_gpu,
    origin,
    outcomes,
    ratio,
)

_MEASURED = (
    "tokens_per_s",
    "mfu",
    "tflops_useful",
    "tbps_useful",
    "launches",
    "gpu_ms",
    "mib_read",
    "of_copy",
    "peak_mib",
    "reserved_mib",
    "communication_ms",
    "exposed_ms",
    "idle_ms",
    "recall",
    "loss_nats",
)
Kind = TypeVar("Kind")
Cells = Mapping[str, Callable[[Kind], str]]


class Results:
    """Rows of this process, printed and optionally appended to a JSONL file.

    Args:
        path: file to append to; None keeps the rows in memory.
        device: the measured device.
        commit: recorded if the checkout has no git.
    """

    def __init__(self, path: Path | None, device: torch.device, commit: str | None = None) -> None:
        self._path, self.rows, self._origin = path, list[Row](), origin(device, commit)
        here = self._origin
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()  # fails before the measurements, not after them
        changes = " with changes" if here["dirty"] else ""
        run = f"run {here['run_id']} on {here['gpu'] or device}, commit {here['commit']}{changes}"
        print(run, flush=True)

    def add(self, **values: Any) -> None:
        """Store, write and print a row; floats are rounded to six digits."""
        rounded = {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in values.items()
        }
        row = Row(**{**self._origin, **rounded})
        self.rows.append(row)
        print(progress_line(row), flush=True)
        if self._path is not None:
            append_row(self._path, row)

    def finish(self) -> bool:
        """Print the table; return True if no row is wrong."""
        print("\n" + result_table(self.rows), flush=True)
        return all(row.correct is not False for row in self.rows)


def progress_line(row: Row) -> str:
    """Progress line of a row."""
    name = f"  {row.case:22} {row.provider:14} {row.mode:8} S {row.seq_len:,} x {row.batch}"
    if row.ms_p50 is None:
        return f"{name}: {'WRONG: ' if row.correct is False else ''}{row.note}"
    return f"{name}: {_time(row)} ms, error {max(row.errors.values(), default=0.0):.2g}"


def result_table(rows: Sequence[Row]) -> str:
    """Table of rows with a time, ratios and targets; then the reasons of rows without a time."""
    lines = align(table(row_cells(figures(rows)), measured(rows))) if measured(rows) else []
    return "\n".join(
        [*lines, *(f"without a time: {point(row)}: {row.note}" for row in rows if row.note)],
    )


def point(row: Row) -> str:
    """Case, provider, shape, length and mode of a row."""
    return f"{row.case}, {row.provider}, {row.shape}, {row.choice}, S {row.seq_len:,}, {row.mode}"


def row_cells(by: Figures) -> Cells[Row]:
    """Columns of a table of rows; ratios use ``by``."""

    def time_of_dense(row: Row) -> str:
        found = of_dense(row, by)
        return number(found) + " void" * (found is not None and is_void(row, by))

    def time_of(provider: str) -> Callable[[Row], str]:
        return lambda row: (
            "" if row.provider == provider else number(ratio(row, by, provider=provider))
        )

    columns = ("case", "provider", "seq_len", "batch", "dtype", "choice", "mode")
    return {
        **{name: _field(name) for name in columns},
        "GPUs": lambda row: str(row.num_gpus) if row.num_gpus > 1 else "",
        "ms (p20 to p80)": _time,
        **{name: _field(name) for name in _MEASURED},
        "time of dense": time_of_dense,
        "MiB of dense": lambda row: number(of_dense(row, by, "peak_mib")),
        "time of nsa": time_of("nsa"),
        "time of llama": time_of("llama"),
        f"time of {UNMASKED}": time_of(UNMASKED),
        "speed of one GPU": lambda row: number(of_one_gpu(row, by)) if row.num_gpus > 1 else "",
        "stages": lambda row: settings_text(row.stages_ms),
        "variant": lambda row: settings_text(row.variant),
        "changed": lambda row: settings_text(row.changed),
        "target": lambda row: "; ".join(text for text, _ in outcomes(row, by)),
    }


def _field(name: str) -> Callable[[Row], str]:
    """Column of a field: text, or numbers with four digits, with all digits from 1,000."""

    def cell(row: Row) -> str:
        value = getattr(row, name)
        if value is None or isinstance(value, str):
            return value or ""
        return format(value, ".4g" if abs(value) < 1000 else ",.0f")

    return cell


def _time(row: Row) -> str:
    spread = "" if row.ms_p20 is None else f" ({row.ms_p20:.4g} to {row.ms_p80:.4g})"
    return f"{row.ms_p50:.4g}{spread}"


def settings_text(settings: Mapping[str, Any] | None) -> str:
    """Settings and their values as one line."""
    return ", ".join(f"{name} {value}" for name, value in (settings or {}).items())


def number(value: Any, form: str = ".3g") -> str:
    """Format a cell; empty for None."""
    return "" if value is None else format(value, form)


def table(cells: Cells[Kind], rows: Sequence[Kind]) -> list[tuple[str, ...]]:
    """Header and rows, without columns that are empty in every row."""
    columns = [(head, *map(cell, rows)) for head, cell in cells.items()]
    return list(zip(*(column for column in columns if any(column[1:]) or not rows), strict=True))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; the first line is the header."""
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def align(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Pad columns to equal width: numbers to the right, words and the last column to the left."""
    *columns, last = zip(*lines, strict=True)
    justified = zip(*map(_justified, columns), last, strict=True)
    return ["  ".join(cells).rstrip() for cells in justified]


def _justified(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    numeric = all(cell[:1] in "+-.0123456789" for cell in column[1:])
    return [cell.rjust(width) if numeric else cell.ljust(width) for cell in column]
