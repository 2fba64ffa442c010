"""Everything that a resumed run continues from, in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.errors import UserError, check, fail
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import load_tensors, read_meta
from nsa.train.data import Sampler
from nsa.train.optim import ModelOptimizer
from nsa.train.rng import rng_state, set_rng_state


@dataclass
class Window:
    """Sums since the last row of metrics; a checkpoint may fall between two rows.

    Attributes:
        steps: optimizer steps.
        loss: summed nats of the steps that were finite.
        targets: their targets.
        bytes: text that their targets spell.
        tokens: input tokens, of all steps.
        seconds: spent in steps.
        data_seconds: of these, spent waiting for batches.
        grad_norm: sum over the finite steps, before clipping.
        grad_norm_max: the largest of these.
        finite_steps: how many they are.
        layers: metrics of the layers in the step that has the row, once they have been read.
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

    def add(self, loss: float, targets: int, num_bytes: int, grad_norm: float) -> None:
        """Count the figures of a step that was finite."""
        self.loss += loss
        self.targets += targets
        self.bytes += num_bytes
        self.grad_norm += grad_norm
        self.grad_norm_max = max(self.grad_norm_max, grad_norm)
        self.finite_steps += 1

    @property
    def grad_norm_mean(self) -> float:
        """Mean over the finite steps; NaN when there was none."""
        return self.grad_norm / self.finite_steps if self.finite_steps else math.nan

    @property
    def loss_nats(self) -> float:
        """Mean loss over the targets; NaN when no step was finite."""
        return self.loss / self.targets if self.targets else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits over the bytes that the targets spell; NaN when no step was finite."""
        return self.loss / math.log(2) / self.bytes if self.bytes else math.nan


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: optimizer steps done, cancelled ones included; the schedule follows it.
        tokens: input tokens seen.
        seconds: wall time of the run, summed over its processes.
        nonfinite_steps: steps whose loss or gradient was not finite.
        nonfinite_streak: how many of them came last, without a finite one between.
        reported_step: step of the newest row of metrics; 0 before the first.
        best_val_bits_per_byte: lowest validation loss so far.
        best_val_step: its step.
        sequence_capacity: sequences that every micro-batch is padded to; 0 where they are not
            padded.
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
        """Inverse of ``dataclasses.asdict``.

        Raises:
            UserError: these are no such values.
        """
        try:
            window = dict(values["window"].items())
            if "finite_steps" not in window:  # of nsa 0.1.0: the norm of the newest step alone
                window |= {"grad_norm": 0.0}
            progress = cls(**{**values, "window": Window(**window)})
        except (KeyError, TypeError, ValueError, AttributeError):
            fail(
                "checkpoint",
                "the checkpoint's progress",
                "hold the counters of a run",
                str(values)[:80],
            )
        for name, value in (*vars(progress).items(), *vars(progress.window).items()):
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            fits |= name in ("window", "layers") or (value is None and name.startswith("best_"))
            check(
                fits, "checkpoint", f"the checkpoint's progress.{name}", "be a number", repr(value)
            )
        return progress


def weights(model: LanguageModel) -> dict[str, Tensor]:
    """Live weights of a model by their names in a checkpoint."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


@dataclass
class TrainState:
    """What resumes: weights, moments, counters, place in the data, random generators.

    The learning rate needs no entry, being a function of the step.

    Attributes:
        model: fp32 master weights.
        optimizer: moments of AdamW and momentum of Muon, with AdamW's step counts.
        sampler: seed and position of the data order.
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
        """What a checkpoint holds: live tensors by name, and everything else as JSON."""
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
        try:
            self.sampler.load_state_dict(meta["sampler"])
            set_rng_state(generators, meta["rng"], self._device)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as error:
            rule = "say where the data and the random generators were"
            fail("checkpoint", "meta.json", rule, f"{path} ({error!r})")

    def load_training_tensors(self, path: Path) -> None:
        """Take back weights and optimizer state; counters and place in the data stay."""
        load_tensors(path, self.training_tensors())

    @property
    def _device(self) -> torch.device:
        return self.model.embedding.weight.device
