"""HTML pages and plots of runs (``nsa report``); a page needs no other file."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa.files import new_file, read_lines
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import ALWAYS, Row, read_metrics

_LARGEST = 1e100  # larger values overflow the axes
_MOST_NAMED = 16  # more layers have no legend
_EVENTS_SHOWN = 200
_ENDS = {
    "finish": "finished",
    "stop": "stopped",
    "end": "ended by the watchdog",
    "error": "ended by an error",
}
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
img { max-width: 100%; }
pre, td { white-space: pre-wrap; overflow-wrap: anywhere; }
div { overflow-x: auto; }
th, td { text-align: left; padding: 0.2rem 0.8rem 0.2rem 0; vertical-align: top; }
"""


# --- parts of a page ------------------------------------------------------------------------------
def page(title: str, sections: Mapping[str, str]) -> str:
    """Return a page as HTML.

    Args:
        title: title of the page, plain text.
        sections: HTML of each section by its title.
    """
    made = datetime.now(UTC).isoformat(timespec="seconds")
    body = "\n".join(f"<h2>{name}</h2>\n{text}" for name, text in sections.items())
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">\n{view}\n<title>{escape(title)}</title>'
    return printable(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{escape(title)}</h1>\n<p>Made {made}.</p>\n{body}\n</body>\n</html>\n"
    )


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as HTML.

    Args:
        head: titles of the columns.
        rows: cells; None is an empty cell.
    """
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<div><table>\n<tr>{top}</tr>\n{body}\n</table></div>"


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value:,}"
    return f"<td>{escape('' if value is None else str(value))}</td>"


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
    """Title of the axes, the metric drawn as a line, and the one drawn as dots if any."""

    title: str
    line: str
    dots: str = ""


def loss_plot(rows: Sequence[Row]) -> Plot:
    """Loss in bits per byte, or in nats per token if there are no bytes (a synthetic task)."""
    if all("bits_per_byte" in row for row in rows):
        return Plot("bits per byte of text", "bits_per_byte", "val_bits_per_byte")
    return Plot("nats per token", "loss_nats", "val_loss_nats")


def curves_figure(
    rows: Sequence[Row],
    plots: Sequence[Plot],
    layers: Sequence[int] = (),
    unit: str = "optimizer steps",
) -> Figure:
    """Draw plots next to each other.

    Args:
        rows: rows of metrics.
        plots: the plots.
        layers: indices of layers, which get a line each, dark to light from the first to the last;
            the metrics have names that end in ``_layer_<n>``.
        unit: unit of the horizontal axis.
    """
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    shades = mpl.colormaps["viridis"].resampled(len(layers) + 1)  # the lightest is invisible
    dots = {"marker": "o", "linestyle": "none", "markersize": 3}
    for axes, plot in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        for number, layer in enumerate(layers):
            name = f"{plot.line}_layer_{layer}"
            _draw(axes, rows, name, label=f"layer {layer}", color=shades(number))
            axes.set_ylim(bottom=0)
        if not layers:
            _draw(axes, rows, plot.line, label=plot.line, linewidth=1.2)
            _draw(axes, rows, plot.dots, label=plot.dots, **dots)
        axes.set_title(plot.title, fontsize=10)
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
        if len(layers) <= _MOST_NAMED and axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    return figure


def _draw(axes: Axes, rows: Sequence[Row], name: str, **style: Any) -> None:
    """Draw the values of a metric, if there are any."""
    points = [(int(row["step"]), float(row[name])) for row in rows if name in row]
    points = [(step, value if abs(value) < _LARGEST else math.nan) for step, value in points]
    if len(points) == 1:
        style = {"marker": ".", **style}  # a line through one point is invisible
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def plot_losses(metrics: Path, target: Path, *, title: str = "") -> bool:
    """Plot training loss (line) and validation loss (dots) of a run.

    Args:
        metrics: ``metrics.jsonl`` of the run.
        target: PNG to write.
        title: line above the plot.

    Returns:
        Whether there are rows; without rows no file is written.
    """
    if rows := read_metrics(metrics):
        figure = curves_figure(rows, [loss_plot(rows)])
        figure.suptitle(printable(title), parse_math=False)
        save_png(figure, target)
    return bool(rows)


# --- the report -----------------------------------------------------------------------------------
class _Section(NamedTuple):
    """Section of curves: its plots, and the reason why there may be none."""

    caption: str
    plots: Sequence[Plot]
    absent: str = ""
    of_layers: bool = False


_CURVES = {
    "Optimisation": _Section(
        "Learning rate and norm of the gradient before clipping.",
        (Plot("learning rate", "learning_rate"), Plot("gradient norm", "grad_norm")),
    ),
    "Throughput": _Section(
        "Training speed, and the time of a step (line) with its wait for data (dots).",
        (Plot("tokens/s", "tokens_per_s"), Plot("ms a step", "step_time_ms", "data_time_ms")),
    ),
    "Device": _Section(
        "Use of the GPU, and its memory: reserved (line), in tensors (dots).",
        (Plot("MFU", "mfu"), Plot("memory, MiB", "memory_reserved_mib", "memory_allocated_mib")),
        ": no GPU",
    ),
    "Gates": _Section(
        "Gates in the step of the row. Entropy 1: gates are uniform.",
        (
            Plot("compressed, mean gate", "gate_cmp_mean"),
            Plot("selected, mean gate", "gate_slc_mean"),
            Plot("window, mean gate", "gate_win_mean"),
            Plot("entropy", "gate_entropy"),
        ),
        ": dense attention, fixed gates, or telemetry switched off",
        of_layers=True,
    ),
    "Selection": _Section(
        "Blocks that the selected branch attends to in the step of the row.",
        (
            Plot("keys a query sees", "selected_tokens"),
            Plot("mean distance of these keys, tokens", "selected_distance_tokens"),
            Plot("share selected by the previous query too", "selected_overlap"),
        ),
        ": dense attention, no selected branch, or telemetry switched off",
        of_layers=True,
    ),
}


def report_page(folder: RunFolder) -> str:
    """Return the page of a run as HTML."""
    config, rows = folder.load_config(), read_metrics(folder.metrics_jsonl, *ALWAYS)
    events = [event for _, event in read_lines(folder.events, "an event", _as_event) if event]
    sections = {"Summary": _summary(config, rows, events)}
    caption = "Training loss (line) and validation loss (dots)."
    for title, section in {"Loss": _Section(caption, [loss_plot(rows)]), **_CURVES}.items():
        shown = _figure(rows, section)
        sections[title] = shown or f"<p>Nothing was recorded{section.absent}.</p>"
    sample = "None was written."
    if folder.sample.exists():
        sample = folder.sample.read_text(encoding="utf-8", errors="replace")
    sections["Sample"] = f"<pre>{escape(sample)}</pre>"
    sections["Events"] = _events(events)
    default = dict(_leaves(dataclasses.asdict(TrainConfig())))
    settings = (
        (name, value, default.get(name))
        for name, value in _leaves(dataclasses.asdict(config))
        if value != default.get(name)
    )
    sections["Configuration"] = table(("setting", "run", "default"), settings)
    launches = folder.launches()
    values = {"launches": len(launches), **dict(_leaves(launches[-1] if launches else {}))}
    sections["Environment"] = table(("last launch", ""), values.items())
    return page(f"Run {printable(folder.path.resolve().name)}", sections)


def _as_event(values: Any) -> dict[str, Any] | None:
    fits = isinstance(values, dict) and values.keys() >= {"time_unix_s", "kind", "message"}
    return {"step": None, **values} if fits else None


def _summary(config: TrainConfig, rows: Sequence[Row], events: Sequence[dict[str, Any]]) -> str:
    """Table with the last row and the end of the run."""
    last: Row = rows[-1] if rows else {}
    validation = [float(row["val_bits_per_byte"]) for row in rows if "val_bits_per_byte" in row]
    speed = float(last.get("tokens_per_s_total", math.nan))
    known = math.isfinite(speed) and speed > 0
    ends = [event["kind"] for event in events if event["kind"] in _ENDS]
    head = ("steps", "tokens", "loss (nats/token)", "best validation (bits/byte)", "tokens/s")
    values = (
        f"{last.get('step', 0)} of {config.steps}",
        last.get("tokens"),
        round(float(last["loss_nats"]), 4) if last else None,
        round(min(validation), 4) if validation else None,
        round(speed) if known else None,
        round(float(last["tokens"]) / speed / 3600, 2) if known else None,
        _ENDS[ends[-1]] if ends else "running, or killed",
    )
    return table((*head, "hours", "end"), [values])


def _events(events: Sequence[dict[str, Any]]) -> str:
    counts = sorted(Counter(event["kind"] for event in events).items())
    rows = (
        (
            f"{datetime.fromtimestamp(event['time_unix_s'], UTC):%Y-%m-%d %H:%M:%S}",
            event["kind"],
            event["step"],
            event["message"],
        )
        for event in [one for one in events if one["kind"] != "checkpoint"][-_EVENTS_SHOWN:]
    )
    summary = escape(", ".join(f"{kind} {number}" for kind, number in counts))
    return f"<p>{summary}</p>\n{table(('time (UTC)', 'kind', 'step', 'message'), rows)}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested dictionaries with their dotted names."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _figure(rows: Sequence[Row], section: _Section) -> str:
    """Figure with a plot for each metric that was recorded; empty without any."""
    recorded = {name for row in rows for name in row}
    if section.of_layers:
        pattern = re.compile(rf"{section.plots[-1].line}_layer_(\d+)")
        layers = sorted(int(match[1]) for name in recorded if (match := pattern.fullmatch(name)))
        caption = f"{section.caption} Dark to light from the first layer to the last."
        figure = curves_figure(rows, section.plots, layers)
        return figure_element(figure, caption) if layers else ""
    plots = [plot for plot in section.plots if plot.line in recorded]
    return figure_element(curves_figure(rows, plots), section.caption) if plots else ""
