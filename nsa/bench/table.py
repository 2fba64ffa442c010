"""Rows as tables, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nsa.bench.rows import Row, measured
from nsa.bench.targets import (
    UNMASKED,
    Figures,
    Outcome,
    figures,
    is_void,
    of_dense,
    outcomes,
    ratio,
)

Kind = TypeVar("Kind")
Cells = dict[str, Callable[[Kind], str]]


def progress_line(row: Row) -> str:
    """One row as it comes in."""
    name = f"  {row.case:22} {row.provider:14} {row.mode:8}"
    if row.ms_p50 is None:
        return f"{name} {'WRONG: ' if row.correct is False else ''}{row.note}"
    worst = max(row.errors.values(), default=0.0)
    recall = "" if row.recall is None else f", recall {row.recall:.4f}"
    speed = "" if row.tokens_per_s is None else f", {row.tokens_per_s:,.0f} tokens/s"
    return f"{name} {_time(row)} ms{speed}, error {worst:.2g}{recall}, {row.timing}"


def result_table(rows: Sequence[Row]) -> str:
    """Rows with a time, ratios within their run, and targets; then why the others have no time."""
    lines = align(table(row_cells(figures(rows)), measured(rows)))
    return "\n".join(
        [*lines, *(f"without a time: {point(row)}: {row.note}" for row in rows if row.note)],
    )


def point(row: Row) -> str:
    """What a row is of."""
    return f"{row.case}, {row.provider}, {row.shape}, {row.choice}, S {row.seq_len:,}, {row.mode}"


def row_cells(by: Figures) -> Cells[Row]:
    """Columns of a table of rows; ratios are made with ``by``."""

    def time_of_dense(row: Row) -> str:
        found = of_dense(row, by)
        return number(found) + " void" * (found is not None and is_void(row, by))

    def of_nsa(row: Row) -> str:
        return "" if row.provider == "nsa" else number(ratio(row, by, provider="nsa"))

    return {
        **named("case", "provider"),
        "S": field("seq_len", ","),
        "B": field("batch"),
        **named("choice", "mode"),
        "ms (p20 to p80)": _time,
        "tokens/s": field("tokens_per_s", ",.0f"),
        "MFU": field("mfu", ".3g"),
        "useful TFLOP/s": field("tflops_useful", ".3g"),
        "useful TB/s": field("tbps_useful", ".3g"),
        "launches": field("launches"),
        "MiB read": field("mib_read", ",.4g"),
        "of copy bandwidth": field("of_copy", ".0%"),
        "peak MiB": field("peak_mib", ",.0f"),
        "reserved MiB": field("reserved_mib", ",.0f"),
        "time of dense": time_of_dense,
        "MiB of dense": lambda row: number(of_dense(row, by, "peak_mib")),
        "time of nsa": of_nsa,
        "time of dense-unmasked": lambda row: number(ratio(row, by, provider=UNMASKED)),
        "recall": field("recall", ".3f"),
        "loss": field("loss_nats", ".3f"),
        "compilations after step 5": field("compilations_after_5"),
        "slowest step of median": field("slowest_over_median", ".2f"),
        "host ms": field("host_ms_p50", ".1f"),
        "first step s": field("first_step_s", ".1f"),
        "differs": lambda row: settings_text(row.variant),
        "changed": lambda row: settings_text(row.changed),
        "target": lambda row: verdicts(outcomes(row, by)),
    }


def named(*fields: str) -> Cells[Any]:
    """Columns that are called like their fields."""
    return {name: field(name) for name in fields}


def field(name: str, form: str = "") -> Callable[[Any], str]:
    """A column of one field."""
    return lambda row: number(getattr(row, name), form)


def verdicts(found: Sequence[Outcome]) -> str:
    """Targets, what was measured, and whether it passes."""
    return "; ".join(map(str, found))


def _time(row: Row) -> str:
    return f"{row.ms_p50:.4g} ({row.ms_p20:.4g} to {row.ms_p80:.4g})"


def settings_text(settings: Mapping[str, Any] | None) -> str:
    """Settings and their values, one after the other."""
    return ", ".join(f"{name} {value}" for name, value in (settings or {}).items())


def number(value: Any, form: str = ".3g") -> str:
    """A cell; empty without a value."""
    return "" if value is None else format(value, form)


def table(cells: Cells[Kind], rows: Sequence[Kind]) -> list[tuple[str, ...]]:
    """Header and rows; columns that are empty in every row are left out."""
    columns = [(head, *map(cell, rows)) for head, cell in cells.items()]
    return list(zip(*(column for column in columns if any(column[1:]) or not rows), strict=True))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table of a report; the first line is the header."""
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def align(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width: numbers to the right, words and the last column to the left."""
    *columns, last = zip(*lines, strict=True)
    justified = zip(*map(_justified, columns), last, strict=True)
    return ["  ".join(cells).rstrip() for cells in justified]


def _justified(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    numeric = all(cell[:1] in "+-.0123456789" for cell in column[1:])
    return [cell.rjust(width) if numeric else cell.ljust(width) for cell in column]
