"""Models trained on equal tokens: NSA beside dense ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from nsa.train.evaluation import interval
from nsa.train.load import load_config
from nsa.train.measurements import compare
from tools.evidence.arms import BROKEN, Arm, Group
from tools.evidence.experiments import (
    CONFIGS,
    DENSE,
    EXPERIMENTS,
    REPEATED,
    REPEATED_FILE,
    SPARSE,
)
from tools.evidence.parts import (
    BITS,
    VALIDATION,
    Figures,
    Part,
    points,
    shared,
    source,
    table_of,
    without_minus_zero,
)
from tools.evidence.plots import COLOURS, DASHES, Line, Panel, draw
from tools.evidence.rates import Sweeps, against_sweeps

ARMS = (
    "model | seed | parameters:, | learning rate=lr:g | validation=val_bits_per_byte:.4f | "
    "test=test_bits_per_byte:.4f | largest gradient=gradient | tokens/s=tokens_per_s:,.0f | "
    "s=seconds:,.0f"
)
# Columns only where runs differ.
SETTINGS = (
    "validation windows=val_windows:, | test windows=test_windows:, | GPU=gpu | driver | torch | "
    "triton | commit | date=day"
)
DIFFERENCES = (
    "{ours} minus=model | seeds | difference=difference_bits_per_byte:+.4f | "
    "over documents=documents | over seeds=over_seeds | over both=both | files"
)
STEPS = f"step:, | {{ours}}=ours:.4f | {DENSE}=dense:.4f | difference:+.4f"
POSITIONS = (
    "from=first:, | to=last:, | targets:, | {ours}=ours:.4f | "
    f"{DENSE}=dense:.4f | difference:+.4f"
)
REPEATS = "model | seeds"
MASKS = (
    "NSA and dense run with document masks; without them, dense is faster: "
    "[README](../../README.md#speed), [throughput](../reports/throughput.md)."
)
COLUMNS = (
    "Largest gradient: its norm before clipping, after the warm-up, and the step of its row of "
    "metrics; a loss that jumped shows in it. tokens/s: median of the rows of metrics, steps "
    "alone; s: all training processes, with their starts, evaluations and checkpoints. "
    f"{MASKS}"
)
INTERVALS = (
    "Test, paired; negative: the first is better. 95% intervals as `nsa compare` computes them. "
    "Over documents: these trained models, other books. Over seeds: other seeds, these books. Over "
    "both: other seeds and other books, the one to judge by; one pair says nothing of how much "
    "seeds vary."
)
ONE_SEED = "not known: one seed"


def equal_tokens(group: Group, sweeps: Sweeps) -> list[Part]:
    """NSA beside dense models on the same data in the same order."""
    arms, name = group.arms, group.name
    if not arms:
        return [*group.notes()]
    row, rows = arms[0].row, [arm.figures | _largest_gradient(arm) for arm in arms]
    same, columns = shared(SETTINGS, rows)
    ours = sparse_of(arms)
    found, faults = differences(ours, arms)
    equal = [one for one in found if one["model"] == DENSE]
    return [
        f"After {row['steps']:,} steps of {row['tokens'] // row['steps']:,} tokens, for each seed "
        f"the same in the same order. All runs: {same}. {against_sweeps(arms, sweeps)}",
        table_of(f"{ARMS}{columns} | file", rows),
        COLUMNS,
        *group.notes(),
        *([INTERVALS, table_of(DIFFERENCES.format(ours=ours), found)] if found else []),
        *faults,
        *_pairs_missing(ours, name, found),
        *by_step(ours, arms),
        *(by_position(ours, equal[-1], f"{name}-positions.png") if equal else []),
        *by_distance(arms),
        *curves(ours, arms, f"{name}-loss.png"),
    ]


def sparse_of(arms: Sequence[Arm]) -> str:
    """The sparse model that is compared with all others."""
    models = {arm.row["model"] for arm in arms}
    return next((model for model in SPARSE if model in models), SPARSE[0])


def _largest_gradient(arm: Arm) -> Figures:
    """The largest norm after the warm-up, and its step; nothing without such rows."""
    warmup, name = arm.row.get("warmup_steps", 0), "grad_norm_max"
    rows = [row for row in arm.metrics() if row["step"] > warmup and name in row]
    top = max(rows, key=lambda row: float(row[name]), default=None)
    return {"gradient": f"{top[name]:.1f} ({top['step']:,})"} if top else {}


# --- differences ----------------------------------------------------------------------------------
def differences(model: str, arms: Sequence[Arm]) -> tuple[list[Figures], list[str]]:
    """Paired differences of a model to the others, and what cannot be compared.

    They are of equal seeds, of each and of all.
    """
    by_model: dict[str, dict[int, Arm]] = {name: {} for name in CONFIGS}
    for arm in arms:
        if arm.test_file.exists():
            by_model[arm.row["model"]][arm.row["seed"]] = arm
    ours, found, faults = by_model.pop(model), list[Figures](), list[str]()

    def add(other: str, seeds: Sequence[int]) -> bool:
        pairs = [[side[seed] for seed in seeds] for side in (ours, by_model[other])]
        try:
            found.append(_compared(other, seeds, pairs))
        except BROKEN as error:
            reason = str(error).replace(f"{arms[0].rows}/", "").rstrip(".")
            faults.append(f"Not compared, {other}, seeds {_listed(seeds)}: {reason}.")
            return False
        return True

    for other, others in by_model.items():
        seeds = [seed for seed in sorted({*ours} & {*others}) if add(other, [seed])]
        if len(seeds) > 1:
            add(other, seeds)
    return found, faults


def _compared(model: str, seeds: Sequence[int], sides: Sequence[Sequence[Arm]]) -> Figures:
    found = compare(*([arm.test_file for arm in side] for side in sides))
    over = {
        name: without_minus_zero(interval(found, name)) for name in ("difference", "seeds", "both")
    }
    number = found["num_documents"]
    return {
        **found,
        "model": model,
        "seeds": _listed(seeds),
        "trained": [*seeds],
        "documents": f"{over['difference']} ({number})" if over["difference"] else "one document",
        "over_seeds": over["seeds"],
        "both": over["both"] or ONE_SEED,
        "files": ", ".join(arm.code(arm.test_file) for side in sides for arm in side),
    }


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _mean(number: int) -> str:
    return f", mean over {number} seeds" if number > 1 else ""


def _pairs_missing(ours: str, group: str, found: Sequence[Figures]) -> list[str]:
    """A sentence on the planned pairs that are not compared."""
    planned = [
        (experiment.model, int(seed[1]))
        for experiment in EXPERIMENTS
        if experiment.group == group and experiment.model != ours
        if (seed := re.search(r"--seed (\d+)", experiment.train))
    ]
    done = {(one["model"], seed) for one in found for seed in one["trained"]}
    missing = [f"{model} with seed {seed}" for model, seed in planned if (model, seed) not in done]
    return [f"Pairs not compared: {ours} and {', '.join(missing)}."] if missing else []


# --- by step, by position -------------------------------------------------------------------------
def by_step(ours: str, arms: Sequence[Arm]) -> list[Part]:
    """Difference on validation during training, mean over the pairs of a model and dense."""
    curves = {
        (arm.row["model"], arm.row["seed"]): (arm, curve)
        for arm in arms
        if (curve := _validation(arm))
    }
    seeds = [seed for model, seed in curves if model == DENSE and (ours, seed) in curves]
    if not seeds:
        return []
    sides = [[curves[model, seed] for seed in seeds] for model in (ours, DENSE)]
    steps = set[int].intersection(*({*curve} for side in sides for _, curve in side))
    rows = list[Figures]()
    for step in sorted(steps):
        mean, dense = (fmean(curve[step][VALIDATION] for _, curve in side) for side in sides)
        rows.append({"step": step, "ours": mean, "dense": dense, "difference": mean - dense})
    files = ", ".join(arm.code(arm.metrics_file) for side in sides for arm, _ in side)
    windows = sorted({_eval_windows(arm) for side in sides for arm, _ in side})
    about = (
        "Validation by step, as evaluated during training on "
        f"{' or '.join(f'{number:,}' for number in windows)} windows, {BITS}{_mean(len(seeds))}."
    )
    return [f"{about} {source(files)}", table_of(STEPS.format(ours=ours), rows)] if rows else []


def by_position(model: str, found: Figures, plot: str) -> list[Part]:
    """Losses by tokens of context, means over the seeds, and the difference of each pair."""
    runs, against = (
        [folded(run["positions"]) for run in found[side]] for side in ("runs", "against")
    )
    ours, dense = (
        [[one["bits_per_byte"] for one in bins] for bins in side] for side in (runs, against)
    )
    apart = [[x - y for x, y in zip(*pair, strict=True)] for pair in zip(ours, dense, strict=True)]
    means = [[fmean(column) for column in zip(*x, strict=True)] for x in (ours, dense, apart)]
    rows = [
        one | {"targets": one["num_targets"], "ours": x, "dense": y, "difference": z}
        for one, x, y, z in zip(runs[0], *means, strict=True)
    ]
    starts = [one["first"] for one in runs[0]]

    def line(name: str, values: Sequence[float], **style: Any) -> Line:
        return Line(
            name, list(zip(starts, values, strict=True)), {"color": COLOURS[model], **style}
        )

    alone = {"marker": "."} if len(apart) == 1 else {"linewidth": 0.8}
    lines = [
        line(f"seed {seed}", ys, linestyle=DASHES[n % len(DASHES)], **alone)
        for n, (seed, ys) in enumerate(zip(found["trained"], apart, strict=True))
    ]
    if len(apart) > 1:
        lines.append(line("mean", means[2], color="#000000", marker="."))
    lines.append(line("no difference", [0.0] * len(starts), color="#888888", linewidth=0.8))
    panel = Panel("tokens of context", f"{model} minus dense, {BITS}", lines, {"xscale": "log"})
    return [
        f"Test by tokens of context, {BITS}{_mean(len(apart))}. {source(found['files'])}",
        table_of(POSITIONS.format(ours=model), rows),
        draw(plot, [panel]),
    ]


def folded(bins: Sequence[Figures]) -> list[Figures]:
    """Bins of positions with a last one of a single position folded into the one before."""
    *before, last = bins
    if not before or last["first"] < last["last"]:
        return [*bins]
    pair, sums = (before.pop(), last), ("num_targets", "num_bytes")
    counts = {name: sum(one[name] for one in pair) for name in sums}
    bits = sum(one["bits_per_byte"] * one["num_bytes"] for one in pair) / counts["num_bytes"]
    return [
        *before,
        {"first": pair[0]["first"], "last": last["last"], "bits_per_byte": bits, **counts},
    ]


def by_distance(arms: Sequence[Arm]) -> list[Part]:
    """Loss of repeated passages by the distance back to them, means over a model's seeds."""
    with_file = [arm for arm in arms if (arm.folder / REPEATED_FILE).exists()]
    rows, distances = list[Figures](), dict[int, None]()
    for model in CONFIGS:
        found = [
            arm.read(REPEATED_FILE)["repeats"] for arm in with_file if arm.row["model"] == model
        ]
        if found:
            row = {"model": model, "seeds": len(found)}
            for bins in zip(*found, strict=True):
                distances[bins[0]["distance"]] = None
                again, first = (
                    fmean(one[name] for one in bins)
                    for name in ("bits_per_byte", "first_bits_per_byte")
                )
                row[str(bins[0]["distance"])] = without_minus_zero(
                    f"{again:.4f} ({again - first:+.4f})"
                )
            rows.append(row)
    if not rows:
        return []
    columns = "".join(f" | {distance:,} back={distance}" for distance in distances)
    about = (
        f"Second half of passages of {REPEATED} tokens that are repeated, by the tokens back to "
        "them, and in brackets the difference to the same passages where they stood first; each "
        f"distance has passages of its own. {BITS.capitalize()}, means over the seeds."
    )
    files = ", ".join(arm.code(REPEATED_FILE) for arm in with_file)
    return [f"{about} {source(files)}", table_of(f"{REPEATS}{columns}", rows)]


def _eval_windows(arm: Arm) -> int:
    """Windows of an evaluation during training; older runs have no other."""
    path = arm.folder / "config.yaml"
    number: int = load_config(path).eval_windows if path.exists() else arm.row["val_windows"]
    return number


# --- curves ---------------------------------------------------------------------------------------
def curves(compared: str, arms: Sequence[Arm], plot: str) -> list[Part]:
    """Validation over the second half of tokens and seconds, and a model's differences to all."""
    halves: dict[str, list[Line]] = {
        "tokens, second half": [],
        "seconds, second half of the tokens": [],
    }
    apart, seeds = list[Line](), sorted({arm.row["seed"] for arm in arms})
    ours = {arm.row["seed"]: _validation(arm) for arm in arms if arm.row["model"] == compared}
    drawn = [(arm, curve) for arm in arms if (curve := _validation(arm))]
    for arm, curve in drawn:
        model, seed = arm.row["model"], arm.row["seed"]
        label, dashes = f"{model}, seed {seed}", DASHES[seeds.index(seed) % len(DASHES)]
        style = {"color": COLOURS[model], "linestyle": dashes, "marker": "."}
        late = [
            row for row in curve.values() if 2 * row["tokens"] >= [*curve.values()][-1]["tokens"]
        ]
        for x, name in zip(halves, ("tokens", "s"), strict=True):
            halves[x].append(Line(label, points(late, name, VALIDATION), style))
        common = [step for step in curve if step in ours.get(seed, {})]
        differences = [
            (float(curve[step]["tokens"]), ours[seed][step][VALIDATION] - curve[step][VALIDATION])
            for step in common
        ]
        if common and model != compared:
            apart.append(Line(label, differences, style))
    if not drawn:
        return []
    panels = [Panel(x, f"validation, {BITS}", lines) for x, lines in halves.items()]
    panels += [Panel("tokens", f"{compared} minus it, same seed, {BITS}", apart)] if apart else []
    files = ", ".join(arm.code(arm.metrics_file) for arm, _ in drawn)
    return [source(files), draw(plot, panels)]


def _validation(arm: Arm) -> dict[int, Figures]:
    """Rows of metrics with a validation by step, with the seconds since the start."""
    rows = [row for row in arm.metrics() if VALIDATION in row]
    return {row["step"]: row | {"s": row["tokens"] / row["tokens_per_s_total"]} for row in rows}
