"""Parts of a page: tables with columns such as ``head=field:format``, sources of figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nsa.bench.table import markdown, number, table
from tools.evidence.plots import Plot

Figures = dict[str, Any]
Part = str | Plot
BITS, VALIDATION = "bits per byte", "val_bits_per_byte"


def table_of(columns: str, rows: Iterable[Figures]) -> str:
    """A table in Markdown; nothing without rows.

    Args:
        columns: each ``head=field:format``, separated by `` | ``; the head may be the field's name.
            Those that are empty in all rows are left out.
        rows: figures by field.
    """
    cells = dict(_cell(column) for column in columns.split(" | "))
    lines = table(cells, [*rows])
    return markdown(lines) if len(lines) > 1 else ""


def shared(columns: str, rows: Sequence[Figures]) -> tuple[str, str]:
    """What all rows have in common, in words, and the columns in which they differ.

    Args:
        columns: see :func:`table_of`.
        rows: figures by field; one without a figure has it in common with the others.
    """
    same, others = list[str](), list[str]()
    for column in columns.split(" | "):
        head, cell = _cell(column)
        values = {cell(row) for row in rows} - {""}
        same += [f"{head} {value}" for value in values if len(values) == 1]
        others += [column] * (len(values) > 1)
    return ", ".join(same), "".join(f" | {column}" for column in others)


def source(names: str) -> str:
    """A sentence on the files that figures are from; nothing without names."""
    return f"From {names}." if names else ""


def points(metrics: Sequence[Figures], x: str, y: str) -> list[tuple[float, float]]:
    """Points of a plot from the rows that have such a figure."""
    return [(float(row[x]), float(row[y])) for row in metrics if y in row]


def _cell(column: str) -> tuple[str, Callable[[Figures], str]]:
    head, _, spec = column.rpartition("=")
    name, _, form = spec.partition(":")

    def cell(row: Figures) -> str:
        return without_minus_zero(number(row.get(name), form))

    return head or name, cell


def without_minus_zero(text: str) -> str:
    """``-0.0000`` and ``+0.0000`` as ``0.0000``."""
    return re.sub(r"(?<![\w.])[-+](0\.0+)(?![\d.])", r"\1", text)
