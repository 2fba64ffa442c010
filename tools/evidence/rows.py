"""From a finished run to its folder of small files and its row."""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa.lm.baseline import parameters_by_part
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import read_metrics
from tools.accept.programs import ROOT, say
from tools.evidence.experiments import Experiment
from tools.evidence.training import Leg

LIMIT_MIB = 8
ROW = "row.json"
FAILED = "failed-"  # before the name of the file that a failed command would have left
OF_THE_RUN = ("config.yaml", "environment.json", "events.jsonl", "sample.txt", "loss.png")


def collect(experiment: Experiment, run: Path, folder: Path, legs_file: Path) -> list[str]:
    """Copy the small files of a run beside what the commands have left.

    Args:
        experiment: what was run.
        run: its run folder.
        folder: where the files belong.
        legs_file: its ``legs.jsonl``.

    Returns:
        Names of files that were left out because they are too large.
    """
    further = (name.format(run=run) for command in experiment.afterwards for name in command.files)
    for source in (legs_file, *(run / name for name in OF_THE_RUN), *map(Path, further)):
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
    launches = folder / "environment.json"
    text = launches.read_text(encoding="utf-8").replace(f"{ROOT}/", "")
    launches.write_text(text, encoding="utf-8")
    metrics = (run / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(metrics, mtime=0))
    large = [path for path in sorted(folder.iterdir()) if path.stat().st_size > LIMIT_MIB << 20]
    for path in large:
        say(f"{path}: {path.stat().st_size >> 20} MiB, left out: at most {LIMIT_MIB} MiB a file")
        path.unlink()
    return [path.name for path in large]


def make_row(
    experiment: Experiment, run: Path, folder: Path, legs: Sequence[Leg], commit: str
) -> dict[str, Any]:
    """The row of a finished run; None for what was not measured.

    Speeds are three: ``tokens_per_s``, median of the rows of metrics; ``tokens_per_s_total``, of
    the last row, with evaluations and checkpoints; ``tokens_per_s_processes``, over the seconds of
    the training processes from start to end.
    """
    opened = RunFolder.open(run)
    config, machine, metrics = (
        opened.load_config(),
        opened.launches()[-1],
        read_metrics(opened.metrics_jsonl),
    )
    last, seconds = metrics[-1], round(sum(leg["seconds"] for leg in legs), 1)
    in_training = [row["val_bits_per_byte"] for row in metrics if "val_bits_per_byte" in row]
    test, validation = (_figures(folder / f"{split}.json") for split in ("test", "validation"))
    if not validation and in_training:
        validation = {"bits_per_byte": in_training[-1], "windows": config.eval_windows}
    cuda = machine["cuda"] or {"gpus": [{"name": "cpu"}], "driver": None}
    return {
        "experiment": experiment.group,
        "model": experiment.model,
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
        "tokens_per_s_processes": float(last["tokens"]) / seconds,
        "seconds": seconds,
        "legs": len(legs),
        "gpu": cuda["gpus"][0]["name"],
        "driver": cuda["driver"],
        **{name: machine["versions"][name] for name in ("torch", "triton")},
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _figures(path: Path) -> dict[str, Any]:
    """What a command printed as JSON; nothing where it failed."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
