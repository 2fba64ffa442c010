"""What a run that is resumed continues from, and which of its settings may be others now."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nsa.errors import check
from nsa.train.checkpoint import list_checkpoints, read_run_meta
from nsa.train.config import CheckpointingConfig, ParallelConfig, TrainConfig
from nsa.train.load import RENAMED
from nsa.train.run_folder import RunFolder

# Settings that a resumed run may change. None of them alters a single weight, but for rounding where a global batch is divided
# into other micro-batches or among other processes, or what these send each other is bf16, for what follows a step that is not
# finite (an exact resumption meets that step again, and with policy stop it would never get beyond it), and for the learning
# rate of the steps to come where their number changes. Where the data lie may change, what they are may not: their description
# has hashes or, for a stream, the commit and the files' versions.
RESUME_MAY_CHANGE = frozenset({
    "steps", "log_every", "eval_every", "eval_windows", "checkpoint_every", "keep_checkpoints", "nonfinite", "nonfinite_limit",
    "sample_tokens", "sample_limit_s", "telemetry", "data_limit_s", "stall_limit_s", "world_size",
    "micro_batch", "accumulation", "cuda_graphs", "memory_fraction",
    "data.path", "data.revision", "data.time_limit_s",
    *(f"parallel.{entry.name}" for entry in dataclasses.fields(ParallelConfig)),
    *(f"checkpointing.{entry.name}" for entry in dataclasses.fields(CheckpointingConfig)),
})  # fmt: skip


def resumed_checkpoint(config: TrainConfig, run_folder: RunFolder, device: torch.device) -> Path:
    """The checkpoint that a run goes on from, once everything that needs no data has been compared with it.

    Args:
        config: the run as it is to go on.
        run_folder: where it lies.
        device: where it will compute.

    Raises:
        ValueError: there is no checkpoint, it is damaged, it comes from another kind of device, or the configuration changes
            what a resumption must not change.
    """
    found = list_checkpoints(run_folder.checkpoints)
    hint = "It stopped before its first one; remove the folder and start the run anew."
    check(bool(found), "train", "--resume", "name a run with a checkpoint", run_folder.path, hint)
    saved = read_run_meta(found[-1])
    hint = "Only a new run can change it; --init-from starts one with these weights."
    # A setting that was not there yet when the checkpoint was written had the effect of its default.
    before = _flat(_as_json(dataclasses.asdict(TrainConfig())))
    before |= {RENAMED.get(name, name): value for name, value in _flat(saved["config"]).items()}
    now = _flat(_as_json(dataclasses.asdict(config)))
    for name in sorted((before.keys() | now.keys()) - RESUME_MAY_CHANGE):
        _check_same(name, before, now, hint)
    done = int(saved["step"])
    check(config.steps >= done, "train", "steps", f"be at least those done ({done})", config.steps)
    kind, hint = saved["rng"].get("device"), "Another kind would not continue exactly."
    check(kind == device.type, "train", "device", f"be {kind} as in the checkpoint", device.type, hint)
    return found[-1]


def check_same_data(checkpoint: Path, description: Mapping[str, Any]) -> None:
    """Refuse data that are not those of the checkpoint.

    Args:
        checkpoint: folder of a checkpoint.
        description: of the data that were opened, see :class:`nsa.train.data.DataBundle`.
    """
    before, now = _flat(read_run_meta(checkpoint)["data"]), _flat(_as_json(dict(description)))
    for name in sorted(before.keys() | now.keys()):
        _check_same(name, before, now, "The text has changed since.")


def _check_same(name: str, before: Mapping[str, Any], now: Mapping[str, Any], hint: str) -> None:
    same = before.get(name) == now.get(name)
    check(same, "train", name, f"stay as in the checkpoint ({before.get(name)})", now.get(name), hint)


def _as_json(tree: dict[str, Any]) -> dict[str, Any]:
    """What comes back from a JSON file, with lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(tree))
    return plain


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Values of nested dictionaries by dotted name."""
    return dict(_dotted(tree, ""))


def _dotted(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
