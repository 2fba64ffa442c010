"""The page on what models learn, made from committed rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

from nsa.bench.table import markdown, number, table
from nsa.errors import check
from nsa.train.measurements import compare
from tools.evidence.arms import Arm, Figures, arms_of
from tools.evidence.experiments import DENSE, NSA, PROMPT, SMALL_DENSE
from tools.evidence.plots import COLOURS, DASHES, Line, Panel, write_plot
from tools.evidence.training import read_lines

INTRODUCTION = """\
# What models learn

Made by `python -m tools.evidence report` from `benchmarks/quality`, in which the named files lie.
`python -m tools.evidence run --data BOOKS --out OUT` trains and measures,
`python -m tools.evidence take OUT` brings rows and files there; data and older rows:
[README](../../benchmarks/quality/README.md). Bits per byte are of text that no run was trained on.
"""
BITS, VALIDATION = "bits per byte", "val_bits_per_byte"
# Columns of tables, each ``head=field:format``; the head may be the field's name.
ARMS = (
    "model | seed | parameters:, | learning rate=lr:g | validation=val_bits_per_byte:.4f | "
    "test=test_bits_per_byte:.4f | tokens/s=tokens_per_s:,.0f | s=seconds:,.0f | file"
)
LOSSES = (
    "split | window=seq_len:, | windows:, | bits per byte=bits_per_byte:.4f | "
    "a bigram model's=bigram_bits_per_byte:.4f | file"
)
LEGS = "begin | end | s=seconds:,.0f | exit code=exit_code | last step=last_step:,"
DIFFERENCES = (
    "NSA minus=model | seeds | difference=difference_bits_per_byte:+.4f | "
    "over documents=documents | over seeds=over_seeds | files"
)
POSITIONS = f"from=first:, | to=last:, | {NSA}=ours:.4f | {DENSE}=dense:.4f | difference:+.4f"
LAYERS = (
    "layer | compressed=cmp:.3f | selected=slc:.3f | window=win:.3f | "
    "tokens back=distance_mean:,.0f | overlap=shared:.1% | forced:.1% | overlap of others=kept:.1%"
)
SPEEDS = {
    "tokens_per_s": "median of the rows of metrics: training alone",
    "tokens_per_s_total": "last row of metrics: with evaluations and checkpoints",
    "tokens_per_s_processes": "tokens over the seconds of the processes: with their starts",
}
OF_LAYERS = {
    "gate_cmp_mean": "gate, compressed",
    "gate_slc_mean": "gate, selected",
    "gate_win_mean": "gate, window",
    "selected_overlap": "overlap with the query before",
}


def write_report(rows: Path, out: Path) -> Path:
    """Write ``learning.md`` and its plots.

    Args:
        rows: ``benchmarks/quality``, or a folder in its layout; what is missing is left out.
        out: folder, made where it is missing.

    Raises:
        UserError: there is nothing to report.
    """
    sections: dict[str, Callable[[], list[str]]] = {
        "50,000 steps as shipped": lambda: long_run(rows, out),
        "200M tokens, 2,048 a sequence": lambda: equal_tokens(rows, "200m", out),
        "90M tokens, 2,048 a sequence": lambda: equal_tokens(rows, "90m", out),
        "100M tokens, 8,192 a sequence": lambda: equal_tokens(rows, "8k", out),
        "Learning rates": lambda: learning_rates(rows),
        "What is selected": lambda: selection(rows),
    }
    out.mkdir(parents=True, exist_ok=True)
    made = {title: parts for title, section in sections.items() if (parts := section())}
    check(bool(made), "report", "--rows", "hold rows of an experiment", rows)
    parts = [part for title, found in made.items() for part in (f"## {title}", *found)]
    path = out / "learning.md"
    path.write_text("\n\n".join([INTRODUCTION.rstrip(), *parts]) + "\n", encoding="utf-8")
    return path


def long_run(rows: Path, out: Path) -> list[str]:
    """The run of 50,000 steps: legs, losses, speed, curves, a sample."""
    arm = next(iter(arms_of(rows, "50k")), None)
    if arm is None:
        return []
    row, metrics = arm.row, arm.metrics()
    checked = (arm.text("check.txt").splitlines() or ["not run"])[-1].rpartition(": ")[2]
    kinds = ("test*.json", "validation.json")
    names = sorted(path.name for kind in kinds for path in arm.folder.glob(kind))
    losses = [arm.read(name) | {"file": arm.code(name)} for name in names]
    speeds = [{"source": what, "tokens": row[name]} for name, what in SPEEDS.items()]
    parts = [
        f"`78m`, {row['parameters']:,} parameters: {row['steps']:,} steps of "
        f"{row['global_batch']} windows of {row['seq_len']:,} bytes, {row['tokens']:,} tokens, "
        f"seed {row['seed']}. {arm.machine}. From {arm.code('row.json')}.",
        f"Stopped by SIGTERM, exit code 143, and continued by `nsa train --resume`. `nsa check` "
        f"afterwards: {checked}. From {arm.code('legs.jsonl', 'check.txt')}.",
        _table(LEGS, read_lines(arm.folder / "legs.jsonl")),
        _table(LOSSES, losses),
        f"Speed, three times. From {arm.code('row.json')}.",
        _table("source | tokens/s=tokens:,.0f", speeds),
    ]
    if metrics:
        lines = [
            Line("training", _points(metrics, "step", "bits_per_byte"), {"color": "#bbbbbb"}),
            Line("validation", _points(metrics, "step", VALIDATION), {"marker": "."}),
        ]
        panels = [
            Panel("optimizer steps", label, layers, {"ylim": (0, 1)})
            for name, label in OF_LAYERS.items()
            if (layers := _layer_lines(metrics[::10], name))
        ]
        parts += [f"Loss, gates and overlap of each layer. From {arm.code(arm.metrics_file)}."]
        parts += [write_plot(out / "50k-loss.png", [Panel("optimizer steps", BITS, lines)])]
        parts += [write_plot(out / "50k-layers.png", panels)] if panels else []
    if sample := arm.text("generated.txt").replace("```", "'''").rstrip():
        about = f'512 bytes written after "{PROMPT}". From {arm.code("generated.txt")}.'
        parts += [about, f"```text\n{sample}\n```"]
    return parts


def _layer_lines(metrics: Sequence[Figures], name: str) -> list[Line]:
    """A line for each layer, dark to light."""
    found = list[list[tuple[float, float]]]()
    while points := _points(metrics, "step", f"{name}_layer_{len(found)}"):
        found.append(points)
    shades = mpl.colormaps["viridis"].resampled(len(found) + 1)  # the lightest is invisible
    styles = [{"color": shades(layer), "linewidth": 0.8} for layer in range(len(found))]
    return [Line(f"layer {n}", *x) for n, x in enumerate(zip(found, styles, strict=True))]


# --- equal tokens ---------------------------------------------------------------------------------
def equal_tokens(rows: Path, group: str, out: Path) -> list[str]:
    """NSA beside dense models on the same data in the same order."""
    arms = arms_of(rows, group)
    if not arms:
        return []
    row = arms[0].row
    swept = {rate["seq_len"] for rate in read_lines(rows / "learning-rates.jsonl")}
    untuned = " Learning rates were not swept at this length." * (row["seq_len"] not in swept)
    parts = [
        f"After {row['steps']:,} steps of {row['tokens'] // row['steps']:,} tokens, for each seed "
        f"the same in the same order; test: {row['test_windows']:,} windows.{untuned} "
        f"{'; '.join(dict.fromkeys(arm.machine for arm in arms))}.",
        _table(ARMS, [arm.row | {"file": arm.code(arm.row_file)} for arm in arms]),
        *differences(arms, out / f"{group}-positions.png"),
    ]
    lines: dict[str, list[Line]] = {"tokens": [], "seconds of training": []}
    seeds = sorted({arm.row["seed"] for arm in arms})
    for arm in arms:
        metrics = [row for row in arm.metrics() if VALIDATION in row]
        seconds = [row | {"s": row["tokens"] / row["tokens_per_s_total"]} for row in metrics]
        dashes = DASHES[seeds.index(arm.row["seed"]) % len(DASHES)]
        style = {"color": COLOURS[arm.row["model"]], "linestyle": dashes, "marker": "."}
        for x, name in zip(lines, ("tokens", "s"), strict=True):
            if metrics:
                label = f"{arm.row['model']}, seed {arm.row['seed']}"
                lines[x].append(Line(label, _points(seconds, name, VALIDATION), style))
    if lines["tokens"]:
        files = ", ".join(arm.code(arm.metrics_file) for arm in arms)
        panels = [Panel(x, f"validation, {BITS}", found) for x, found in lines.items()]
        parts += [f"From {files}.", write_plot(out / f"{group}-loss.png", panels)]
    return parts


def differences(arms: Sequence[Arm], plot: Path) -> list[str]:
    """Paired differences of equal seeds, and by position in the sequence."""
    by_model: dict[str, dict[int, Arm]] = {NSA: {}, DENSE: {}, SMALL_DENSE: {}}
    for arm in arms:
        if arm.test_file.exists():
            by_model[arm.row["model"]][arm.row["seed"]] = arm
    ours, found = by_model.pop(NSA), list[Figures]()
    for model, others in by_model.items():
        seeds = sorted({*ours} & {*others})
        for chosen in [*([[seed] for seed in seeds] if len(seeds) > 1 else []), seeds]:
            if chosen:
                pairs = [[side[seed] for seed in chosen] for side in (ours, others)]
                found.append(_compared(model, chosen, pairs))
    about = "Test, paired; negative: NSA is better. 95% intervals as `nsa compare` computes them."
    equal = [one for one in found if one["model"] == DENSE]
    positions = by_position(equal[-1], plot) if equal else []
    return [about, _table(DIFFERENCES, found), *positions] if found else []


def _compared(model: str, seeds: Sequence[int], sides: Sequence[Sequence[Arm]]) -> Figures:
    found = compare(*([arm.test_file for arm in side] for side in sides))
    intervals = {
        name: f"{found[f'{name}_low']:+.4f} to {found[f'{name}_high']:+.4f}"
        for name in ("difference", "seeds")
        if f"{name}_low" in found
    }
    files = ", ".join(arm.code(arm.test_file) for side in sides for arm in side)
    return {
        **found,
        "model": model,
        "seeds": ", ".join(map(str, seeds)),
        "documents": f"{intervals['difference']} ({found['num_documents']})",
        "over_seeds": intervals.get("seeds"),
        "files": files,
    }


def by_position(found: Figures, plot: Path) -> list[str]:
    """Means over the seeds by tokens of context, and the difference of each pair."""
    bins = found["runs"][0]["positions"]
    ours, dense = (
        [[one["bits_per_byte"] for one in run["positions"]] for run in found[side]]
        for side in ("runs", "against")
    )
    apart = [[x - y for x, y in zip(*pair, strict=True)] for pair in zip(ours, dense, strict=True)]
    means = [[fmean(column) for column in zip(*x, strict=True)] for x in (ours, dense, apart)]
    rows = [
        {"first": one["first"], "last": one["last"], "ours": x, "dense": y, "difference": z}
        for one, x, y, z in zip(bins, *means, strict=True)
    ]

    def line(name: str, differences: Sequence[float], **style: Any) -> Line:
        return Line(name, list(zip(starts, differences, strict=True)), style)

    starts = [one["first"] for one in bins]
    lines = [line(f"pair {n}", ys, color="#aaaaaa") for n, ys in enumerate(apart, 1)]
    lines.append(line("mean", means[2], color=COLOURS[NSA], marker="."))
    lines.append(line("no difference", [0.0] * len(bins), color="#000000", linewidth=0.8))
    panel = Panel("tokens of context", f"NSA minus dense, {BITS}", lines, {"xscale": "log"})
    return [
        f"By tokens of context, {BITS}, mean over the seeds. From {found['files']}.",
        _table(POSITIONS, rows),
        write_plot(plot, [panel]),
    ]


# --- learning rates, selection --------------------------------------------------------------------
def learning_rates(rows: Path) -> list[str]:
    """Validation loss by learning rate and model, the lowest of each model in bold."""
    found = read_lines(rows / "learning-rates.jsonl")
    if not found:
        return []
    models = sorted({row["model"] for row in found}, key=lambda model: (model != NSA, model))
    best = {of: min(row[VALIDATION] for row in found if row["model"] == of) for of in models}
    by_rate: dict[float, Figures] = {row["lr"]: {"lr": row["lr"]} for row in found}
    for row in found:
        mark = "**" * (row[VALIDATION] == best[row["model"]])
        by_rate[row["lr"]][row["model"]] = f"{mark}{row[VALIDATION]:.4f}{mark}"
    row = found[0]
    about = (
        f"Validation, {BITS} of {row['val_windows']} windows, after {row['steps']} steps of "
        f"{row['tokens'] // row['steps']:,} tokens; seed {row['seed']}, one {row['gpu']} each. "
        f"From `learning-rates.jsonl`."
    )
    return [
        about,
        _table(
            " | ".join(["learning rate=lr:g", *models]), [by_rate[lr] for lr in sorted(by_rate)]
        ),
    ]


def selection(rows: Path) -> list[str]:
    """Gates and selected blocks of each layer of each sparse model."""
    parts = [
        "`nsa inspect` of validation text: mean gates, how far back the selected keys lie, and the "
        "share of a query's blocks that the query before selected too. Last two columns: of "
        "queries with more than n blocks before them, how many of their blocks are forced, and how "
        "many of the others the query before had too, from `selected-*.npz` beside the named file."
    ]
    for arm in (arm for group in ("50k", "200m", "8k") for arm in arms_of(rows, group)):
        for num_tokens in arm.inspected():
            name, chosen = f"inspect-{num_tokens}.json", arm.chosen(num_tokens)
            layers = [
                {
                    "layer": layer["layer"],
                    **{branch: gates["mean"] for branch, gates in layer["gates"].items()},
                    "distance_mean": layer["selection"]["distance_mean"],
                    "shared": layer["selection"]["overlap"][0]["share"],
                    **(dict(zip(("forced", "kept"), chosen[n], strict=True)) if chosen else {}),
                }
                for n, layer in enumerate(arm.read(name)["layers"])
            ]
            parts += [f"{num_tokens:,} tokens. From {arm.code(name)}.", _table(LAYERS, layers)]
    return parts if len(parts) > 1 else []


def _table(columns: str, rows: Iterable[Figures]) -> str:
    """A table with such columns as above; those that are empty are left out."""

    def cell(name: str, form: str) -> Callable[[Figures], str]:
        return lambda row: number(row.get(name), form)

    cells = {}
    for column in columns.split(" | "):
        name, _, form = column.rpartition("=")[2].partition(":")
        cells[column.rpartition("=")[0] or name] = cell(name, form)
    return markdown(table(cells, [*rows]))


def _points(metrics: Sequence[Figures], x: str, y: str) -> list[tuple[float, float]]:
    return [(float(row[x]), float(row[y])) for row in metrics if y in row]
