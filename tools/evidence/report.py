"""Report writer: tables beside the committed rows, and plots for docs/results/learning.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nsa.config import NSAConfig
from nsa.ops.selected.types import queries_of_tile
from nsa.train.evaluation import interval
from nsa.train.load import load_config
from nsa.train.measurements import compare
from tools.evidence.run import read_json, read_lines

# Models in the order of the tables; the first of a group is compared with all others.
COLOURS = {
    "nsa-shared": "#4477aa",
    "nsa": "#66ccee",
    "dense-equal-parameters": "#cc3311",
    "dense-equal-width": "#ccbb44",
}
DENSE = "dense-equal-parameters"
DASHES = ("-", "--", ":", "-.")
BITS, VALIDATION = "bits per byte", "val_bits_per_byte"
SWEEPS = ("rates", "muon_rates")
SHOWN = (
    *("model", "seed", "parameters", "lr", "steps", "tokens", "val_bits_per_byte", "val_windows"),
    *("test_bits_per_byte", "test_windows", "tokens_per_s", "tokens_per_s_total", "seconds"),
    *("legs", "gpu", "torch", "commit", "date", "failed"),
)
EXPLAINED = (
    "Fields of the rows ([README](README.md)), and the largest norm of the gradient before "
    "clipping after the warm-up."
)
PAIRED = (
    "Paired differences on the test text, bits per byte; negative: the first model is better. 95% "
    "intervals as `nsa compare` computes them: over documents (these trained models, other books), "
    "over seeds (other seeds, these books), over both."
)
SELECTED = (
    "`nsa inspect` of the beginning of the validation text: mean gates, mean distance of the "
    "selected keys, and the fraction of a query's blocks that the query before selected too. "
    "Blocks of a tile: distinct blocks that the queries of one kernel tile select together. "
    "Random: a selection that draws its free blocks at random."
)

Row = dict[str, Any]
# Label, points and style of a line; labels of the axes, lines and settings of a plot.
Line = tuple[str, Sequence[tuple[float, float]], Row]
Panel = tuple[str, str, Sequence[Line], Row]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        name: its folder, relative to the rows.
        row: its row.
        metrics: rows of metrics, oldest first.
        test: measurement of the test text.
        folder: path of its files.
    """

    name: str
    row: Row
    metrics: list[Row]
    test: Path
    folder: Path

    def validation(self) -> dict[int, Row]:
        """Rows of metrics with a validation by step, with the seconds since the start."""
        rows = [row for row in self.metrics if VALIDATION in row]
        return {row["step"]: row | {"s": row["tokens"] / row["tokens_per_s_total"]} for row in rows}


def read_group(rows: Path, group: str) -> list[Run]:
    """Runs of a group by seed and model: a folder for each, or lines of one file in older rows."""
    found, folder = list[Run](), rows / group
    for row in read_lines(rows / f"{group}.jsonl"):
        kind = row["model"].partition("-")[0]
        files = read_lines(folder / f"{kind}-metrics.jsonl"), folder / f"{kind}-test.npz"
        found.append(Run(f"{group}/{kind}", row, *files, folder))
    for path in sorted(folder.glob("**/row.json")):
        metrics, test = (path.with_name(name) for name in ("metrics.jsonl.gz", "test.npz"))
        name = str(path.parent.relative_to(rows))
        found.append(Run(name, read_json(path), read_lines(metrics), test, path.parent))
    return sorted(found, key=lambda run: (run.row["seed"], [*COLOURS].index(run.row["model"])))


def write_report(rows: Path, plots: Path) -> int:
    """Write ``<group>.md`` beside the rows of every group, and its plots.

    Args:
        rows: ``benchmarks/quality``, or a folder in its layout.
        plots: folder of the plots.
    """
    plots.mkdir(parents=True, exist_ok=True)
    groups = dict.fromkeys(path.relative_to(rows).parts[0] for path in rows.glob("**/row.json"))
    older = [path.stem for path in rows.glob("*.jsonl") if (rows / path.stem).is_dir()]
    for group in sorted({*groups, *older}):
        runs = read_group(rows, group)
        if group in SWEEPS:
            parts = sweep_tables(rows, group, runs)
        else:
            parts = group_tables(runs)
            parts += by_position(runs, plots / f"{group}-positions.png")
            parts += selection_tables(runs)
            draw_losses(plots / f"{group}-loss.png", runs)
        if len(runs) == 1:
            draw_layers(plots / f"{group}-layers.png", runs[0])
        text = "\n\n".join([f"# {group}", "Made by `python -m tools.evidence report`.", *parts])
        (rows / f"{group}.md").write_text(f"{text}\n", encoding="utf-8")
    return 0


def markdown(rows: Sequence[Row]) -> str:
    """Table in Markdown; columns that are empty in every row are left out."""

    def cell(value: Any) -> str:
        if not isinstance(value, float):
            return "" if value in (None, []) else str(value)
        return (
            f"{value:,.0f}" if value > 100 else f"{value:.4f}" if value > 0.01 else f"{value:.2g}"
        )

    texts = [{name: cell(value) for name, value in row.items()} for row in rows]
    names = dict.fromkeys(name for row in texts for name, text in row.items() if text)
    lines = [[*names], ["---"] * len(names), *([row.get(x, "") for x in names] for row in texts)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ------------------------------------------------------------------------------------------- tables


def group_tables(runs: Sequence[Run]) -> list[str]:
    """Tables of runs that are compared."""
    tables = {
        EXPLAINED: [run_cells(run) for run in runs],
        PAIRED: differences(runs),
        f"Validation during training, {BITS}, mean over seeds.": by_step(runs),
        f"Passages of 128 tokens that are repeated, {BITS}, mean over seeds.": by_distance(runs),
    }
    return [part for about, rows in tables.items() if rows for part in (about, markdown(rows))]


def run_cells(run: Run) -> Row:
    """Settings and results of a run."""
    row, name = run.row, "grad_norm_max"
    norms = [x for x in run.metrics if x["step"] > row.get("warmup_steps", 0) and name in x]
    top = max(norms, key=lambda x: float(x[name]), default={})
    cells = {"run": run.name} | {name: row.get(name) for name in SHOWN}
    return cells | {name: top.get(name), "at step": top.get("step"), "commit": row["commit"][:12]}


def pairs(runs: Sequence[Run]) -> dict[str, list[tuple[Run, Run]]]:
    """Runs of the first model with those of equal seeds, by the other model."""
    models = {run.row["model"] for run in runs}
    first, *others = (name for name in COLOURS if name in models)
    seeds = {run.row["seed"]: run for run in runs if run.row["model"] == first}
    return {
        name: [
            (seeds[run.row["seed"]], run)
            for run in runs
            if run.row["model"] == name and run.row["seed"] in seeds
        ]
        for name in others
    }


def compared(chosen: Sequence[tuple[Run, Run]]) -> Row:
    """Statistics of ``nsa compare`` for pairs of runs."""
    return compare(*([run.test for run in runs] for runs in zip(*chosen, strict=True)))


def differences(runs: Sequence[Run]) -> list[Row]:
    """Paired differences of the first model to the others, of each seed and of all."""
    found = list[Row]()
    for model, chosen in pairs(runs).items():
        for some in [*([pair] for pair in chosen), *([chosen] if len(chosen) > 1 else [])]:
            one, (ours, _) = compared(some), some[0]
            about = {
                "model": ours.row["model"],
                "minus": model,
                "seeds": ", ".join(str(run.row["seed"]) for run, _ in some),
                "difference": f"{one['difference_bits_per_byte']:+.4f}",
                "documents": one["num_documents"],
            }
            names = {"difference": "over documents", "seeds": "over seeds", "both": "over both"}
            found.append(about | {text: interval(one, name) for name, text in names.items()})
    return found


def by_step(runs: Sequence[Run]) -> list[Row]:
    """Validation losses during training of the first model and the dense one."""
    chosen = pairs(runs).get(DENSE)
    if not chosen:
        return []
    curves = [[run.validation() for run in runs] for runs in zip(*chosen, strict=True)]
    steps = set.intersection(*({*curve} for model in curves for curve in model))
    names = chosen[0][0].row["model"], DENSE
    return [
        {"step": step}
        | {
            name: fmean(curve[step][VALIDATION] for curve in model)
            for name, model in zip(names, curves, strict=True)
        }
        for step in sorted(steps)
    ]


def by_distance(runs: Sequence[Run]) -> list[Row]:
    """Loss of repeated passages by the distance back to them."""
    found = list[Row]()
    for model in COLOURS:
        files = [run.folder / "repeats.json" for run in runs if run.row["model"] == model]
        repeats = [read_json(path)["repeats"] for path in files if path.exists()]
        for bins in zip(*repeats, strict=True):
            row = {"model": model, "seeds": len(repeats), "tokens back": bins[0]["distance"]}
            for text, name in (("first", "first_bits_per_byte"), ("repeated", "bits_per_byte")):
                row[text] = fmean(one[name] for one in bins)
            found.append(row)
    return found


def sweep_tables(rows: Path, group: str, runs: Sequence[Run]) -> list[str]:
    """Validation losses by learning rate and model."""
    older = read_lines(rows / "learning-rates.jsonl") if group == "rates" else []
    parts = list[str]()
    for found in filter(None, (older, [run.row for run in runs])):
        cells: dict[float, Row] = {}
        for row in sorted(found, key=lambda row: (row["lr"], [*COLOURS].index(row["model"]))):
            one = cells.setdefault(row["lr"], {"learning rate": f"{row['lr']:g}"})
            one[row["model"]] = row[VALIDATION]
        steps, tokens = found[0]["steps"], found[0]["tokens"]
        about = f"Validation, {BITS}, after {steps:,} steps of {tokens // steps:,} tokens."
        parts += [about, markdown([*cells.values()])]
    return parts


def selection_tables(runs: Sequence[Run]) -> list[str]:
    """Gates and selected blocks of each layer of each sparse model."""
    parts = list[str]()
    for run in runs:
        for path in sorted(run.folder.glob("inspect-*.json"), key=lambda x: (len(x.name), x)):
            recorded = path.with_name(path.name.replace("inspect", "selected")).with_suffix(".npz")
            found, config = read_json(path), load_config(run.folder / "config.yaml").model.nsa
            arrays = np.load(recorded)
            layers = [arrays[f"layer{n}"].transpose(2, 0, 1) for n in range(len(found["layers"]))]
            rows = [
                {name: gate["mean"] for name, gate in layer["gates"].items()}
                | {"tokens back": layer["selection"]["distance_mean"]}
                | {"overlap": layer["selection"]["overlap"][0]["share"]}
                for layer in found["layers"]
            ]
            layers.append(random_selection(config, found["num_tokens"]))
            for number, (row, blocks) in enumerate(zip([*rows, {}], layers, strict=True)):
                name = {"layer": number if row else "random"}
                rows[number:] = [name | row | {"blocks of a tile": blocks_of_tile(blocks, config)}]
            parts += [f"{run.name}, {found['num_tokens']:,} tokens.", markdown(rows)]
    return [SELECTED, *parts] if parts else []


def blocks_of_tile(layer: NDArray[Any], config: NSAConfig) -> float:
    """Mean number of distinct blocks that the queries of a kernel tile select together.

    Args:
        layer: block indices ``[T, Hkv, n]``, -1 for missing blocks.
        config: pattern of the model.
    """
    queries = queries_of_tile(config.group_size)
    padded = np.pad(layer + 1, ((0, -len(layer) % queries), (0, 0), (0, 0)))
    tiles = padded.reshape(-1, queries, *layer.shape[1:]).transpose(0, 2, 1, 3)
    blocks = np.sort(tiles.reshape(*tiles.shape[:2], -1))  # 0: missing
    return float((np.diff(blocks, prepend=0) > 0).sum(-1).mean())


def random_selection(config: NSAConfig, num_tokens: int) -> NDArray[Any]:
    """Block indices ``[T, 1, n]`` with free blocks drawn at random, -1 for missing blocks."""
    own = np.arange(num_tokens)[:, None] // config.block_size
    blocks = np.arange(own[-1, 0] + 1)
    forced = (blocks < config.num_init_blocks) | (blocks > own - config.num_local_blocks)
    scores = np.random.default_rng(0).random((num_tokens, len(blocks))) + forced
    scores[blocks > own] = -1.0
    chosen = np.argsort(-scores, axis=1)[:, : config.num_selected_blocks]
    return np.where(np.take_along_axis(scores, chosen, 1) < 0, -1, chosen)[:, None]


# ---------------------------------------------------------------------------------------- positions


def by_position(runs: Sequence[Run], plot: Path) -> list[str]:
    """Table and plot of the test losses by tokens of context, and differences to dense."""
    chosen = pairs(runs).get(DENSE)
    if not chosen:
        return []
    found, model = compared(chosen), chosen[0][0].row["model"]
    bins = [[folded(run["positions"]) for run in found[name]] for name in ("runs", "against")]
    bits = np.array([[[x["bits_per_byte"] for x in one] for one in runs] for runs in bins])
    ours, dense = bits.mean(1).tolist()
    apart = bits[0] - bits[1]  # [seeds, bins]
    rows = [
        {"from": x["first"], "to": x["last"], model: a, DENSE: b, "difference": f"{c:+.4f}"}
        for x, a, b, c in zip(bins[0][0], ours, dense, apart.mean(0), strict=True)
    ]
    curves: list[tuple[str, NDArray[Any], Row]] = [
        (f"seed {one.row['seed']}", ys, {"linestyle": DASHES[n % len(DASHES)], "marker": "."})
        for n, ((one, _), ys) in enumerate(zip(chosen, apart, strict=True))
    ]
    if len(apart) > 1:
        curves.append(("mean", apart.mean(0), {"color": "#000000", "marker": "."}))
    curves.append(("no difference", 0 * apart[0], {"color": "#888888", "linewidth": 0.8}))
    starts = [x["first"] for x in bins[0][0]]
    lines = [
        (label, list(zip(starts, ys.tolist(), strict=True)), {"color": COLOURS[model], **style})
        for label, ys, style in curves
    ]
    draw(plot, [("tokens of context", f"{model} minus dense, {BITS}", lines, {"xscale": "log"})])
    return [f"Test by tokens of context, {BITS}, mean over seeds.", markdown(rows)]


def folded(bins: Sequence[Row]) -> list[Row]:
    """Bins of positions with a last one of a single position merged into the one before."""
    *before, last = bins
    if not before or last["first"] < last["last"]:
        return [*bins]
    pair = (before.pop(), last)
    num_bytes = sum(one["num_bytes"] for one in pair)
    bits = sum(one["bits_per_byte"] * one["num_bytes"] for one in pair) / num_bytes
    return [*before, pair[0] | {"last": last["last"], "bits_per_byte": bits}]


# -------------------------------------------------------------------------------------------- plots


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side; the same rows give the same bytes."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (x_label, y_label, lines, settings) in zip(every, panels, strict=True):
        for label, points, style in lines:
            axes.plot(*zip(*points, strict=True), label=label, **{"linewidth": 1.2, **style})
        axes.set(xlabel=x_label, ylabel=y_label, **settings)
        axes.grid(alpha=0.3)
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


def points_of(rows: Sequence[Row], x: str, y: str) -> list[tuple[float, float]]:
    """Points of the rows that have the field ``y``."""
    return [(float(row[x]), float(row[y])) for row in rows if y in row]


def draw_losses(path: Path, runs: Sequence[Run]) -> None:
    """Validation over the second half of tokens and seconds, and differences to the first model."""
    if len(runs) == 1:
        curves: list[Line] = [
            (label, points_of(runs[0].metrics, "step", name), {"color": color})
            for label, name, color in (
                ("training", "bits_per_byte", "#bbbbbb"),
                ("validation", VALIDATION, "#4477aa"),
            )
        ]
        draw(path, [("optimizer steps", BITS, curves, {})])
        return
    halves: dict[str, list[Line]] = {"tokens": [], "s": []}
    apart, seeds = list[Line](), sorted({run.row["seed"] for run in runs})
    first = min((run.row["model"] for run in runs), key=[*COLOURS].index)
    ours = {run.row["seed"]: run.validation() for run in runs if run.row["model"] == first}
    for run in runs:
        curve, seed, model = run.validation(), run.row["seed"], run.row["model"]
        label, dashes = f"{model}, seed {seed}", DASHES[seeds.index(seed) % len(DASHES)]
        style = {"color": COLOURS[model], "linestyle": dashes, "marker": "."}
        end = max(row["tokens"] for row in curve.values())
        late = [row for row in curve.values() if 2 * row["tokens"] >= end]
        for x, lines in halves.items():
            lines.append((label, points_of(late, x, VALIDATION), style))
        gaps = [
            {"tokens": row["tokens"], "gap": ours[seed][step][VALIDATION] - row[VALIDATION]}
            for step, row in curve.items()
            if model != first and step in ours.get(seed, {})
        ]
        apart += [(label, points_of(gaps, "tokens", "gap"), style)] * bool(gaps)
    names = {"tokens": "tokens, second half", "s": "seconds, second half of the tokens"}
    panels: list[Panel] = [
        (names[x], f"validation, {BITS}", lines, {}) for x, lines in halves.items()
    ]
    draw(path, [*panels, ("tokens", f"{first} minus it, same seed, {BITS}", apart, {})])


def draw_layers(path: Path, run: Run) -> None:
    """Gates and overlap of each layer, dark to light."""
    names = {f"gate_{name}_mean": f"gate, {name}" for name in ("cmp", "slc", "win")}
    names |= {"selected_overlap": "overlap with the query before"}
    number = load_config(run.folder / "config.yaml").model.num_layers
    shades = mpl.colormaps["viridis"].resampled(number + 1)  # the lightest is invisible
    panels = list[Panel]()
    for name, label in names.items():
        columns = [points_of(run.metrics[::10], "step", f"{name}_layer_{n}") for n in range(number)]
        lines = [
            (f"layer {n}", points, {"color": shades(n), "linewidth": 0.8})
            for n, points in enumerate(columns)
        ]
        panels.append(("optimizer steps", label, lines, {"ylim": (0, 1)}))
    draw(path, panels)
