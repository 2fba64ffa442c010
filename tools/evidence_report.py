"""Tables of trainings that show what models learn, from their rows."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from nsa.bench.report import markdown, table
from nsa.lm.config import LMConfig
from nsa.train.evaluation import Measurement, interval, student_t
from nsa.train.load import load_config
from nsa.train.measurements import compare, load_measurement
from nsa.train.needles import wilson

EXPERIMENTS = Path(__file__).with_name("experiments.yaml")
MODELS = tuple(yaml.safe_load(EXPERIMENTS.read_text(encoding="utf-8"))["models"])
LATE = 8192  # tokens of context
BITS, VALIDATION = "bits per byte", "val_bits_per_byte"
SHOWN = (
    *("model", "seed", "parameters", "lr", "steps", "tokens", "val_bits_per_byte", "val_windows"),
    *("test_bits_per_byte", "test_windows", "tokens_per_s", "tokens_per_s_total", "gpu", "torch"),
    *("commit", "date"),
)
PAIRED = (
    "Paired differences on the test text, bits per byte; negative: the first model is better. 95% "
    "intervals as `nsa compare` computes them: over documents (these trained models, other books), "
    "over seeds (other seeds, these books), over both."
)
SUMMARY = (
    "Each model, mean over seeds. Losses are bits per byte of the test text, of all targets and of "
    "those predicted from at least 8,192 tokens; a positive difference means that the first model "
    "is better. Its 95% interval covers other books and other seeds; the variance over seeds is "
    "that of the residuals of all models. Gain: bits per byte that a passage of 128 tokens costs "
    "less where it is repeated, by distance; the intervals of its differences cover other seeds "
    "alone. Recall: attention outside the forced blocks that the selection keeps, as a fraction of "
    "what the best blocks keep. Time to dense: time until the last validation loss of the dense "
    "model is reached, at the median speeds of both, as a fraction of the dense model's time."
)
AT_RANDOM = (
    "At random: probability that a query would read a given block in some layer and KV head if it "
    "selected random blocks beside the forced ones."
)
SELECTED = (
    "`nsa inspect` of the beginning of the validation text: mean gates, mean distance of the "
    "selected keys, and the fraction of a query's blocks that the query before selected too."
)

Row = dict[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """Object of a JSON file; empty if the file does not exist."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file, plain or compressed; none if the file does not exist."""
    content = path.read_bytes() if path.exists() else b""
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        name: its folder, relative to the rows.
        folder: path of its files.
        row: its row.
        metrics: rows of metrics, oldest first.
    """

    name: str
    folder: Path
    row: Row
    metrics: list[Row]

    def validation(self) -> dict[int, Row]:
        """Rows of metrics with a validation by step."""
        return {row["step"]: row for row in self.metrics if VALIDATION in row}

    @property
    def is_measured(self) -> bool:
        """Whether the test text was measured."""
        return (self.folder / "test.npz").exists()

    def test(self) -> Measurement:
        """Measurement of the test text."""
        return load_measurement("rows", self.folder / "test.npz")[0]

    def reaches(self, loss: float) -> float | None:
        """Tokens until a validation loss, interpolated; None if it is not reached."""
        points = [(row["tokens"], row[VALIDATION]) for row in self.validation().values()]
        for (begin, above), (end, below) in itertools.pairwise([(0, math.inf), *points]):
            if below <= loss:
                return float(end - (end - begin) * (loss - below) / (above - below))
        return None


def read_group(rows: Path, group: str) -> list[Run]:
    """Runs of a group by seed and model."""
    found = [
        Run(
            str(path.parent.relative_to(rows)),
            path.parent,
            read_json(path),
            read_lines(path.with_name("metrics.jsonl.gz")),
        )
        for path in sorted((rows / group).glob("**/row.json"))
    ]
    return sorted(found, key=lambda run: (run.row["seed"], MODELS.index(run.row["model"])))


def write_report(rows: Path) -> int:
    """Write ``<group>.md`` beside the rows of every group.

    Args:
        rows: ``benchmarks/quality``, or a folder in its layout.
    """
    for group in sorted({path.relative_to(rows).parts[0] for path in rows.glob("**/row.json")}):
        runs = read_group(rows, group)
        if "rates" in group:
            parts = sweep_tables(runs)
        elif group == "ablations":
            parts = [SUMMARY, lines_of(by_model(runs))]
        else:
            parts = [*group_tables(runs), *selection_tables(runs)]
        text = "\n\n".join([f"# {group}", "Made by `python -m tools.evidence report`.", *parts])
        (rows / f"{group}.md").write_text(f"{text}\n", encoding="utf-8")
    return 0


def lines_of(rows: Sequence[Row]) -> str:
    """Table in Markdown without empty columns."""

    def cell(value: Any) -> str:
        if not isinstance(value, float):
            return "" if value is None else str(value)
        return (
            f"{value:,.0f}" if value > 100 else f"{value:.4f}" if value > 0.01 else f"{value:.2g}"
        )

    names = dict.fromkeys(name for row in rows for name in row)
    return markdown(table([{name: cell(row.get(name)) for name in names} for row in rows]))


def group_tables(runs: Sequence[Run]) -> list[str]:
    """Tables of runs that are compared."""
    cells = [
        {"run": run.name}
        | {name: run.row.get(name) for name in SHOWN}
        | {"memory_mib": max(row.get("memory_allocated_mib", 0) for row in run.metrics)}
        for run in runs
    ]
    models = by_model(runs)
    tables = {
        SUMMARY: models if len(models) > 1 else [],
        "Fields of the rows ([README](README.md)).": cells,
        PAIRED: differences(runs),
        f"Validation during training, {BITS}, mean over seeds.": by_step(runs),
        f"Passages of 128 tokens that are repeated, {BITS}, mean over seeds.": by_distance(runs),
        f"Needles found, share of exact matches, mean over seeds. {AT_RANDOM}": (
            by_needle(runs, "needles")
        ),
        "The same with passages of the text, 64 tokens, of which the last 8 are asked for.": (
            by_needle(runs, "passages")
        ),
        f"Lines of data.recall found in a text with one line. {AT_RANDOM}": (
            by_needle(runs, "lookups")
        ),
        f"Test by tokens of context, {BITS}, mean over seeds.": by_position(runs),
    }
    return [part for about, rows in tables.items() if rows for part in (about, lines_of(rows))]


def by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each model."""
    found = {name: [run for run in runs if run.row["model"] == name] for name in MODELS}
    return {name: own for name, own in found.items() if own}


def pairs(runs: Sequence[Run]) -> dict[str, list[tuple[Run, Run]]]:
    """Runs of the first model with those of equal seeds, by the other model."""
    first, *others = by_name(runs).items() or [("", [])]
    seeds = {run.row["seed"]: run for run in first[1]}
    found = {
        name: [(seeds[run.row["seed"]], run) for run in own if run.row["seed"] in seeds]
        for name, own in others
    }
    return {name: chosen for name, chosen in found.items() if chosen}


def compared(chosen: Sequence[Sequence[Run]], context: int = 1) -> Row:
    """Statistics of ``nsa compare`` for pairs of runs."""
    first, second = (
        [run.folder / "test.npz" for run in runs] for runs in zip(*chosen, strict=True)
    )
    return compare(first, second, context)


def differences(runs: Sequence[Run]) -> list[Row]:
    """Paired differences of the first model to the others, of each seed and of all."""
    found = list[Row]()
    for model, chosen in pairs([run for run in runs if run.is_measured]).items():
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


def dense_of(runs: Sequence[Run]) -> str | None:
    """Dense model that the others are compared with; None without one."""
    models = {run.row["model"] for run in runs}
    return next((name for name in MODELS if name in models and "dense" in name), None)


def by_model(runs: Sequence[Run]) -> list[Row]:
    """Loss beside the first model's, repeats, recall and cost of each model."""
    measured = [run for run in runs if run.is_measured]
    is_long = any(run.row["seq_len"] > LATE for run in measured)
    losses, gains = list[dict[str, Row]](), list[dict[str, Row]]()
    for context in (1, LATE) if is_long else (1,):
        what = f"beyond {context:,}" if context > 1 else BITS
        bits = {
            run.name: float(run.test().beyond(context).figures()["bits_per_byte"])
            for run in measured
        }
        losses.append(against_first(measured, what, bits, context))
    far = {run.name: far_gains(run) for run in runs}
    repeated = [run for run in runs if far[run.name]]
    for distance in sorted({x for own in far.values() for x in own})[-2:]:
        figures = {run.name: far[run.name][distance] for run in repeated}
        gains.append(against_first(repeated, f"gain at {distance:,}", figures))
    found = list[Row]()
    for model, own in by_name(runs).items():
        row = {"model": model, "seeds": len(own), "parameters": own[0].row["parameters"]}
        for of_models in losses:
            row |= of_models.get(model, {})
        repeats = [far[run.name].items() for run in own if far[run.name]]
        for bins in zip(*repeats, strict=True):
            row[f"gain at {bins[0][0]:,}"] = fmean(one for _, one in bins)
        for of_models in gains:
            row |= of_models.get(model, {})
        layers = [read_json(run.folder / "selection.json").get("layers", []) for run in own]
        chosen = [x["selection"] for x in itertools.chain(*layers) if x["selection"]]
        row["recall"] = fmean(x["recall"] for x in chosen) if chosen else None
        row["tokens/s"] = fmean(run.row["tokens_per_s"] for run in own)
        row["MiB"] = max(x.get("memory_allocated_mib", 0.0) for run in own for x in run.metrics)
        found.append(row | {"time to dense": time_to_dense(runs, own)})
    return found


def far_gains(run: Run) -> dict[int, float]:
    """Gain of repeated passages by tokens back, above 1,000; empty if it was not measured."""
    repeats = read_json(run.folder / "repeats.json").get("repeats", [])
    return {one["distance"]: gain(one) for one in repeats if one["distance"] > 1000}


def against_first(
    runs: Sequence[Run], what: str, figures: Mapping[str, float], context: int | None = None
) -> dict[str, Row]:
    """Mean figure of each model, and the difference to the first one with its 95% interval.

    Its variance is twice the residual variance of an analysis of variance with models and seeds,
    divided by the number of seeds; of losses, plus that of the bootstrap over documents.

    Args:
        runs: runs that have the figure.
        what: name of the figure.
        figures: by the name of the run.
        context: of bits per byte, tokens from which a target must have been predicted.
    """
    own = {name: [figures[run.name] for run in own] for name, own in by_name(runs).items()}
    variance, freedom = seed_variance([*own.values()])
    column = f"{what} minus {next(iter(own), '')}"
    found: dict[str, Row] = {name: {what: fmean(some), column: None} for name, some in own.items()}
    for name, chosen in pairs(runs).items():
        middle = fmean(figures[other.name] - figures[first.name] for first, other in chosen)
        low = high = middle
        if context is not None:
            one = compared([pair[::-1] for pair in chosen], context)
            middle = one["difference_bits_per_byte"]
            low, high = one["difference_low"], one["difference_high"]
        if freedom:
            both = ((high - low) / 3.92) ** 2 + 2 * variance / len(chosen)
            error = student_t(freedom) * both**0.5
            low, high = middle - error, middle + error
        known = f" ({low:+.4f} to {high:+.4f})" if low < high else ""
        found[name][column] = f"{middle:+.4f}{known}"
    return found


def seed_variance(losses: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Residual variance of an analysis of variance with models and seeds, and its freedom.

    Args:
        losses: of each model, by seed; models with fewer seeds than others are left out.
    """
    most = max(map(len, losses), default=0)
    cells = np.array([own for own in losses if len(own) == most])
    if most < 2 or len(cells) < 2:
        return 0.0, 0
    freedom = (len(cells) - 1) * (most - 1)
    residuals = cells - cells.mean(0) - cells.mean(1, keepdims=True) + cells.mean()
    return float((residuals**2).sum()) / freedom, freedom


def time_to_dense(runs: Sequence[Run], own: Sequence[Run]) -> float | None:
    """Time until a model has the last validation loss of the dense one, as a fraction of its time.

    Mean over common seeds; None if a run does not reach it, or has lengths of different speeds.
    """
    dense = {run.row["seed"]: run for run in runs if run.row["model"] == dense_of(runs)}
    fractions = list[float]()
    for run, other in ((run, dense.get(run.row["seed"])) for run in own):
        if other is None or "sequence_tokens" in other.metrics[-1]:
            continue
        *_, last = other.validation().values()
        if (tokens := run.reaches(last[VALIDATION])) is None:
            return None
        speeds = run.row["tokens_per_s"], other.row["tokens_per_s"]
        fractions.append(tokens / speeds[0] / (last["tokens"] / speeds[1]))
    return fmean(fractions) if fractions else None


def by_step(runs: Sequence[Run]) -> list[Row]:
    """Validation losses of each model during training."""
    curves = {name: [run.validation() for run in own] for name, own in by_name(runs).items()}
    steps = sorted({step for own in curves.values() for curve in own for step in curve})
    if len(curves) < 2 or len(steps) < 2:
        return []
    return [
        {"step": step}
        | {
            name: fmean(curve[step][VALIDATION] for curve in own)
            for name, own in curves.items()
            if all(step in curve for curve in own)
        }
        for step in steps
    ]


def by_distance(runs: Sequence[Run]) -> list[Row]:
    """Loss of repeated passages by the distance back to them, and their gain beside dense's."""
    repeats = {
        (run.row["model"], run.row["seed"]): read_json(path)["repeats"]
        for run in runs
        if (path := run.folder / "repeats.json").exists()
    }
    found, dense = list[Row](), dense_of(runs)
    for model in MODELS:
        seeds = [seed for name, seed in repeats if name == model]
        for n, bins in enumerate(zip(*(repeats[model, seed] for seed in seeds), strict=True)):
            row = {"model": model, "seeds": len(seeds), "tokens back": bins[0]["distance"]}
            for text, name in (("first", "first_bits_per_byte"), ("repeated", "bits_per_byte")):
                row[text] = fmean(one[name] for one in bins)
            row["gain"] = fmean(map(gain, bins))
            pairs = [
                gain(repeats[model, seed][n]) - gain(repeats[dense, seed][n])
                for seed in seeds
                if model != dense and (dense, seed) in repeats
            ]
            row["minus dense"] = f"{fmean(pairs):+.4f}" if pairs else None
            row["over seeds"] = over_seeds(pairs)
            found.append(row)
    return found


def gain(repeated: Row) -> float:
    """Bits per byte that a passage costs less than where it first occurs."""
    return float(repeated["first_bits_per_byte"] - repeated["bits_per_byte"])


def over_seeds(differences: Sequence[float]) -> str | None:
    """Interval of the mean of paired differences by Student's t, 95%; None for a single one."""
    number = len(differences)
    if number < 2:
        return None
    error = student_t(number - 1.0) * statistics.stdev(differences) / number**0.5
    return f"{fmean(differences) - error:+.4f} to {fmean(differences) + error:+.4f}"


def by_needle(runs: Sequence[Run], kind: str) -> list[Row]:
    """Needles found at each depth, interval over all cases, and log-probability of the value."""
    found = list[Row]()
    for model in MODELS:
        files = [run.folder / f"{kind}.json" for run in runs if run.row["model"] == model]
        files = [path for path in files if path.exists()]
        needles = [read_json(path)["needles"] for path in files]
        for cells in zip(*needles, strict=True):
            if (length := cells[0]["length"]) is None:
                continue
            if not found or (found[-1]["model"], found[-1]["tokens"]) != (model, length):
                found.append({"model": model, "seeds": len(needles), "tokens": length})
                config = load_config(files[0].with_name("config.yaml")).model
                found[-1]["at random"] = chance(config, length)
            depth = cells[0]["depth"]
            name = "all" if depth is None else f"{depth:.0%}"
            found[-1][name] = fmean(cell["exact_match"] for cell in cells)
            if depth is None:
                cases = sum(cell["cases"] for cell in cells)
                low, high = wilson(
                    sum(cell["exact_match"] * cell["cases"] for cell in cells), cases
                )
                found[-1] |= {"95%": f"{low:.3f} to {high:.3f}", "cases": cases}
                found[-1]["nats"] = fmean(cell["log_prob_nats"] for cell in cells)
    return found


def chance(config: LMConfig, length: int) -> float | None:
    """Probability that random blocks beside the forced ones contain a given one.

    Args:
        config: the model.
        length: tokens of context, for its last query.

    Returns:
        The probability for any of the layers and KV heads; None for a model without selection.
    """
    missed = 1.0
    for one in map(config.layer, range(config.num_layers)):
        if one.attention == "nsa" and "slc" in one.nsa.branches:
            forced = one.nsa.num_init_blocks + one.nsa.num_local_blocks
            free = math.ceil(length / one.nsa.block_size) - forced
            selected = min(one.nsa.num_selected_blocks - forced, free)
            missed *= (1 - selected / free) ** one.nsa.num_kv_heads
    return 1 - missed if missed < 1 else None


def sweep_tables(runs: Sequence[Run]) -> list[str]:
    """Validation losses by learning rate and model."""
    cells: dict[float, Row] = {}
    for row in sorted((run.row for run in runs), key=lambda row: float(row["lr"])):
        one = cells.setdefault(row["lr"], {"learning rate": f"{row['lr']:g}"})
        one[row["model"]] = row[VALIDATION]
    steps, tokens = runs[0].row["steps"], runs[0].row["tokens"]
    about = f"Validation, {BITS}, after {steps:,} steps of {tokens // steps:,} tokens."
    return [about, lines_of([*cells.values()])]


def selection_tables(runs: Sequence[Run]) -> list[str]:
    """Gates and selected blocks of each layer of each sparse model."""
    parts = list[str]()
    for run in runs:
        for path in sorted(run.folder.glob("inspect-*.json"), key=lambda x: (len(x.name), x)):
            found = read_json(path)
            rows = [
                {"layer": number}
                | {name: gate["mean"] for name, gate in layer["gates"].items()}
                | {"tokens back": layer["selection"]["distance_mean"]}
                | {"overlap": layer["selection"]["overlap"][0]["share"]}
                for number, layer in enumerate(found["layers"])
            ]
            parts += [f"{run.name}, {found['num_tokens']:,} tokens.", lines_of(rows)]
    return [SELECTED, *parts] if parts else []


def by_position(runs: Sequence[Run]) -> list[Row]:
    """Test losses of the first model by tokens of context, minus those of each other model."""
    rows, first = list[Row](), dict[int, list[Row]]()
    for model, own in by_name([run for run in runs if run.is_measured]).items():
        bins = {run.row["seed"]: folded(run.test().by_position()) for run in own}
        if not first:
            first = bins
            for some in zip(*first.values(), strict=True):
                loss = fmean(one["bits_per_byte"] for one in some)
                rows.append({"from": some[0]["first"], "to": some[0]["last"], model: loss})
            continue
        for n, row in enumerate(rows):
            pairs = [(first[seed][n], bins[seed][n]) for seed in bins if seed in first]
            less = [one["bits_per_byte"] - other["bits_per_byte"] for one, other in pairs]
            row[f"minus {model}"] = f"{fmean(less):+.4f}" if less else None
    return rows if len(rows and rows[0]) > 3 else []


def folded(bins: Sequence[Row]) -> list[Row]:
    """Bins of positions with a last one of a single position merged into the one before."""
    *before, last = bins
    if not before or last["first"] < last["last"]:
        return [*bins]
    pair = (before.pop(), last)
    num_bytes = sum(one["num_bytes"] for one in pair)
    bits = sum(one["bits_per_byte"] * one["num_bytes"] for one in pair) / num_bytes
    return [*before, pair[0] | {"last": last["last"], "bits_per_byte": bits}]
