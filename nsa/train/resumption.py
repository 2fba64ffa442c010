"""Checks before a run is resumed: settings that may change, the data, the rows of metrics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from nsa.errors import check
from nsa.train.checkpoint import list_checkpoints, read_meta
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.state import Progress
from nsa.train.telemetry.metrics import lines_until, record_of

# Settings, or whole sections, that a resumed run may change. They do not change weights, except
# - by rounding: the division of a global batch into micro-batches or among processes, and bf16
#   communication;
# - after a non-finite step: an exact resumption meets the same step again, and policy stop would
#   never get past it;
# - the learning rate of later steps, if the number of steps changes.
# The path of the data may change, but not their content: the checkpoint has hashes, or for a stream
# the commit and the versions of the files.
RESUME_MAY_CHANGE = {
    "steps",
    "log_every",
    "eval_every",
    "eval_windows",
    "checkpoint_every",
    "keep_checkpoints",
    "nonfinite",
    "nonfinite_limit",
    "sample_tokens",
    "sample_limit_s",
    "telemetry",
    "data_limit_s",
    "stall_limit_s",
    "world_size",
    "micro_batch",
    "accumulation",
    "cuda_graphs",
    "memory_fraction",
    "parallel",
    "checkpointing",
    "data.path",
    "data.revision",
    "data.time_limit_s",
}


def resumed_checkpoint(config: TrainConfig, run_folder: RunFolder, device: torch.device) -> Path:
    """Return the checkpoint that a run continues from, after checking all that needs no data.

    Args:
        config: the run as it is to continue.
        run_folder: its folder.
        device: where the run computes.

    Raises:
        ValueError: there is no checkpoint, it is damaged, it comes from another kind of device, or
            the configuration changes what a resumption must not change.
    """
    found = list_checkpoints(run_folder.checkpoints)
    hint = "It stopped before its first one; remove the folder and start the run again."
    check(bool(found), "train", "--resume", "name a run with a checkpoint", run_folder.path, hint)
    saved = read_meta(found[-1])
    # A setting that the checkpoint lacks did not exist yet: the run behaved as with its default.
    before = _flat(dataclasses.asdict(TrainConfig())) | _flat(saved["config"])
    now = _flat(dataclasses.asdict(config))
    names = before.keys() | now.keys()
    fixed = (n for n in names if not {n, n.partition(".")[0]} & RESUME_MAY_CHANGE)
    hint = "Only a new run can change it; --init-from starts one with these weights."
    _check_same(before, now, fixed, hint)
    done = int(saved["step"])
    check(config.steps >= done, "train", "steps", f"be at least those done ({done})", config.steps)
    kind, hint = saved["rng"].get("device"), "Another kind would not continue exactly."
    rule = f"be {kind} as in the checkpoint"
    check(kind == device.type, "train", "device", rule, device.type, hint)
    return found[-1]


def check_same_data(checkpoint: Path, description: Mapping[str, Any]) -> None:
    """Raise an error if the data are not those of the checkpoint.

    Args:
        checkpoint: folder of a checkpoint.
        description: of the opened data, see :class:`nsa.train.data.DataBundle`.
    """
    before, now = _flat(read_meta(checkpoint)["data"]), _flat(description)
    # Other versions describe the data with other fields; hashes and counts are in all of them.
    _check_same(before, now, before.keys() & now.keys(), "The text has changed since.")


def fault_of_rows(run_folder: RunFolder, checkpoint: Path) -> str:
    """Compare ``metrics.jsonl`` with the rows that were there when a checkpoint was taken.

    Args:
        run_folder: folder of the run.
        checkpoint: folder of one of its checkpoints.

    Returns:
        A sentence if rows were lost or changed; empty if not, or if the checkpoint has no record
        of them.

    Raises:
        UserError: the checkpoint or the record is damaged.
    """
    meta = read_meta(checkpoint)
    reported = Progress.from_json(meta["progress"]).reported_step
    expected, (kept, _) = meta["metrics"], lines_until(run_folder.metrics_jsonl, reported)
    if expected is None or record_of(kept) == expected:
        return ""
    return (
        f"metrics.jsonl: its {len(kept)} rows up to step {reported} are not the "
        f"{expected['rows']} that were there at {checkpoint.name}: rows were lost or changed"
    )


def _check_same(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    names: Iterable[str],
    hint: str,
) -> None:
    for name in sorted(names):
        old, new = before.get(name), now.get(name)
        check(old == new, "train", name, f"stay as in the checkpoint ({old})", new, hint)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested dictionaries by dotted name, as JSON has them: lists for tuples."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.loads(json.dumps(value))
    return found
