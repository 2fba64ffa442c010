"""Trainings that show what models learn: the runner, and the tables of their rows.

``python -m tools.evidence run`` trains every experiment of ``experiments.yaml``, runs the commands
on it, and collects small files and a row; it continues what is not finished. ``--part 0/4`` is one
of four processes, each with a GPU of its own.
``python -m tools.evidence report`` writes the tables of the committed rows.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from nsa.lm.baseline import parameters_by_part
from nsa.train.checkpoint import list_checkpoints
from nsa.train.load import load_config
from tools.evidence_report import EXPERIMENTS, VALIDATION, read_json, read_lines, write_report

ROOT = Path(__file__).resolve().parents[1]
BOOKS = "BOOKS"  # link to the prepared data in the folder in which everything runs
COLLECTED = ("config.yaml", "environment.json", "events.jsonl", "sample.txt", "loss.png")


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
        for models, (seeds, rates) in one["runs"].items():
            for seed, model, lr in itertools.product(seeds, models.split(), rates):
                values = {"model": read["names"].get(model, model), "seed": seed, "lr": lr}
                folder = f"{group}/{one['name'].format(**values)}".rstrip("/")
                config, *own = words_of(model, read["models"])
                options = [*shlex.split(" ".join(words).format(**values)), *own]
                last = dict(zip(options[::2], options[1::2], strict=True))
                train = shlex.join([config, *itertools.chain(*last.items())])
                found = {name: read["commands"][name] for name in one.get("then", "").split()}
                commands = {
                    name: text.replace("{eval}", one.get("eval", ""))
                    for name, text in found.items()
                    if not (text.startswith("inspect") and "dense" in model)
                }
                yield Experiment(group, folder, model, train, commands)


def words_of(model: str, models: Mapping[str, str]) -> list[str]:
    """Configuration and options of a model, which may begin with the name of another one."""
    first, *options = shlex.split(models[model])
    return [*(words_of(first, models) if first in models else [first]), *options]


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 1 if an experiment failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.evidence", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and measure what is not finished, into OUT/rows")
    run.add_argument("--data", type=Path, required=True, help="books, made by nsa data prepare")
    run.add_argument("--out", type=Path, required=True, help="folder for everything")
    run.add_argument("--only", nargs="+", help="some experiments, such as 2k/nsa-1337, or groups")
    run.add_argument(
        "--part", default="0/1", metavar="I/N", help="every N-th of them, from the I-th"
    )
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
    if not re.fullmatch(r"\d+/[1-9]\d*", options.part):
        parser.error(f"--part must be I/N such as 1/4, got {options.part}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    first, every = map(int, options.part.split("/"))
    return run_all(chosen[first::every], options.data, options.out, options.commit)


if __name__ == "__main__":
    sys.exit(main())
