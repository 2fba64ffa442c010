"""Curves of runs over their steps, made from the rows of metrics: ``loss.png`` and the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa.files import new_file
from nsa.train.telemetry.metrics import Row, read_metrics

# Of each plot: its title, the metric that is a line and the metric that is dots.
Plots = Sequence[tuple[str, str, str]]
LOSSES: Plots = (
    ("nats per token", "loss_nats", "val_loss_nats"),
    ("bits per byte of text", "bits_per_byte", "val_bits_per_byte"),
)
_DOTS = {"marker": "o", "linestyle": "none", "markersize": 3, "label": None}
_LARGEST = 1e100  # axes overflow beyond it
_MOST_NAMED = 16  # more curves have no legend


@dataclass(frozen=True)
class Curve:
    """A line in every plot of a figure, with dots of another metric.

    Attributes:
        label: its name in the legend.
        colour: as matplotlib knows it.
        rows: rows of metrics.
        scale: what a step counts on the horizontal axis.
        suffix: of the names of its metrics, that of a layer for example.
    """

    label: str
    colour: Any
    rows: Sequence[Row]
    scale: int = 1
    suffix: str = ""


def curves_figure(curves: Sequence[Curve], plots: Plots, unit: str = "optimizer steps") -> Figure:
    """The plots side by side.

    Args:
        curves: the curves.
        plots: what to plot.
        unit: of the horizontal axis.
    """
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    places = figure.subplots(1, len(plots), squeeze=False)[0]
    for axes, (title, line, dots) in zip(places, plots, strict=True):
        for curve in curves:
            _draw(axes, curve, line, {"label": curve.label, "linewidth": 1.2})
            _draw(axes, curve, dots, _DOTS)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
        if 1 < len(curves) <= _MOST_NAMED and axes.get_legend_handles_labels()[0]:
            for text in axes.legend(fontsize=7).get_texts():
                text.set_parse_math(False)  # the name of a folder, in which $ is a dollar
    return figure


def _draw(axes: Axes, curve: Curve, metric: str, style: dict[str, Any]) -> None:
    """Draw one metric, where a row has it."""
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
        title: line above the plots.

    Returns:
        Whether there was anything to plot; without rows no file is written.
    """
    rows = read_metrics(metrics)
    if rows:
        figure = curves_figure([Curve("training", "#4477aa", rows)], LOSSES)
        figure.suptitle(printable(title), parse_math=False)
        save_png(figure, target)
    return bool(rows)


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure so that a reader sees either the old file or the new one."""
    with new_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def printable(path: str) -> str:
    """A path as text, with a question mark for each byte that is not UTF-8."""
    return path.encode(errors="replace").decode()
