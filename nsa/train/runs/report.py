"""One page about runs: loss, curves, sample, events, configuration, environment."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple

import matplotlib as mpl

from nsa.files import read_lines
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run
from nsa.train.runs.page import (
    Curve,
    Plot,
    curves_figure,
    figure_element,
    loss_plot,
    page,
    printable,
    table,
)
from nsa.train.telemetry.metrics import ALWAYS, Row, read_metrics

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


class _Section(NamedTuple):
    """Section of curves: its plots, and the reason why there may be none."""

    title: str
    caption: str
    plots: Sequence[Plot]
    absent: str = ""
    of_layers: bool = False


_CURVES = (
    _Section(
        "Optimisation",
        "Learning rate and norm of the gradient before clipping.",
        (Plot("learning rate", "learning_rate"), Plot("gradient norm", "grad_norm")),
    ),
    _Section(
        "Throughput",
        "Training speed, and the time of a step (line) with its wait for data (dots).",
        (Plot("tokens/s", "tokens_per_s"), Plot("ms a step", "step_time_ms", "data_time_ms")),
    ),
    _Section(
        "Device",
        "Use of the GPU, and its memory: reserved (line), in tensors (dots).",
        (Plot("MFU", "mfu"), Plot("memory, MiB", "memory_reserved_mib", "memory_allocated_mib")),
        ": no GPU",
    ),
    _Section(
        "Gates",
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
    _Section(
        "Selection",
        "Blocks that the selected branch attends to in the step of the row.",
        (
            Plot("keys a query sees", "selected_tokens"),
            Plot("mean distance of these keys, tokens", "selected_distance_tokens"),
            Plot("share selected by the previous query too", "selected_overlap"),
        ),
        ": dense attention, no selected branch, or telemetry switched off",
        of_layers=True,
    ),
)


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
            [event for _, event in read_lines(folder.events, "an event", _as_event) if event],
        )
        for name, colour, folder in zip(names, itertools.cycle(_COLOURS), folders, strict=False)
    ]
    title = ("Run " if len(runs) == 1 else "Runs ") + ", ".join(names)
    head = ("run", "steps", "tokens", "loss (nats/token)", "best validation (bits/byte)")
    summary = table((*head, "tokens/s", "hours", "end", "records"), map(_summary_row, runs))
    caption = "Training loss (line) and validation loss (dots)."
    loss = _Section("Loss", caption, [loss_plot(_curves(runs))])
    sections = {"Summary": summary}
    for section in (loss, *_CURVES):
        shown = (_layers if section.of_layers else _figure)(runs, section)
        sections[section.title] = shown or f"<p>Nothing was recorded{section.absent}.</p>"
    sections["Sample"] = "".join(map(_sample, runs)) or "<p>None was written.</p>"
    sections["Events"] = "".join(map(_events, runs))
    sections["Configuration"] = _configuration(runs)
    launches = {run.name: run.folder.launches() for run in runs}
    environments = {
        name: {"launches": len(found), **_flat(found[-1] if found else {})}
        for name, found in launches.items()
    }
    sections["Environment"] = _side_by_side("last launch", environments)
    return page(title, sections)


def _as_event(values: Any) -> dict[str, Any] | None:
    fits = isinstance(values, dict) and values.keys() >= {"time_unix_s", "kind", "message"}
    return {"step": None, **values} if fits else None


# --- text and tables ------------------------------------------------------------------------------
def _summary_row(run: _Run) -> list[object]:
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
    shown = [event for event in run.events if event["kind"] != "checkpoint"][-_EVENTS_SHOWN:]
    rows = (
        (
            f"{datetime.fromtimestamp(event['time_unix_s'], UTC):%Y-%m-%d %H:%M:%S}",
            event["kind"],
            event["step"],
            event["message"],
        )
        for event in shown
    )
    summary = escape(", ".join(f"{kind} {number}" for kind, number in counts))
    listed = table(("time (UTC)", "kind", "step", "message"), rows)
    return f"<h3>{escape(run.name)}</h3>\n<p>{summary}</p>\n{listed}"


def _configuration(runs: Sequence[_Run]) -> str:
    """Settings that differ between the runs; for a single run, from the defaults."""
    columns = {run.name: _flat(dataclasses.asdict(run.config)) for run in runs}
    if len(runs) == 1:
        columns["default"] = _flat(dataclasses.asdict(TrainConfig()))
    names = sorted({name for column in columns.values() for name in column})
    differing = [
        name for name in names if len({repr(column.get(name)) for column in columns.values()}) > 1
    ]
    if not differing:
        return "<p>No setting differs.</p>"
    return "<p>Settings that differ.</p>" + _side_by_side("setting", columns, differing)


def _side_by_side(
    title: str, columns: Mapping[str, dict[str, Any]], names: Sequence[str] = ()
) -> str:
    names = names or list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = ([name, *(column.get(name) for column in columns.values())] for name in names)
    return table((title, *columns), rows)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Values of nested dictionaries by dotted name."""

    def leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dict(leaves(tree, ""))


# --- figures --------------------------------------------------------------------------------------
def _curves(runs: Sequence[_Run], scales: Sequence[int] = ()) -> list[Curve]:
    scales = scales or [1] * len(runs)
    return [
        Curve(run.name, run.colour, run.rows, scale)
        for run, scale in zip(runs, scales, strict=True)
    ]


def _figure(runs: Sequence[_Run], section: _Section) -> str:
    """Figure with a plot for each metric that was recorded, and a line for each run."""
    recorded = {name for run in runs for row in run.rows for name in row}
    plots = [plot for plot in section.plots if plot.line in recorded]
    if not plots:
        return ""
    # Steps of different sizes cannot be compared with each other, tokens can.
    sizes = [run.config.global_batch * run.config.seq_len for run in runs]
    unit = "optimizer steps" if len(set(sizes)) == 1 else "tokens"
    curves = _curves(runs, sizes if unit == "tokens" else ())
    figure = curves_figure(curves, plots, unit)
    for axes, (run, curve) in itertools.product(figure.axes, zip(runs, curves, strict=True)):
        for step in {event["step"] for event in run.events if event["kind"] in _MARKED} - {None}:
            axes.axvline(step * curve.scale, color=run.colour, linewidth=0.6, linestyle=":")
    marks = "Dotted lines: resumptions, rollbacks, hangs, warnings."
    return figure_element(figure, f"{section.caption} {marks}")


def _layers(runs: Sequence[_Run], section: _Section) -> str:
    """Figure for each run with a plot for each metric and a line for each layer."""
    parts = []
    for run in runs:
        pattern = re.compile(rf"{section.plots[-1].line}_layer_(\d+)")
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
