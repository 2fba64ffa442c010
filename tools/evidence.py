"""Trainings that show what models learn: the runner, and the tables of their rows.

``python -m tools.evidence run`` trains every experiment of ``experiments.yaml``, runs the commands
on it, and collects small files and a row; it continues what is not finished.
``python -m tools.evidence report`` writes the tables of the committed rows.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from nsa.bench.report import markdown, table
from nsa.lm.baseline import parameters_by_part
from nsa.train.checkpoint import list_checkpoints
from nsa.train.evaluation import interval, student_t
from nsa.train.load import load_config
from nsa.train.measurements import compare
from nsa.train.needles import wilson

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = Path(__file__).with_name("experiments.yaml")
BOOKS = "BOOKS"  # link to the prepared data in the folder in which everything runs
COLLECTED = ("config.yaml", "environment.json", "events.jsonl", "sample.txt", "loss.png")
MODELS = tuple(yaml.safe_load(EXPERIMENTS.read_text(encoding="utf-8"))["models"])
DENSE = "dense-equal-parameters"
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
SELECTED = (
    "`nsa inspect` of the beginning of the validation text: mean gates, mean distance of the "
    "selected keys, and the fraction of a query's blocks that the query before selected too."
)

Row = dict[str, Any]


# --- Runner
@dataclass(frozen=True)
class Experiment:
    """One training.

    Attributes:
        group: experiments that are compared.
        folder: path of its results.
        model: name of the model in its row.
        train: words of ``nsa train``.
        commands: words of ``nsa`` for the finished run, by the file of their output.
    """

    group: str
    folder: str
    model: str
    train: str
    commands: dict[str, str]


def experiments() -> Iterator[Experiment]:
    """Experiments of the YAML file, in its order."""
    read: dict[str, Any] = yaml.safe_load(EXPERIMENTS.read_text(encoding="utf-8"))
    for group, one in read["groups"].items():
        words = [read["settings"][name] for name in one["settings"].split()] + [one.get("more", "")]
        for model, (seeds, rates) in one["runs"].items():
            for seed, lr in itertools.product(seeds, rates):
                values = {"model": read["names"].get(model, model), "seed": seed, "lr": lr}
                folder = f"{group}/{one['name'].format(**values)}".rstrip("/")
                train = " ".join([read["models"][model], *words]).format(**values)
                commands = {
                    name: read["commands"][name]
                    for name in one.get("then", "").split()
                    if not (name.startswith("inspect") and model.startswith("dense"))
                }
                yield Experiment(group, folder, model, train, commands)


def run_all(chosen: Sequence[Experiment], data: Path, out: Path, commit: str | None) -> int:
    """Run experiments one after the other; 1 if one failed.

    Args:
        chosen: the experiments.
        data: prepared data.
        out: folder of ``runs/`` and ``rows/``.
        commit: commit for the rows; None takes the recorded one.
    """
    out.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (out / BOOKS).symlink_to(data.absolute(), target_is_directory=True)
    failed = 0
    for one in chosen:
        if (out / "rows" / one.folder / "row.json").exists():
            print(f"{one.folder}: done before", flush=True)
            continue
        print(f"{one.folder}: begins", flush=True)
        fault = run_one(one, out, commit)
        failed |= bool(fault)
        print(f"{one.folder}: {f'FAILED: {fault}' if fault else 'done'}", flush=True)
    return failed


def run_one(one: Experiment, out: Path, commit: str | None) -> str:
    """Train or resume, run the commands, and collect small files and the row; the fault, or ""."""
    folder, name = out / "rows" / one.folder, f"runs/{one.folder.replace('/', '-')}"
    run = out / name
    words = ["train", "--resume", name]
    if not list_checkpoints(run / "checkpoints"):
        shutil.rmtree(run, ignore_errors=True)
        words = ["train", *shlex.split(one.train), "--run-dir", name]
    shutil.rmtree(folder, ignore_errors=True)
    values = {"run": name, "folder": folder.relative_to(out)}
    commands = {run.with_suffix(".txt"): words}
    commands |= {
        folder / file: shlex.split(text.format(**values)) for file, text in one.commands.items()
    }
    for log, words in commands.items():
        if code := nsa(words, out, log):
            return f"nsa {words[0]}: exit code {code}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in COLLECTED:
        if (run / file).exists():
            shutil.copyfile(run / file, folder / file)
    text = (folder / "environment.json").read_text(encoding="utf-8")
    (folder / "environment.json").write_text(text.replace(f"{ROOT}/", ""), encoding="utf-8")
    metrics = (run / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(metrics, mtime=0))
    row = make_row(one, folder, commit)
    (folder / "row.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return ""


def nsa(words: Sequence[str], out: Path, log: Path) -> int:
    """Run ``nsa`` in the folder ``out`` and append its output to a file; the exit code.

    Paths are relative to that folder, so that records contain no path of this machine.
    """
    print("$ nsa", shlex.join(words), flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, env = [sys.executable, "-m", "nsa", *words], {**os.environ, "PYTHONPATH": path}
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=out, env=env, stdout=file)
        try:
            return process.wait()
        finally:
            process.terminate()  # if this process is interrupted: a training writes a checkpoint
            process.wait()


def make_row(one: Experiment, folder: Path, commit: str | None) -> dict[str, Any]:
    """Row of a finished run; benchmarks/quality/README.md explains its fields."""
    config = load_config(folder / "config.yaml")
    machine = read_json(folder / "environment.json")["launches"][-1]
    metrics = read_lines(folder / "metrics.jsonl.gz")
    last = metrics[-1]
    in_training = [row[VALIDATION] for row in metrics if VALIDATION in row]
    test, validation = (read_json(folder / f"{split}.json") for split in ("test", "validation"))
    if not validation and in_training:
        validation = {"bits_per_byte": in_training[-1], "windows": config.eval_windows}
    cuda = machine["cuda"] or {"gpus": [{"name": "cpu"}], "driver": None}
    code = machine["code"]
    return {
        "experiment": one.group,
        "model": one.model,
        "parameters": parameters_by_part(config.model)["total"],
        "mlp_hidden_size": config.model.mlp_hidden_size,
        "optimizer": config.optim.name,
        "lr": config.optim.muon_lr if config.optim.name == "muon" else config.optim.lr,
        "warmup_steps": config.optim.warmup_steps,
        "steps": last["step"],
        "tokens": last["tokens"],
        "seq_len": config.seq_len,
        "global_batch": config.global_batch,
        "seed": config.seed,
        VALIDATION: validation.get("bits_per_byte"),
        "val_windows": validation.get("windows"),
        "test_bits_per_byte": test.get("bits_per_byte"),
        "test_windows": test.get("windows"),
        "tokens_per_s": statistics.median(float(row["tokens_per_s"]) for row in metrics),
        "tokens_per_s_total": last["tokens_per_s_total"],
        "gpu": cuda["gpus"][0]["name"],
        "driver": cuda["driver"],
        **{name: machine["versions"][name] for name in ("torch", "triton")},
        "commit": commit or f"{code['commit']}{'+changes' * bool(code['dirty'])}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read_json(path: Path) -> dict[str, Any]:
    """Object of a JSON file; empty if the file does not exist."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file, plain or compressed; none if the file does not exist."""
    content = path.read_bytes() if path.exists() else b""
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    return [json.loads(line) for line in lines]


# --- Report
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
        sweep = "rates" in group
        parts = sweep_tables(runs) if sweep else [*group_tables(runs), *selection_tables(runs)]
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
    tables = {
        "Fields of the rows ([README](README.md)).": cells,
        PAIRED: differences(runs),
        f"Validation during training, {BITS}, mean over seeds.": by_step(runs),
        f"Passages of 128 tokens that are repeated, {BITS}, mean over seeds.": by_distance(runs),
        "Needles found, share of exact matches, mean over seeds.": by_needle(runs, "needles"),
        "The same with passages of the text, 64 tokens, of which the last 8 are asked for.": (
            by_needle(runs, "passages")
        ),
        "Lines of data.recall found in a text with one line.": by_needle(runs, "lookups"),
        f"Test by tokens of context, {BITS}, mean over seeds.": by_position(runs),
    }
    return [part for about, rows in tables.items() if rows for part in (about, lines_of(rows))]


def pairs(runs: Sequence[Run]) -> dict[str, list[tuple[Run, Run]]]:
    """Runs of the first model with those of equal seeds, by the other model."""
    models = {run.row["model"] for run in runs}
    if not models:
        return {}
    first, *others = (name for name in MODELS if name in models)
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
    return compare(
        *([run.folder / "test.npz" for run in runs] for runs in zip(*chosen, strict=True))
    )


def differences(runs: Sequence[Run]) -> list[Row]:
    """Paired differences of the first model to the others, of each seed and of all."""
    found = list[Row]()
    measured = [run for run in runs if (run.folder / "test.npz").exists()]
    for model, chosen in pairs(measured).items():
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
    """Loss of repeated passages by the distance back to them, and their gain beside dense's."""
    repeats = {
        (run.row["model"], run.row["seed"]): read_json(path)["repeats"]
        for run in runs
        if (path := run.folder / "repeats.json").exists()
    }
    found = list[Row]()
    for model in MODELS:
        seeds = [seed for name, seed in repeats if name == model]
        for n, bins in enumerate(zip(*(repeats[model, seed] for seed in seeds), strict=True)):
            row = {"model": model, "seeds": len(seeds), "tokens back": bins[0]["distance"]}
            for text, name in (("first", "first_bits_per_byte"), ("repeated", "bits_per_byte")):
                row[text] = fmean(one[name] for one in bins)
            row["gain"] = fmean(map(gain, bins))
            pairs = [
                gain(repeats[model, seed][n]) - gain(repeats[DENSE, seed][n])
                for seed in seeds
                if model != DENSE and (DENSE, seed) in repeats
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
        needles = [read_json(path)["needles"] for path in files if path.exists()]
        for cells in zip(*needles, strict=True):
            if (length := cells[0]["length"]) is None:
                continue
            if not found or (found[-1]["model"], found[-1]["tokens"]) != (model, length):
                found.append({"model": model, "seeds": len(needles), "tokens": length})
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
    """Test losses by tokens of context, and differences to dense."""
    chosen = pairs(runs).get(DENSE)
    if not chosen:
        return []
    found, model = compared(chosen), chosen[0][0].row["model"]
    bins = [[folded(run["positions"]) for run in found[name]] for name in ("runs", "against")]
    rows = list[Row]()
    for n, one in enumerate(bins[0][0]):
        ours, dense = (fmean(run[n]["bits_per_byte"] for run in runs) for runs in bins)
        row = {"from": one["first"], "to": one["last"], model: ours, DENSE: dense}
        rows.append(row | {"difference": f"{ours - dense:+.4f}"})
    return rows


def folded(bins: Sequence[Row]) -> list[Row]:
    """Bins of positions with a last one of a single position merged into the one before."""
    *before, last = bins
    if not before or last["first"] < last["last"]:
        return [*bins]
    pair = (before.pop(), last)
    num_bytes = sum(one["num_bytes"] for one in pair)
    bits = sum(one["bits_per_byte"] * one["num_bytes"] for one in pair) / num_bytes
    return [*before, pair[0] | {"last": last["last"], "bits_per_byte": bits}]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 1 if an experiment failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.evidence", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and measure what is not finished, into OUT/rows")
    run.add_argument("--data", type=Path, required=True, help="books, made by nsa data prepare")
    run.add_argument("--out", type=Path, required=True, help="folder for everything")
    run.add_argument("--only", nargs="+", help="some experiments, such as 2k/nsa-1337, or groups")
    run.add_argument("--commit", help="commit to record if the checkout has no git")
    report = commands.add_parser("report", help="write the tables of the committed rows")
    report.add_argument("--rows", type=Path, default=Path("benchmarks/quality"), help="the rows")
    options = parser.parse_args(arguments)
    if options.command == "report":
        return write_report(options.rows)
    known = [*experiments()]
    chosen = [one for one in known if not options.only or {one.group, one.folder} & {*options.only}]
    if unknown := {*(options.only or ())} - {x for one in known for x in (one.group, one.folder)}:
        parser.error(f"--only must name experiments or groups, got {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run_all(chosen, options.data, options.out, options.commit)


if __name__ == "__main__":
    sys.exit(main())
