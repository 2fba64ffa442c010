"""Building blocks of pages about runs: tables, figures, curves; a page needs no other file."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa.files import new_file
from nsa.train.telemetry.metrics import Row, read_metrics

_LARGEST = 1e100  # larger values overflow the axes
_MOST_NAMED = 16  # more curves have no legend

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; }
body { max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
figure { margin: 1rem 0; } figcaption { color: #555; } img { max-width: 100%; height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.2rem 0.8rem 0.2rem 0; vertical-align: top; }
th, td { border-bottom: 1px solid #eee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child { white-space: nowrap; }
td.text:not(:first-child) { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 4.5rem; }
td.text:not(:first-child):last-child { min-width: 11rem; }
@media (max-width: 40rem) { td:first-child { white-space: normal; overflow-wrap: anywhere; } }
"""


def page(title: str, sections: Mapping[str, str]) -> str:
    """Return a page as HTML.

    Args:
        title: title of the page, plain text.
        sections: HTML of each section by its title.
    """
    made = datetime.now(UTC).isoformat(timespec="seconds")
    parts = [f"<section>\n<h2>{name}</h2>\n{text}\n</section>" for name, text in sections.items()]
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">\n{view}\n<title>{escape(title)}</title>'
    head = f"<head>\n{head}\n<style>{_STYLE}</style>\n</head>"
    body = "\n".join([f"<h1>{escape(title)}</h1>\n<p>Made {made}.</p>", *parts])
    return printable(
        f'<!DOCTYPE html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>\n'
    )


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as HTML.

    Args:
        head: titles of the columns.
        rows: cells; numbers are aligned right, None is an empty cell.
    """
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    whole = f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="table">{whole}</div>'


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return f'<td class="text">{escape("" if value in (None, {}) else str(value))}</td>'


def figure_element(figure: Figure, caption: str) -> str:
    """Return a figure as an embedded image.

    Args:
        figure: the figure.
        caption: text below it.
    """
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    image = base64.b64encode(content.getvalue()).decode()
    shown = f'<img src="data:image/svg+xml;base64,{image}" alt="{escape(caption)}">'
    return f"<figure>\n{shown}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def printable(path: str) -> str:
    """Return a path as text, with a question mark for each byte that is not UTF-8."""
    return path.encode(errors="replace").decode()


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure so that a reader sees either the old file or the new one."""
    with new_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


# --- curves ---------------------------------------------------------------------------------------
class Plot(NamedTuple):
    """Axes of a figure.

    Attributes:
        title: above the axes.
        line: metric drawn as a line.
        dots: metric drawn as dots; may be empty.
        names: of line and dots in the legend of a single curve.
    """

    title: str
    line: str
    dots: str = ""
    names: tuple[str, str] = ("", "")


class Curve(NamedTuple):
    """A line in every plot of a figure, and dots if the plot has a second metric.

    Attributes:
        label: name in the legend.
        colour: colour of matplotlib.
        rows: rows of metrics.
        scale: units of the horizontal axis per optimizer step.
        suffix: end of the names of the metrics, such as ``_layer_0``.
    """

    label: str
    colour: Any
    rows: Sequence[Row]
    scale: int = 1
    suffix: str = ""


def loss_plot(curves: Iterable[Curve]) -> Plot:
    """Loss in bits per byte, or in nats per token if a curve has no bytes (a synthetic task)."""
    names = ("training", "validation")
    if all("bits_per_byte" in row for curve in curves for row in curve.rows):
        return Plot("bits per byte of text", "bits_per_byte", "val_bits_per_byte", names)
    return Plot("nats per token", "loss_nats", "val_loss_nats", names)


def curves_figure(
    curves: Sequence[Curve], plots: Sequence[Plot], unit: str = "optimizer steps"
) -> Figure:
    """Draw plots side by side.

    Args:
        curves: the curves.
        plots: the plots.
        unit: of the horizontal axis.
    """
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, plot in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        for curve in curves:
            line, dots = plot.names if len(curves) == 1 else (curve.label, "")
            _draw(axes, curve, plot.line, {"label": line, "linewidth": 1.2})
            style = {"marker": "o", "linestyle": "none", "markersize": 3}
            _draw(axes, curve, plot.dots, {"label": dots, **style})
        axes.set_title(plot.title, fontsize=10)
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
        if len(curves) <= _MOST_NAMED and axes.get_legend_handles_labels()[0]:
            for text in axes.legend(fontsize=7).get_texts():
                text.set_parse_math(False)  # the name of a folder, in which $ is a dollar
    return figure


def _draw(axes: Axes, curve: Curve, metric: str, style: dict[str, Any]) -> None:
    """Draw a metric over the rows that have it."""
    rows = [row for row in curve.rows if metric + curve.suffix in row]
    if len(rows) == 1:
        style = {"marker": ".", **style}  # a line through one point is invisible
    steps = [int(row["step"]) * curve.scale for row in rows]
    found = (float(row[metric + curve.suffix]) for row in rows)
    values = [value if abs(value) < _LARGEST else math.nan for value in found]
    if rows:
        axes.plot(steps, values, color=curve.colour, **style)


def plot_losses(metrics: Path, target: Path, *, title: str = "") -> bool:
    """Plot training loss (line) and validation loss (dots) of a run.

    Args:
        metrics: ``metrics.jsonl`` of the run.
        target: PNG to write.
        title: line above the plot.

    Returns:
        Whether there are rows; without rows no file is written.
    """
    curve = Curve("training", "#4477aa", read_metrics(metrics))
    if curve.rows:
        figure = curves_figure([curve], [loss_plot([curve])])
        figure.suptitle(printable(title), parse_math=False)
        save_png(figure, target)
    return bool(curve.rows)
