"""One page about runs: curves, gates, events, environment, differences. It needs no other file."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

from nsa.files import read_lines
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run
from nsa.train.runs.page import figure_element, page, table
from nsa.train.runs.plots import LOSSES, Curve, Plots, curves_figure, printable
from nsa.train.telemetry.metrics import ALWAYS, Row, read_metrics

# Colour-blind readers can tell them apart too.
_COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#777777")
_EVENTS_SHOWN = 200
_MARKED = (
    "nonfinite",
    "rollback",
    "resume",
    "gates",
    "throughput",
    "data",
    "hang",
    "checkpoint failed",
)
_ENDS = {
    "finish": "finished",
    "stop": "stopped",
    "end": "ended by the watchdog",
    "error": "ended by an error",
}


class _Section(NamedTuple):
    """Curves of the page: what they show, and why there may be nothing to show."""

    title: str
    caption: str
    plots: Plots
    absent: str = ""
    of_layers: bool = False


_CURVES = (
    _Section("Loss", "Training loss (line) and validation loss (dots).", LOSSES),
    _Section(
        "Optimisation",
        "Learning rate and norm of the gradient before clipping.",
        (("learning rate", "learning_rate", ""), ("gradient norm", "grad_norm", "")),
    ),
    _Section(
        "Throughput",
        "Training speed, and the time of a step (line) with its wait for data (dots).",
        (("tokens/s", "tokens_per_s", ""), ("ms a step", "step_time_ms", "data_time_ms")),
    ),
    _Section(
        "Device",
        "Use of the GPU, and its memory: reserved (line), in tensors (dots).",
        (("MFU", "mfu", ""), ("memory, MiB", "memory_reserved_mib", "memory_allocated_mib")),
        ": no GPU",
    ),
    _Section(
        "Gates",
        "Gates in the step of the row. Entropy 1: all branches weigh alike.",
        (
            ("compressed, mean gate", "gate_cmp_mean", ""),
            ("selected, mean gate", "gate_slc_mean", ""),
            ("window, mean gate", "gate_win_mean", ""),
            ("entropy", "gate_entropy", ""),
        ),
        ": dense attention, fixed gates, or telemetry switched off",
        of_layers=True,
    ),
    _Section(
        "Selection",
        "Blocks that the selected branch attends to in the step of the row.",
        (
            ("keys a query sees", "selected_tokens", ""),
            ("their mean distance, tokens", "selected_distance_tokens", ""),
            ("share the previous query selected too", "selected_overlap", ""),
        ),
        ": dense attention, no selected branch, or telemetry switched off",
        of_layers=True,
    ),
)


@dataclass(frozen=True)
class _Run:
    """What the page needs of a run."""

    name: str
    colour: str
    folder: RunFolder
    config: TrainConfig
    rows: list[Row]
    events: list[dict[str, Any]]


def report_page(folders: Sequence[RunFolder]) -> str:
    """The page as HTML.

    Args:
        folders: runs, the first of which the others are compared with.
    """
    names = [printable(folder.path.resolve().name) for folder in folders]
    if len(set(names)) < len(names):
        names = [printable(str(folder.path)) for folder in folders]
    runs = [
        _Run(
            name,
            colour,
            folder,
            folder.load_config(),
            read_metrics(folder.metrics_jsonl, *ALWAYS),
            _read_events(folder.events),
        )
        for name, colour, folder in zip(names, itertools.cycle(_COLOURS), folders, strict=False)
    ]
    title = ("Run " if len(runs) == 1 else "Runs ") + ", ".join(names)
    sections = {"Summary": _summary(runs)}
    for section in _CURVES:
        shown = (_layers if section.of_layers else _curves)(runs, section)
        sections[section.title] = shown or f"<p>Nothing was recorded{section.absent}.</p>"
    sections["Events"] = "".join(_events(run) for run in runs)
    sections["Configuration"] = _configuration(runs)
    sections["Environment"] = _environment(runs)
    return page(title, sections)


def _read_events(path: Path) -> list[dict[str, Any]]:
    found = read_lines(path, "an event", _as_event)
    return [event for _, event in found if event is not None]


def _as_event(values: Any) -> dict[str, Any] | None:
    try:
        event = {"step": None, **values}
        datetime.fromtimestamp(event["time_unix_s"], UTC)
        fits = isinstance(event["kind"], str) and isinstance(event["message"], str)
    except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
        return None
    step = event["step"]
    return event if fits and (step is None or (type(step) is int and abs(step) < 2**53)) else None


# --- tables ---------------------------------------------------------------------------------------
def _summary(runs: Sequence[_Run]) -> str:
    head = ("run", "steps", "tokens", "loss (nats/token)", "best validation (bits/byte)")
    return table((*head, "tokens/s", "hours", "end", "records"), map(_summary_row, runs))


def _summary_row(run: _Run) -> list[object]:
    last: Row = run.rows[-1] if run.rows else {}
    figures = [float(row["val_bits_per_byte"]) for row in run.rows if "val_bits_per_byte" in row]
    speed = float(last["tokens_per_s_total"]) if last else math.nan
    known = math.isfinite(speed) and speed > 0
    ends = [event["kind"] for event in run.events if event["kind"] in _ENDS]
    found = check_run(run.folder)[1]
    return [
        run.name,
        f"{last.get('step', 0)} of {run.config.steps}",
        last.get("tokens"),
        round(float(last["loss_nats"]), 4) if last else None,
        round(min(figures), 4) if figures else None,
        round(speed) if known else None,
        round(float(last["tokens"]) / speed / 3600, 2) if known else None,
        _ENDS[ends[-1]] if ends else "running, or killed",
        f"{len(found)} disagree: {found[0]}" if found else "agree",
    ]


def _events(run: _Run) -> str:
    counts = sorted(Counter(event["kind"] for event in run.events).items())
    shown = [event for event in run.events if event["kind"] != "checkpoint"][-_EVENTS_SHOWN:]
    rows = ((_utc(event), event["kind"], event["step"], event["message"]) for event in shown)
    said = escape(", ".join(f"{kind} {number}" for kind, number in counts))
    listed = table(("time (UTC)", "kind", "step", "what"), rows)
    return f"<h3>{escape(run.name)}</h3>\n<p>{said}</p>\n{listed}"


def _utc(event: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(event['time_unix_s'], UTC):%Y-%m-%d %H:%M:%S}"


def _configuration(runs: Sequence[_Run]) -> str:
    """Where the runs differ; of a single run, where it differs from the defaults."""
    columns = {run.name: dict(_flat(dataclasses.asdict(run.config))) for run in runs}
    if len(runs) == 1:
        columns["default"] = dict(_flat(dataclasses.asdict(TrainConfig())))
    names = sorted({name for column in columns.values() for name in column})
    differing = [
        name for name in names if len({repr(column.get(name)) for column in columns.values()}) > 1
    ]
    if not differing:
        return "<p>No setting differs.</p>"
    return "<p>Settings that differ.</p>" + _side_by_side("setting", columns, differing)


def _environment(runs: Sequence[_Run]) -> str:
    columns: dict[str, dict[str, Any]] = {}
    for run in runs:
        launches = run.folder.launches()
        last = launches[-1] if launches else {}
        columns[run.name] = {"launches": len(launches), **dict(_flat(last))}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return _side_by_side("last launch", columns, names)


def _side_by_side(title: str, columns: dict[str, dict[str, Any]], names: Iterable[str]) -> str:
    rows = ([name, *(column.get(name) for column in columns.values())] for name in names)
    return table((title, *columns), rows)


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- figures --------------------------------------------------------------------------------------
def _curves(runs: Sequence[_Run], section: _Section) -> str:
    """A figure with a plot for each metric and a line in it for each run."""
    recorded = {name for run in runs for row in run.rows for name in row}
    plots = [plot for plot in section.plots if plot[1] in recorded]
    if not plots:
        return ""
    # Steps of different sizes cannot be compared with each other, tokens can.
    sizes = [run.config.global_batch * run.config.seq_len for run in runs]
    unit = "optimizer steps" if len(set(sizes)) == 1 else "tokens"
    scales = [size if unit == "tokens" else 1 for size in sizes]
    pairs = list(zip(runs, scales, strict=True))
    curves = [Curve(run.name, run.colour, run.rows, scale) for run, scale in pairs]
    figure = curves_figure(curves, plots, unit)
    for axes, (run, scale) in itertools.product(figure.axes, pairs):
        for step in {event["step"] for event in run.events if event["kind"] in _MARKED} - {None}:
            axes.axvline(step * scale, color=run.colour, linewidth=0.6, linestyle=":")
    marks = "Dotted lines: resumptions, rollbacks, hangs, warnings."
    return figure_element(figure, f"{section.caption} {marks}")


def _layers(runs: Sequence[_Run], section: _Section) -> str:
    """A figure for each run with a plot for each metric and a line in it for each layer."""
    parts = []
    for run in runs:
        pattern = re.compile(rf"{section.plots[-1][1]}_layer_(\d+)")
        found = (pattern.fullmatch(name) for row in run.rows for name in row)
        layers = sorted({int(match[1]) for match in found if match})
        if not layers:
            continue
        shades = mpl.colormaps["viridis"].resampled(len(layers) + 1)  # the lightest is invisible
        curves = [
            Curve(f"layer {layer}", shades(number), run.rows, suffix=f"_layer_{layer}")
            for number, layer in enumerate(layers)
        ]
        figure = curves_figure(curves, section.plots)
        for axes in figure.axes:
            axes.set_ylim(bottom=0)
        caption = f"{section.caption} Dark to light from the first layer to the last."
        parts.append(f"<h3>{escape(run.name)}</h3>\n{figure_element(figure, caption)}")
    return "".join(parts)
