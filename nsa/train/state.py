"""State of a run that a checkpoint stores, and the checks before a run is resumed from one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.errors import check
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import list_checkpoints, load_tensors, read_meta
from nsa.train.config import TrainConfig
from nsa.train.data import Sampler
from nsa.train.optim import ModelOptimizer
from nsa.train.run_folder import RunFolder


@dataclass
class Window:
    """Sums since the last row of metrics; a checkpoint may fall between two rows.

    Attributes:
        steps: optimizer steps.
        loss: summed nats of the steps that were finite.
        targets: targets of the finite steps.
        bytes: bytes of text that the targets spell.
        tokens: input tokens, of all steps.
        seconds: spent in steps.
        data_seconds: the part of ``seconds`` spent waiting for batches.
        grad_norm: sum over the finite steps, before clipping.
        grad_norm_max: largest norm of a finite step, before clipping.
        finite_steps: number of finite steps.
        layers: metrics of the layers in the step that has the row, once they have been read.
        index: summed losses of the layers' indices in the finite steps.
    """

    steps: int = 0
    loss: float = 0.0
    targets: int = 0
    bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    grad_norm: float = 0.0
    grad_norm_max: float = 0.0
    finite_steps: int = 0
    layers: dict[str, float] = field(default_factory=dict)
    index: list[float] = field(default_factory=list)

    def add(
        self, loss: float, targets: int, num_bytes: int, grad_norm: float, *index: float
    ) -> None:
        """Add a finite step."""
        self.index = [a + b for a, b in zip(self.index or [0.0] * len(index), index, strict=True)]
        self.loss += loss
        self.targets += targets
        self.bytes += num_bytes
        self.grad_norm += grad_norm
        self.grad_norm_max = max(self.grad_norm_max, grad_norm)
        self.finite_steps += 1

    @property
    def grad_norm_mean(self) -> float:
        """Mean over the finite steps; NaN when there was none."""
        return self.grad_norm / (self.finite_steps or math.nan)

    @property
    def loss_nats(self) -> float:
        """Mean loss over the targets; NaN when no step was finite."""
        return self.loss / (self.targets or math.nan)

    def index_row(self, layers: Iterable[int]) -> dict[str, float]:
        """Mean loss of the indices over the targets, by layer; empty without an index.

        Args:
            layers: indices of the layers with an index, ascending.
        """
        means = [total / (self.targets or math.nan) for total in self.index]
        each = zip(layers, means, strict=False)  # no means without a loss of the index
        row = {f"index_loss_nats_layer_{layer}": mean for layer, mean in each}
        return {"index_loss_nats": math.fsum(means) / len(means), **row} if means else {}

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits over the bytes that the targets spell; NaN when no step was finite."""
        return self.loss / math.log(2) / (self.bytes or math.nan)


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        step: optimizer steps done, cancelled ones included; the schedule follows it.
        tokens: input tokens seen.
        seconds: wall time of the run, summed over its processes.
        nonfinite_steps: steps whose loss or gradient was not finite.
        nonfinite_streak: consecutive non-finite steps up to the newest one.
        reported_step: step of the newest row of metrics; 0 before the first.
        best_val_bits_per_byte: lowest validation loss so far.
        best_val_step: its step.
        sequence_capacity: sequences that every micro-batch is padded to; 0 without padding.
        window: sums for the next row of metrics.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    nonfinite_steps: int = 0
    nonfinite_streak: int = 0
    reported_step: int = 0
    best_val_bits_per_byte: float | None = None
    best_val_step: int | None = None
    sequence_capacity: int = 0
    window: Window = field(default_factory=Window)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**values, "window": Window(**values["window"])})


def weights(model: LanguageModel) -> dict[str, Tensor]:
    """Live weights of a model by their names in a checkpoint."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


@dataclass
class TrainState:
    """State that a resumed run continues from.

    The learning rate is not part of it: it is a function of the step.

    Attributes:
        model: fp32 master weights.
        optimizer: moments of AdamW and momentum of Muon, with AdamW's step counts.
        sampler: seed and position in the data.
        progress: counters and the sums of the open metrics window.
    """

    model: LanguageModel
    optimizer: ModelOptimizer
    sampler: Sampler
    progress: Progress = field(default_factory=Progress)

    def training_tensors(self) -> dict[str, Tensor]:
        """Live weights and optimizer state, by name."""
        state = self.optimizer.state_tensors().items()
        moments = {f"optimizer.{name}": tensor for name, tensor in state}
        return {**weights(self.model), **moments}

    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Content of a checkpoint: live tensors by name, and everything else as JSON."""
        generators, numbers = rng_state(self._device)
        tensors = {**self.training_tensors(), **generators}
        meta = {
            "step": self.progress.step,
            "progress": asdict(self.progress),
            "sampler": self.sampler.state_dict(),
            "rng": numbers,
        }
        return tensors, meta

    def load(self, path: Path) -> None:
        """Continue exactly where the checkpoint at ``path`` was taken.

        Raises:
            ValueError: the checkpoint is damaged or belongs to another model, optimizer or data.
        """
        meta = read_meta(path)
        generators, _ = rng_state(self._device)
        load_tensors(path, {**self.training_tensors(), **generators})
        self.progress = Progress.from_json(meta["progress"])
        self.sampler.load_state_dict(meta["sampler"])
        set_rng_state(generators, meta["rng"], self._device)

    def load_training_tensors(self, path: Path) -> None:
        """Load weights and optimizer state; counters and position in the data stay."""
        load_tensors(path, self.training_tensors())

    @property
    def _device(self) -> torch.device:
        return self.model.embedding.weight.device


# --- random number generators ---------------------------------------------------------------------
def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch (CPU and CUDA)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of all generators: tensors by name, and a few numbers as JSON types.

    Args:
        device: where the run computes; the CUDA generator is part of the state when it is a GPU.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "rng.python": torch.tensor(words, dtype=torch.int64),
        "rng.numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "rng.torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    numbers = {
        "python_version": version,
        "python_gauss": gauss,
        "numpy_kind": kind,
        "numpy_position": int(position),
        "numpy_has_gauss": int(has_gauss),
        "numpy_cached": float(cached),
        "device": device.type,
    }
    return tensors, numbers


def set_rng_state(
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Restore the generators to a state that :func:`rng_state` returned for this kind of device."""
    words = tuple(tensors["rng.python"].tolist())
    random.setstate((numbers["python_version"], words, numbers["python_gauss"]))
    keys = tensors["rng.numpy"].numpy().astype(np.uint32)
    rest = ("numpy_position", "numpy_has_gauss", "numpy_cached")
    np.random.set_state((numbers["numpy_kind"], keys, *(numbers[name] for name in rest)))
    torch.set_rng_state(tensors["rng.torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


# --- checks before a run is resumed ---------------------------------------------------------------
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
    check(bool(found), "--resume", "name a run with a checkpoint", run_folder.path, hint)
    saved = read_meta(found[-1])
    # A setting that the checkpoint lacks did not exist yet: the run behaved as with its default.
    before = _flat(asdict(TrainConfig())) | _flat(saved["config"])
    now = _flat(asdict(config))
    names = before.keys() | now.keys()
    fixed = (n for n in names if not {n, n.partition(".")[0]} & RESUME_MAY_CHANGE)
    hint = "Only a new run can change it; --init-from starts one with these weights."
    _check_same(before, now, fixed, hint)
    done = int(saved["step"])
    check(config.steps >= done, "steps", f"be at least those done ({done})", config.steps)
    kind, hint = saved["rng"].get("device"), "Another kind would not continue exactly."
    rule = f"be {kind} as in the checkpoint"
    check(kind == device.type, "device", rule, device.type, hint)
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


def _check_same(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    names: Iterable[str],
    hint: str,
) -> None:
    for name in sorted(names):
        old, new = before.get(name), now.get(name)
        check(old == new, name, f"stay as in the checkpoint ({old})", new, hint)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested dictionaries by dotted name, as JSON has them: lists for tuples."""
    found: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(tree)).items():
        is_section, name = isinstance(value, dict), prefix + name
        found |= _flat(value, f"{name}.") if is_section else {name: value}
    return found
