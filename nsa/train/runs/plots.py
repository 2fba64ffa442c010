"""Curves of runs over their steps, made from the rows of metrics: ``loss.png`` and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa.train.telemetry.metrics import Row, read_metrics

# Of each plot: its label, the metric that is a line and the metric that is dots.
Plots = Sequence[tuple[str, str, str]]
LOSSES: Plots = (
    ("nats per token", "loss_nats", "val_loss_nats"),
    ("bits per byte of text", "bits_per_byte", "val_bits_per_byte"),
)


@dataclass(frozen=True)
class Curve:
    """A line in every plot of a figure, with dots of another metric.

    Attributes:
        label: its name in the legend.
        colour: as matplotlib knows it.
        rows: rows of metrics.
        scale: what a step counts on the horizontal axis.
    """

    label: str
    colour: Any
    rows: Sequence[Row]
    scale: int = 1


def curves_figure(curves: Sequence[Curve], plots: Plots, unit: str = "optimizer steps") -> Figure:
    """The plots side by side.

    Args:
        curves: one for each run.
        plots: what to plot.
        unit: of the horizontal axis.
    """
    figure = Figure(figsize=(5.5 * len(plots), 3.6), layout="constrained")
    for axes, (label, line, dots) in zip(axes_of(figure, len(plots)), plots, strict=True):
        for curve in curves:
            draw(axes, curve, line)
            draw(axes, curve, dots, marker="o", linestyle="none", markersize=3, label=None)
        finish(axes, label, unit, legend=len(curves) > 1)
    return figure


def axes_of(figure: Figure, number: int) -> list[Axes]:
    """So many axes in a row."""
    return list(figure.subplots(1, number, squeeze=False)[0])


def draw(axes: Axes, curve: Curve, metric: str, **style: Any) -> None:
    """Draw one metric, where a row has it."""
    rows = [row for row in curve.rows if metric in row]
    if rows:
        lone = {"marker": "."} if len(rows) == 1 else {}  # a line through one point is invisible
        steps = [int(row["step"]) * curve.scale for row in rows]
        values = [float(row[metric]) for row in rows]
        style = {"label": curve.label, "linewidth": 1.2, **lone, **style}
        axes.plot(steps, values, color=curve.colour, **style)


def finish(axes: Axes, title: str, unit: str, *, legend: bool) -> None:
    """Title, unit, grid and legend."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(unit)
    axes.grid(alpha=0.3)
    if legend and axes.get_legend_handles_labels()[0]:
        for text in axes.legend(fontsize=7).get_texts():
            text.set_parse_math(False)  # the name of a folder, in which $ is a dollar


def plot_losses(metrics: str | Path, target: str | Path, *, title: str = "") -> bool:
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
        figure.suptitle(title, parse_math=False)
        temporary = Path(target).with_suffix(".tmp")
        figure.savefig(temporary, dpi=120, format="png")
        temporary.replace(target)
    return bool(rows)
