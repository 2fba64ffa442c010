"""One page about runs: curves, gates, events, environment, differences. It holds all that it shows."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa.errors import check
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run
from nsa.train.telemetry.metrics import Row, read_metrics

_COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#777777")  # apart for colour-blind readers too
_BRANCHES = (("cmp", "compressed"), ("slc", "selected"), ("win", "window"))
_EVENTS_SHOWN = 200
_MARKED = ("nonfinite", "rollback", "resume", "gates", "throughput", "data", "hang", "checkpoint failed")
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; }
body { max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
figure { margin: 1rem 0; } figcaption { color: #555; } img { max-width: 100%; height: auto; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.2rem 0.8rem 0.2rem 0; vertical-align: top; border-bottom: 1px solid #eee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child { white-space: nowrap; }
td.text:not(:first-child) { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 4.5rem; }
td.text:not(:first-child):last-child { min-width: 11rem; }
@media (max-width: 40rem) { td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 6.5rem; } }
.bad { color: #b00020; font-weight: 600; } .good { color: #1b6e3a; }
"""


@dataclass(frozen=True)
class _Run:
    """What the page needs of a run."""

    name: str
    colour: str
    folder: RunFolder
    config: TrainConfig
    rows: list[Row]
    events: list[dict[str, Any]]
    launches: list[dict[str, Any]]


def report_page(folders: Sequence[RunFolder]) -> str:
    """The page as HTML.

    Args:
        folders: runs, the first of which the others are compared with.
    """
    runs = [_read(folder, name, index) for index, (folder, name) in enumerate(zip(folders, _names(folders), strict=True))]
    title = "Run " + runs[0].name if len(runs) == 1 else "Runs " + ", ".join(run.name for run in runs)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    parts = [
        f"<h1>{escape(title)}</h1>\n<p>Made {made}.</p>",
        _section("Summary", _summary(runs)),
        _section("Loss", _curves(runs, _LOSSES, "Training loss (line) and held-out loss (dots).")),
        _section("Optimisation", _curves(runs, _OPTIMISATION, "Learning rate and norm of the gradient before clipping.")),
        _section("Throughput", _curves(runs, _THROUGHPUT, "Training speed, and the time of a step with its wait for data.")),
        _section("Device", _curves(runs, _DEVICE, "Use of the GPU.") or "<p>Nothing was recorded: no GPU.</p>"),
        _section("Gates", _layers(runs, _GATES, _IN_TRAINING + " Entropy 1: all branches weigh alike.", _NO_GATES)),
        _section(
            "Selection",
            _layers(runs, _SELECTION, _IN_TRAINING + " Of the blocks that the selected branch attends to.", _NO_SELECTION),
        ),
        _section("Events", "".join(_events(run) for run in runs)),
        _section("Configuration", _configuration(runs)),
        _section("Environment", _environment(runs)),
    ]
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>'
    style, body = f"<style>{_STYLE}</style>", "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n{style}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


# --- reading --------------------------------------------------------------------------------------------------------------
def _names(folders: Sequence[RunFolder]) -> list[str]:
    names = [folder.path.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]


def _read(folder: RunFolder, name: str, index: int) -> _Run:
    rows = read_metrics(folder.metrics_jsonl) if folder.metrics_jsonl.exists() else []
    colour = _COLOURS[index % len(_COLOURS)]
    return _Run(name, colour, folder, folder.load_config(), rows, _read_events(folder.events), folder.launches())


def _read_events(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    # A crash may have torn the last one.
    return [_event(path, number, line) for number, line in enumerate(lines, start=1) if line.endswith("\n")]


def _event(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    is_event = (
        isinstance(event, dict)
        and isinstance(event.get("time_unix_s"), int | float)
        and all(isinstance(event.get(name), str) for name in ("kind", "message"))
    )
    check(is_event, f"{path}:{number}", "line", "be an event in JSON", repr(line[:80]))
    return dict(event)


# --- summary and tables ---------------------------------------------------------------------------------------------------
def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content or '<p>Nothing was recorded.</p>'}\n</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(cells) + "</tr>" for cells in rows)
    return f'<div class="table"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _text(value: object) -> str:
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else "" if value in (None, {}) else str(value)
    return f'<td class="text">{escape(shown)}</td>'


def _number(value: object, form: str = "{:,}") -> str:
    return f'<td class="number">{"" if value is None else escape(form.format(value))}</td>'


def _swatch(run: _Run) -> str:
    return f'<td><span class="swatch" style="color:{run.colour}">&#9632;</span> {escape(run.name)}</td>'


def _summary(runs: Sequence[_Run]) -> str:
    head = ("run", "steps", "tokens", "loss (nats/token)", "best held out (bits/byte)", "tokens/s", "hours", "end", "records")
    return _table(head, (_summary_row(run) for run in runs))


def _summary_row(run: _Run) -> list[str]:
    last: Row = run.rows[-1] if run.rows else {}
    figures = [float(row["val_bits_per_byte"]) for row in run.rows if "val_bits_per_byte" in row]
    hours = float(last["tokens"]) / float(last["tokens_per_s_total"]) / 3600 if last else None
    ends = [event["kind"] for event in run.events if event["kind"] in ("finish", "stop", "end", "error")]
    found = check_run(run.folder)[1]
    verdict = (
        f'<span class="bad">{len(found)} disagree: {escape(found[0])}</span>' if found else '<span class="good">agree</span>'
    )
    return [
        _swatch(run),
        _text(f"{last.get('step', 0)} of {run.config.steps}"),
        _number(last.get("tokens")),
        _number(last.get("loss_nats"), "{:.4f}"),
        _number(min(figures, default=None), "{:.4f}"),
        _number(last.get("tokens_per_s_total"), "{:,.0f}"),
        _number(hours, "{:.2f}"),
        _text({"finish": "finished", "stop": "stopped", "end": "ended by the watchdog", "error": "ended by an error"}.get(
            ends[-1] if ends else "", "running, or killed")),
        f"<td>{verdict}</td>",
    ]  # fmt: skip


def _events(run: _Run) -> str:
    counts: dict[str, int] = {}
    for event in run.events:
        counts[event["kind"]] = counts.get(event["kind"], 0) + 1
    told = ", ".join(f"{kind} {number}" for kind, number in sorted(counts.items()))
    shown = [event for event in run.events if event["kind"] != "checkpoint"][-_EVENTS_SHOWN:]
    rows = (
        [
            _text(datetime.fromtimestamp(event["time_unix_s"], UTC).isoformat(sep=" ", timespec="seconds")[:19]),
            _text(event["kind"]),
            _number(event["step"]),
            _text(event["message"]),
        ]
        for event in shown
    )
    return f"<h3>{escape(run.name)}</h3>\n<p>{escape(told)}</p>\n{_table(('time (UTC)', 'kind', 'step', 'what'), rows)}"


def _configuration(runs: Sequence[_Run]) -> str:
    """Where the runs differ; of a single run, where it differs from the defaults."""
    columns = [dict(_flat(dataclasses.asdict(run.config))) for run in runs]
    heads = [run.name for run in runs]
    if len(runs) == 1:
        columns.append(dict(_flat(dataclasses.asdict(TrainConfig()))))
        heads.append("default")
    names = sorted({name for column in columns for name in column})
    rows = [
        [_text(name), *(_text(column.get(name, "")) for column in columns)]
        for name in names
        if len({repr(column.get(name)) for column in columns}) > 1
    ]
    told = f"Settings that differ{' from the defaults' if len(runs) == 1 else ''}." if rows else "No setting differs."
    return f"<p>{told}</p>" + (_table(["setting", *map(escape, heads)], rows) if rows else "")


def _environment(runs: Sequence[_Run]) -> str:
    columns = [dict(_flat(run.launches[-1] if run.launches else {})) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[_text("launches"), *(_text(len(run.launches)) for run in runs)]]
    rows += [[_text(name), *(_text(column.get(name, "")) for column in columns)] for name in names]
    return _table(["last launch", *(escape(run.name) for run in runs)], rows)


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- figures --------------------------------------------------------------------------------------------------------------
# Of each plot: its label, the metric that is a line, the metric that is dots.
_LOSSES = (
    ("nats per token", "loss_nats", "val_loss_nats"),
    ("bits per byte of text", "bits_per_byte", "val_bits_per_byte"),
)
_OPTIMISATION = (("learning rate", "learning_rate", None), ("gradient norm", "grad_norm", None))
_THROUGHPUT = (
    ("tokens/s", "tokens_per_s", None),
    ("ms a step (line), of it waiting for data (dots)", "step_time_ms", "data_time_ms"),
)
_DEVICE = (
    ("MFU", "mfu", None),
    ("memory, MiB: reserved (line), in tensors (dots)", "memory_reserved_mib", "memory_allocated_mib"),
)
_GATES = (*((f"gate_{branch}_mean", f"{title}, mean gate") for branch, title in _BRANCHES), ("gate_entropy", "entropy"))
_SELECTION = (
    ("selected_tokens", "keys a query sees"),
    ("selected_distance_tokens", "their mean distance, tokens"),
    ("selected_overlap", "share chosen by the query before too"),
)
_OF_ANY_SIZE = ("selected_tokens", "selected_distance_tokens")
_IN_TRAINING = "In the step of the row, dark to light from the first layer to the last."
_NO_GATES = "No gates were recorded: dense attention, fixed gates, or telemetry switched off."
_NO_SELECTION = "No choice of blocks was recorded: dense attention, no selected branch, or no evaluation yet."


def _curves(runs: Sequence[_Run], plots: Sequence[tuple[str, str, str | None]], caption: str) -> str:
    plots = [plot for plot in plots if any(plot[1] in row for run in runs for row in run.rows)]
    if not plots:
        return ""
    # Steps of different sizes say nothing beside each other, tokens do.
    sizes = [run.config.global_batch * run.config.seq_len for run in runs]
    scales, unit = ([1] * len(runs), "optimizer steps") if len(set(sizes)) == 1 else (sizes, "tokens")
    figure = Figure(figsize=(5.5 * len(plots), 3.6), layout="constrained")
    for axes, (label, line, dots) in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        for run, scale in zip(runs, scales, strict=True):
            _draw(axes, run.rows, line, run.colour, scale, label=run.name)
            if dots is not None:
                _draw(axes, run.rows, dots, run.colour, scale, marker="o", linestyle="none", markersize=3, alpha=0.7)
            for step in sorted({event["step"] for event in run.events if event["kind"] in _MARKED} - {None}):
                axes.axvline(step * scale, color=run.colour, linewidth=0.6, linestyle=":")
        _finish(axes, label, unit, legend=len(runs) > 1)
    caption += " Dotted lines: resumptions, rollbacks, hangs, warnings."
    return _figure(figure, caption)


def _layers(runs: Sequence[_Run], plots: Sequence[tuple[str, str]], caption: str, without: str) -> str:
    """A figure for each run with a plot for each metric (name, title), a line in it for each layer."""
    parts = []
    for run in runs:
        layers = sorted(
            {int(m[1]) for row in run.rows for name in row if (m := re.fullmatch(rf"{plots[-1][0]}_layer_(\d+)", name))}
        )
        if not layers:
            continue
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        for axes, (name, title) in zip(figure.subplots(1, len(plots)), plots, strict=True):
            for layer in layers:
                share = layer / max(len(layers) - 1, 1)
                _draw(axes, run.rows, f"{name}_layer_{layer}", mpl.colormaps["viridis"](0.9 * share), label=f"layer {layer}")
            axes.set_ylim(0, None if name in _OF_ANY_SIZE else 1.05)
            _finish(axes, title, legend=(name, title) == plots[-1] and len(layers) <= 16)
        parts.append(f"<h3>{escape(run.name)}</h3>\n" + _figure(figure, caption))
    return "".join(parts) or f"<p>{escape(without)}</p>"


def _draw(axes: Axes, rows: Sequence[Row], name: str, colour: Any, scale: int = 1, **style: Any) -> None:
    points = [(int(row["step"]) * scale, float(row[name])) for row in rows if name in row]
    if points:
        steps, values = zip(*points, strict=True)
        lone = {"marker": "."} if len(points) == 1 else {}  # a line through one point is invisible
        axes.plot(steps, values, color=colour, linewidth=1.2, **{**lone, **style})


def _finish(axes: Axes, title: str, unit: str = "optimizer steps", *, legend: bool) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(unit)
    axes.grid(alpha=0.3)
    if legend and axes.get_legend_handles_labels()[0]:
        for text in axes.legend(fontsize=7).get_texts():
            text.set_parse_math(False)  # the name of a folder, in which $ is a dollar


def _figure(figure: Figure, caption: str) -> str:
    """An image that lies in the page itself; as an image its identifiers cannot meet those of another figure."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    image = base64.b64encode(content.getvalue()).decode()
    shown = f'<img src="data:image/svg+xml;base64,{image}" alt="{escape(caption)}">'
    return f"<figure>\n{shown}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"
