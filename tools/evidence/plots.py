"""Plots of the report: panels of lines side by side, the same bytes from the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

from tools.evidence.experiments import DENSE, NSA, SHARED, SMALL_DENSE

COLOURS = {SHARED: "#4477aa", NSA: "#66ccee", DENSE: "#cc3311", SMALL_DENSE: "#ccbb44"}
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    Attributes:
        label: its name.
        points: x and y.
        style: what matplotlib is told of it.
    """

    label: str
    points: Sequence[tuple[float, float]]
    style: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Lines in one coordinate system.

    Attributes:
        x: what lies to the right.
        y: what lies upwards.
        lines: what is drawn.
        settings: of matplotlib's axes.
    """

    x: str
    y: str
    lines: Sequence[Line]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plot:
    """A plot of a page.

    Attributes:
        name: file in the folder of the page.
        about: what all panels show.
        png: content of the file.
    """

    name: str
    about: str
    png: bytes

    def __str__(self) -> str:
        """The line of Markdown that shows it."""
        return f"![{self.about}]({self.name})"


def draw(name: str, panels: Sequence[Panel]) -> Plot:
    """Draw panels side by side.

    Args:
        name: file in the folder of the page.
        panels: what to draw; the first has lines of all names.
    """
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(places, panels, strict=True):
        for line in panel.lines:
            xs, ys = zip(*line.points, strict=True)
            axes.plot(xs, ys, label=line.label, **{"linewidth": 1.2, **line.style})
        axes.set(xlabel=panel.x, ylabel=panel.y, **panel.settings)
        axes.grid(alpha=0.3)
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    return Plot(
        name, "; ".join(f"{panel.y} over {panel.x}" for panel in panels), content.getvalue()
    )
