"""Runner: trains every experiment, runs the commands on it, and collects small files and a row.

A training that was stopped is resumed from its last checkpoint; finished experiments are skipped.
"""

from __future__ import annotations

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
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from nsa.lm.baseline import parameters_by_part
from nsa.train.checkpoint import list_checkpoints, step_of
from nsa.train.load import load_config

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = Path(__file__).with_name("experiments.yaml")
BOOKS = "BOOKS"  # link to the prepared data in the folder in which everything runs
COLLECTED = ("config.yaml", "environment.json", "events.jsonl", "sample.txt", "loss.png")
LIMIT_MIB = 8  # larger files are not collected
STOP_S = 180.0  # from SIGTERM, for a checkpoint, to SIGKILL
STOPPED = 128 + signal.SIGTERM  # exit code, docs/failures.md


@dataclass(frozen=True)
class Experiment:
    """One training.

    Attributes:
        group: experiments that are compared.
        folder: path of its results.
        model: name of the model in its row.
        train: words of ``nsa train``.
        commands: words of ``nsa`` for the finished run, by the file of their output.
        leg_s: seconds after which the training is stopped and resumed.
    """

    group: str
    folder: str
    model: str
    train: str
    commands: dict[str, str]
    leg_s: float = float("inf")

    @property
    def run(self) -> str:
        """Path of its run folder."""
        return f"runs/{self.folder.replace('/', '-')}"


def experiments(path: Path = EXPERIMENTS) -> Iterator[Experiment]:
    """Experiments of a YAML file, in its order."""
    read: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group, one in read["groups"].items():
        words = [read["settings"][name] for name in one["settings"].split()] + [one.get("more", "")]
        for model, (seeds, rates) in one["runs"].items():
            for seed, lr in itertools.product(seeds, rates):
                values = {"model": read["names"][model], "seed": seed, "lr": lr}
                folder = f"{group}/{one['name'].format(**values)}".rstrip("/")
                train = " ".join([read["models"][model], *words]).format(**values)
                commands = {
                    name: read["commands"][name]
                    for name in one.get("then", "").split()
                    if not (name.startswith("inspect") and model.startswith("dense"))
                }
                leg_s = float(one.get("leg_s", "inf"))
                yield Experiment(group, folder, model, train, commands, leg_s)


def run_all(chosen: Sequence[Experiment], data: Path, out: Path, commit: str | None) -> int:
    """Run experiments one after the other.

    Args:
        chosen: the experiments.
        data: prepared data.
        out: folder of ``runs/`` and ``rows/``.
        commit: commit for the rows; None takes the recorded one.

    Returns:
        1 if an experiment failed, otherwise 0.
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
        fault = train(one, out)
        faults = [fault] if fault else finish(one, out, commit)
        failed |= bool(faults)
        verdict = f"FAILED: {'; '.join(faults)}" if faults else "done"
        print(f"{one.folder}: {verdict}", flush=True)
    return failed


def nsa(words: Sequence[str], out: Path, log: Path, limit_s: float) -> int:
    """Run ``nsa`` in the folder ``out``, stop it with SIGTERM at its limit; the exit code.

    Paths are relative to that folder, so that records contain no path of this machine.
    """
    print("$ nsa", shlex.join(words), flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("ab") as file:
        command = [sys.executable, "-m", "nsa", *words]
        process = subprocess.Popen(
            command, cwd=out, env={**os.environ, "PYTHONPATH": path}, stdout=file
        )
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    finally:
        if process.poll() is None:
            process.terminate()
    return process.wait(STOP_S)


def train(one: Experiment, out: Path) -> str:
    """Train to the end, in processes that are stopped and resumed; the fault, or nothing.

    ``legs.jsonl`` of the run gets a line for each process.
    """
    run = out / one.run
    while True:
        before = last_checkpoint(run)
        if before:
            words = ["train", "--resume", one.run]
        else:
            shutil.rmtree(run, ignore_errors=True)
            words = ["train", *shlex.split(one.train), "--run-dir", one.run]
        begin = time.time()
        code = nsa(words, out, run.with_suffix(".txt"), one.leg_s)
        done = last_checkpoint(run)
        if not run.is_dir() or (code not in (0, STOPPED)):
            return f"nsa train: exit code {code}"
        moments = [
            f"{datetime.fromtimestamp(x, UTC):%Y-%m-%dT%H:%M:%SZ}" for x in (begin, time.time())
        ]
        leg = dict(zip(("begin", "end"), moments, strict=True)) | {
            "seconds": round(time.time() - begin, 1),
            "exit_code": code,
            "last_step": done,
        }
        with (run / "legs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(leg) + "\n")
        if done == load_config(run / "config.yaml").steps:
            return ""
        if done == before:
            return f"nsa train stopped at step {done}"


def last_checkpoint(run: Path) -> int:
    """Step of the last checkpoint of a run; 0 without one."""
    return max(map(step_of, list_checkpoints(run / "checkpoints")), default=0)


def finish(one: Experiment, out: Path, commit: str | None) -> list[str]:
    """Run the commands of an experiment, and collect its small files and its row.

    Returns:
        Faults. A command that fails loses only its own file, and the row names it.
    """
    folder, run, faults = out / "rows" / one.folder, out / one.run, list[str]()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    places = {"run": one.run, "folder": folder.relative_to(out), "train": one.train}
    for name, text in one.commands.items():
        code = nsa(shlex.split(text.format(**places)), out, folder / name, float("inf"))
        if code:
            (folder / name).rename(folder / f"failed-{Path(name).stem}.txt")
            faults.append(f"nsa {text.split()[0]} for {name}: exit code {code}")
    for name in (*COLLECTED, "legs.jsonl"):
        if (run / name).exists():
            shutil.copyfile(run / name, folder / name)
    for path in run.with_name(f"{run.name}-profile").glob("profile/*.*"):
        shutil.copyfile(path, folder / path.name)
    text = (folder / "environment.json").read_text(encoding="utf-8")
    (folder / "environment.json").write_text(text.replace(f"{ROOT}/", ""), encoding="utf-8")
    metrics = (run / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(metrics, mtime=0))
    large = [path for path in sorted(folder.iterdir()) if path.stat().st_size > LIMIT_MIB << 20]
    for path in large:
        path.unlink()
    row = make_row(one, folder, commit)
    row |= {"failed": faults, "left_out": [path.name for path in large]}
    (folder / "row.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return faults


def make_row(one: Experiment, folder: Path, commit: str | None) -> dict[str, Any]:
    """Row of a finished run; benchmarks/quality/README.md explains its fields."""
    config = load_config(folder / "config.yaml")
    machine = read_json(folder / "environment.json")["launches"][-1]
    metrics = read_lines(folder / "metrics.jsonl.gz")
    last, legs = metrics[-1], read_lines(folder / "legs.jsonl")
    seconds = round(sum(leg["seconds"] for leg in legs), 1)
    in_training = [row["val_bits_per_byte"] for row in metrics if "val_bits_per_byte" in row]
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
        "val_bits_per_byte": validation.get("bits_per_byte"),
        "val_windows": validation.get("windows"),
        "test_bits_per_byte": test.get("bits_per_byte"),
        "test_windows": test.get("windows"),
        "tokens_per_s": statistics.median(float(row["tokens_per_s"]) for row in metrics),
        "tokens_per_s_total": last["tokens_per_s_total"],
        "tokens_per_s_processes": last["tokens"] / seconds,
        "seconds": seconds,
        "legs": len(legs),
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
