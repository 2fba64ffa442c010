"""Plots of a run, made from its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from nsa.train.telemetry.metrics import Row, read_metrics

_TRAINING, _VALIDATION = "#4477aa", "#cc3311"  # apart for colour-blind readers too


def plot_losses(metrics: str | Path, target: str | Path, *, title: str = "") -> bool:
    """Write the plot of :func:`loss_figure` for a run.

    Args:
        metrics: ``metrics.jsonl`` of the run.
        target: PNG to write.
        title: line above the plots.

    Returns:
        Whether there was anything to plot; without rows no file is written.
    """
    rows = read_metrics(metrics)
    if rows:
        temporary = Path(target).with_suffix(".tmp")
        loss_figure(rows, title=title).savefig(temporary, dpi=120, format="png")
        temporary.replace(target)
    return bool(rows)


def loss_figure(rows: Sequence[Row], *, title: str = "") -> Figure:
    """Training and held-out loss over the optimizer steps, with the tokens above: nats per token, and bits per byte of text."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot(left, rows, "loss_nats", "val_loss_nats", "loss (nats per token)")
    _plot(right, rows, "bits_per_byte", "val_bits_per_byte", "loss (bits per byte of text)")
    if title:
        figure.suptitle(title, parse_math=False)  # the name of a folder, in which $ is a dollar
    return figure


def _plot(axes: Axes, rows: Sequence[Row], training: str, validation: str, label: str) -> None:
    for name, legend, colour, marker in ((training, "training", _TRAINING, None), (validation, "held out", _VALIDATION, "o")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            steps, values = zip(*points, strict=True)
            lone = marker or ("." if len(points) == 1 else None)  # a line through one point is invisible
            axes.plot(steps, values, color=colour, marker=lone, markersize=4, linewidth=1.3, label=legend)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    tokens_per_step = float(rows[-1]["tokens"]) / max(float(rows[-1]["step"]), 1) if "tokens" in rows[-1] else 0.0
    if tokens_per_step > 0:
        above = axes.secondary_xaxis(
            "top", functions=(partial(np.multiply, tokens_per_step), partial(np.multiply, 1 / tokens_per_step))
        )
        above.set_xlabel("tokens")
        above.xaxis.set_major_formatter(EngFormatter(sep=""))
