"""A tiny run: a few kilobytes of text, a model of one layer, a fraction of a second a step."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nsa.config import NSAConfig
from nsa.lm.config import LMConfig
from nsa.train.config import DataConfig, OptimConfig, TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import PER_RANK, Row, read_metrics
from nsa.train.trainer import Trainer

PATTERN = NSAConfig(
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    value_dim=16,
    compress_block_size=8,
    compress_stride=4,
    block_size=16,
    num_selected_blocks=4,
    window_size=32,
)
MODEL = LMConfig(width=32, num_layers=1, nsa=PATTERN, mlp_hidden_size=64)
# Metrics that depend on the machine and the moment, by their units.
MACHINE = re.compile(r"(.*_)?(s|ms|mib|percent|total|mfu|compilations)")


def write_text(folder: Path) -> Path:
    """Documents of very different lengths: sequences contain boundaries, micro-batches differ."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [chr(ord("a") + n) * (1 + n % 5) for n in range(15)]
    for index in range(24):
        line = " ".join(words[(7 * index + 3 * k) % len(words)] for k in range(12 + index))
        (folder / f"{index:02d}.txt").write_text(f"{index}. {line}\n" * (1 + index % 6))
    return folder


def tiny_config(tmp_path: Path, **changes: Any) -> TrainConfig:
    """A run over ``write_text`` with other settings; ``model`` and ``optim`` are dictionaries."""
    model = dataclasses.replace(MODEL, **changes.pop("model", {}))
    optim = OptimConfig(**{"lr": 1e-2, "warmup_steps": 3, **changes.pop("optim", {})})
    settings: dict[str, Any] = {
        "data": DataConfig(source="folder", path=str(write_text(tmp_path / "text"))),
        "steps": 12,
        "seq_len": 64,
        "micro_batch": 2,
        "accumulation": 2,
        "device": "cpu",
        "compute_dtype": "fp32",
        "log_every": 2,
        "eval_every": 5,
        "eval_windows": 4,
        "checkpoint_every": 4,
        "sample_tokens": 0,
    }
    settings.update(changes)
    settings.setdefault("global_batch", settings["micro_batch"] * settings["accumulation"])
    return TrainConfig(model=model, optim=optim, **settings)


def make_trainer(
    config: TrainConfig,
    path: Path,
    *,
    resume: bool = False,
    on_row: Callable[[Row], None] | None = None,
) -> Trainer:
    """A trainer over a new run folder, or over the one that is there."""
    folder = RunFolder.open(path) if resume else RunFolder.create(path, config)
    return Trainer(config, folder, resume=resume, on_row=on_row)


def new_trainer(tmp_path: Path, name: str = "run", **changes: Any) -> Trainer:
    """A trainer of :func:`tiny_config` over the new run folder ``name``."""
    return make_trainer(tiny_config(tmp_path, **changes), tmp_path / name)


def resumed(tmp_path: Path, name: str = "run", **changes: Any) -> Trainer:
    """A trainer of :func:`tiny_config` that resumes the run ``name``."""
    return make_trainer(tiny_config(tmp_path, **changes), tmp_path / name, resume=True)


def rows_of(tmp_path: Path, name: str = "run") -> list[dict[str, Any]]:
    """Metrics of the run ``name``."""
    return read_metrics(tmp_path / name / "metrics.jsonl")


def all_equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Whether tensors are equal bit for bit."""
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def run_meta(**changes: Any) -> dict[str, Any]:
    """Content of meta.json that :mod:`nsa.train.checkpoint` itself reads."""
    return {"val_bits_per_byte": None, **changes}


def rewrite_hashes(checkpoint: Path) -> None:
    """Write the hashes of the files as they are now."""
    names = [*sorted(path.name for path in checkpoint.glob("*.safetensors")), "meta.json"]
    digests = [hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names]
    lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


def stored_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The whole tensors of a checkpoint, read without the code under test."""
    parts: dict[str, list[Tensor]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(found) if len(found) > 1 else found[0] for name, found in parts.items()}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def reproducible_rows(path: Path) -> list[Row]:
    """Metrics of a run, without those that depend on the machine and the moment."""
    rows = read_metrics(path / "metrics.jsonl")
    names = {name for row in rows for name in row if not PER_RANK.fullmatch(name)}
    names -= {name for name in names if MACHINE.fullmatch(name)}
    return [{name: row[name] for name in row if name in names} for row in rows]
