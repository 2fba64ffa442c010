"""HTML pages and plots of runs (``nsa report``); a page needs no other file."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from nsa.files import new_file, read_lines
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run
from nsa.train.telemetry.metrics import ALWAYS, Row, read_metrics

_LARGEST = 1e100  # larger values overflow the axes
_MOST_NAMED = 16  # more curves have no legend
# Colours that colour-blind readers can tell apart.
_COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#777777")
_EVENTS_SHOWN = 200
_MARKED = {
    "nonfinite",
    "rollback",
    "resume",
    "gates",
    "throughput",
    "data",
    "hang",
    "checkpoint failed",
}
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
    return (
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


class Curve(NamedTuple):
    """Rows of metrics that are drawn in every plot of a figure.

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
    if all("bits_per_byte" in row for curve in curves for row in curve.rows):
        return Plot("bits per byte of text", "bits_per_byte", "val_bits_per_byte")
    return Plot("nats per token", "loss_nats", "val_loss_nats")


def curves_figure(
    curves: Sequence[Curve], plots: Sequence[Plot], unit: str = "optimizer steps"
) -> Figure:
    """Draw plots next to each other.

    Args:
        curves: the curves. A single curve has the names of the metrics in the legend.
        plots: the plots.
        unit: unit of the horizontal axis.
    """
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    dots = {"marker": "o", "linestyle": "none", "markersize": 3}
    for axes, plot in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        for curve, (metric, style) in itertools.product(
            curves, ((plot.line, {"linewidth": 1.2}), (plot.dots, dots))
        ):
            name = metric + curve.suffix
            rows = [row for row in curve.rows if name in row]
            if not rows:
                continue
            if len(rows) == 1:
                style = {"marker": ".", **style}  # a line through one point is invisible
            label = metric if len(curves) == 1 else curve.label if metric == plot.line else ""
            values = [float(row[name]) for row in rows]
            axes.plot(
                [int(row["step"]) * curve.scale for row in rows],
                [value if abs(value) < _LARGEST else math.nan for value in values],
                color=curve.colour,
                label=label,
                **style,
            )
        axes.set_title(plot.title, fontsize=10)
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
        if len(curves) <= _MOST_NAMED and axes.get_legend_handles_labels()[0]:
            for text in axes.legend(fontsize=7).get_texts():
                text.set_parse_math(False)  # the name of a folder, in which $ is a dollar
    return figure


def plot_losses(metrics: Path, target: Path, *, title: str = "") -> bool:
    """Plot training loss (line) and validation loss (dots) of a run.

    Args:
        metrics: ``metrics.jsonl`` of the run.
        target: PNG to write.
        title: line above the plot.

    Returns:
        Whether there are rows; without rows no file is written.
    """
    curve = Curve("", _COLOURS[0], read_metrics(metrics))
    if curve.rows:
        figure = curves_figure([curve], [loss_plot([curve])])
        figure.suptitle(title, parse_math=False)
        save_png(figure, target)
    return bool(curve.rows)


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


class _Run(NamedTuple):
    """Data of a run for the page."""

    name: str
    colour: str
    folder: RunFolder
    config: TrainConfig
    rows: list[Row]
    events: list[dict[str, Any]]


def report_page(folders: Sequence[RunFolder]) -> str:
    """Return the page as HTML.

    Args:
        folders: runs to compare.
    """
    names = [folder.path.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in folders]
    runs = [
        _Run(
            name,
            colour,
            folder,
            folder.load_config(),
            read_metrics(folder.metrics_jsonl, *ALWAYS),
            [event for _, event in read_lines(folder.events, "an event", _as_event) if event],
        )
        for name, colour, folder in zip(names, itertools.cycle(_COLOURS), folders, strict=False)
    ]
    head = ("run", "steps", "tokens", "loss (nats/token)", "best validation (bits/byte)")
    sections = {"Summary": table((*head, "tokens/s", "hours", "end", "records"), map(_ends, runs))}
    loss = loss_plot(Curve("", "", run.rows) for run in runs)
    curves = {"Loss": _Section("Training loss (line) and validation loss (dots).", [loss])}
    for title, section in (curves | _CURVES).items():
        shown = (_layers if section.of_layers else _figure)(runs, section)
        sections[title] = shown or f"<p>Nothing was recorded{section.absent}.</p>"
    sections["Sample"] = "".join(map(_sample, runs)) or "<p>None was written.</p>"
    sections["Events"] = "".join(map(_events, runs))
    sections["Configuration"] = _configuration(runs)
    launches = {run.name: run.folder.launches() for run in runs}
    environments = {
        name: {"launches": len(found), **dict(_leaves(found[-1] if found else {}))}
        for name, found in launches.items()
    }
    sections["Environment"] = _columns("last launch", environments)
    return page(("Run " if len(runs) == 1 else "Runs ") + ", ".join(names), sections)


def _as_event(values: Any) -> dict[str, Any] | None:
    fits = isinstance(values, dict) and values.keys() >= {"time_unix_s", "kind", "message"}
    return {"step": None, **values} if fits else None


def _ends(run: _Run) -> list[object]:
    """Row of a run in the summary: its last row, its end and the agreement of its records."""
    last: Row = run.rows[-1] if run.rows else {}
    validation = [float(row["val_bits_per_byte"]) for row in run.rows if "val_bits_per_byte" in row]
    speed = float(last.get("tokens_per_s_total", math.nan))
    known = math.isfinite(speed) and speed > 0
    ends = [event["kind"] for event in run.events if event["kind"] in _ENDS]
    found = check_run(run.folder)[1]
    return [
        run.name,
        f"{last.get('step', 0)} of {run.config.steps}",
        last.get("tokens"),
        round(float(last["loss_nats"]), 4) if last else None,
        round(min(validation), 4) if validation else None,
        round(speed) if known else None,
        round(float(last["tokens"]) / speed / 3600, 2) if known else None,
        _ENDS[ends[-1]] if ends else "running, or killed",
        f"{len(found)} disagree: {found[0]}" if found else "agree",
    ]


def _sample(run: _Run) -> str:
    if not run.folder.sample.exists():
        return ""
    text = run.folder.sample.read_text(encoding="utf-8", errors="replace")
    return f"<h3>{escape(run.name)}</h3>\n<pre>{escape(text)}</pre>"


def _events(run: _Run) -> str:
    counts = sorted(Counter(event["kind"] for event in run.events).items())
    rows = (
        (
            f"{datetime.fromtimestamp(event['time_unix_s'], UTC):%Y-%m-%d %H:%M:%S}",
            event["kind"],
            event["step"],
            event["message"],
        )
        for event in [one for one in run.events if one["kind"] != "checkpoint"][-_EVENTS_SHOWN:]
    )
    summary = escape(", ".join(f"{kind} {number}" for kind, number in counts))
    listed = table(("time (UTC)", "kind", "step", "message"), rows)
    return f"<h3>{escape(run.name)}</h3>\n<p>{summary}</p>\n{listed}"


def _configuration(runs: Sequence[_Run]) -> str:
    """Settings that differ between the runs; for a single run, from the defaults."""
    configs = {run.name: run.config for run in runs}
    if len(runs) == 1:
        configs["default"] = TrainConfig()
    columns = {name: dict(_leaves(dataclasses.asdict(one))) for name, one in configs.items()}
    names = sorted({name for column in columns.values() for name in column})
    differing = [
        name for name in names if len({repr(column.get(name)) for column in columns.values()}) > 1
    ]
    return "<p>Settings that differ.</p>" + _columns("setting", columns, differing)


def _columns(
    title: str, columns: Mapping[str, dict[str, Any]], names: Sequence[str] | None = None
) -> str:
    """Table with a column for each run and a row for each name."""
    if names is None:
        names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = ([name, *(column.get(name) for column in columns.values())] for name in names)
    return table((title, *columns), rows)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested dictionaries with their dotted names."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _figure(runs: Sequence[_Run], section: _Section) -> str:
    """Figure with a plot for each metric that was recorded, and a line for each run."""
    recorded = {name for run in runs for row in run.rows for name in row}
    plots = [plot for plot in section.plots if plot.line in recorded]
    if not plots:
        return ""
    # Steps of different sizes cannot be compared with each other, tokens can.
    sizes = [run.config.global_batch * run.config.seq_len for run in runs]
    unit, scales = "tokens", sizes
    if len(set(sizes)) == 1:
        unit, scales = "optimizer steps", [1] * len(runs)
    pairs = zip(runs, scales, strict=True)
    curves = [Curve(run.name, run.colour, run.rows, scale) for run, scale in pairs]
    figure = curves_figure(curves, plots, unit)
    for axes, (run, scale) in itertools.product(figure.axes, zip(runs, scales, strict=True)):
        for step in {event["step"] for event in run.events if event["kind"] in _MARKED} - {None}:
            axes.axvline(step * scale, color=run.colour, linewidth=0.6, linestyle=":")
    marks = "Dotted lines: resumptions, rollbacks, hangs, warnings."
    return figure_element(figure, f"{section.caption} {marks}")


def layers_figure(
    rows: Sequence[Row],
    layers: Sequence[int],
    plots: Sequence[Plot],
    unit: str = "optimizer steps",
) -> Figure:
    """Draw metrics of layers, dark to light from the first layer to the last.

    Args:
        rows: rows of metrics whose names end in ``_layer_<n>``.
        layers: indices of the layers.
        plots: the plots, with names of metrics without this end.
        unit: unit of the horizontal axis.
    """
    colours = mpl.colormaps["viridis"].resampled(len(layers) + 1)  # the lightest is invisible
    curves = [
        Curve(f"layer {layer}", colours(number), rows, suffix=f"_layer_{layer}")
        for number, layer in enumerate(layers)
    ]
    figure = curves_figure(curves, plots, unit)
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
    return figure


def _layers(runs: Sequence[_Run], section: _Section) -> str:
    """Figure for each run with a plot for each metric and a line for each layer."""
    parts = []
    for run in runs:
        pattern = re.compile(rf"{section.plots[-1].line}_layer_(\d+)")
        found = (pattern.fullmatch(name) for row in run.rows for name in row)
        layers = sorted({int(match[1]) for match in found if match})
        if layers:
            figure = layers_figure(run.rows, layers, section.plots)
            caption = f"{section.caption} Dark to light from the first layer to the last."
            parts.append(f"<h3>{escape(run.name)}</h3>\n{figure_element(figure, caption)}")
    return "".join(parts)
