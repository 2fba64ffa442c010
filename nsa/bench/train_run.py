"""One model at one length: steps of the trainer itself, timed from outside, and the forward pass alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa.bench.clock import Timing, kernel_sums, kernel_times, peak_mib, percentiles
from nsa.train.config import TrainConfig
from nsa.train.metrics import Row as MetricsRow
from nsa.train.precision import autocast
from nsa.train.run_folder import RunFolder
from nsa.train.throughput import MIB
from nsa.train.trainer import Trainer

TIMING = "steps of the trainer"


class _MeasuredError(Exception):
    """All steps that were wanted are done; leaves the run before it writes a checkpoint that nobody wants."""


@dataclass(frozen=True)
class Measured:
    """What was seen of one model in one mode.

    Attributes:
        timing: of a step, or of the forward passes of as many tokens.
        seconds: all timed steps together, by the host's clock, everything between them included.
        kernel_us: kernels of one step.
        peak_mib: most memory in tensors since the run began, weights and optimizer included, MiB; None on a CPU. A step that is
            replayed from a CUDA graph asks the allocator for nothing: its memory was counted when it was captured.
        reserved_mib: most that the allocator held since the run began.
        loss_nats: mean over the targets of the last steps for which the run wrote a row; None without a row.
        nonfinite: steps whose loss or gradient was not finite.
    """

    timing: Timing
    seconds: float
    kernel_us: dict[str, float] = field(default_factory=dict)
    peak_mib: float | None = None
    reserved_mib: float | None = None
    loss_nats: float | None = None
    nonfinite: int = 0


class StepClock:
    """Follows a run by its signs of life: warm-up, one step under the profiler, then timed steps.

    A step begins with the first sign of life that names it, so a time holds all that happens from one step to the next: data,
    forward, backward, clipping, optimizer, the reading of figures, the row of metrics. On a GPU a step's time is between CUDA
    events there; the host waits for the device before the first and after the last timed step, never between.

    Args:
        device: where the run computes.
        warmup: steps before the profiled one.
        steps: timed steps.
    """

    def __init__(self, device: torch.device, warmup: int, steps: int) -> None:
        self._device, self._first, self._steps = device, warmup + 1, steps
        self._step, self._begin, self._seconds = -1, 0.0, 0.0
        self._marks: list[Any] = []
        self._profile: Any = None
        self.kernel_us: dict[str, float] = {}

    def beat(self, phase: str, step: int, limit_s: float) -> None:
        """A sign of life, as the trainer gives it.

        Raises:
            _MeasuredError: the last timed step is done.
        """
        if step <= self._step:
            return
        self._step = step
        if step == self._first - 1 and self._device.type == "cuda":
            self._start_profile()
        elif step == self._first:
            self._start()
        elif step > self._first:
            self._mark()
        if step == self._first + self._steps:
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            self._seconds = time.perf_counter() - self._begin
            raise _MeasuredError

    def _start_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def _start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if self._profile is not None:
            self._profile.stop()
            self.kernel_us = kernel_sums(self._profile)
            self._profile = None
        self._begin = time.perf_counter()
        self._mark()

    def _mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def measured(self, rows: Sequence[MetricsRow]) -> Measured:
        """What was seen; ``rows`` are the metrics that the run wrote."""
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        cuda = self._device.type == "cuda"
        times = [start.elapsed_time(end) if cuda else 1000 * (end - start) for start, end in pairs]
        last = rows[-1] if rows else {}
        return Measured(
            percentiles(times, 1, TIMING), self._seconds, self.kernel_us,
            torch.cuda.max_memory_allocated(self._device) / MIB if cuda else None,
            torch.cuda.max_memory_reserved(self._device) / MIB if cuda else None,
            float(last["loss_nats"]) if last else None, int(last.get("nonfinite_steps", 0)),
        )  # fmt: skip


def measure_steps(config: TrainConfig, device: torch.device, warmup: int, steps: int) -> tuple[Measured, Trainer]:
    """Train in a folder of its own and time the steps.

    Args:
        config: the run; it must be longer than ``warmup + steps + 2`` steps.
        device: where it computes, as the trainer will choose it.
        warmup: steps before anything is looked at.
        steps: timed steps.

    Returns:
        What was seen, and the trainer, with the weights where training left them.
    """
    torch.compiler.reset()  # what was compiled for another length would make this one's shapes dynamic
    if device.type == "cuda":
        kernel_times(lambda: None, device)  # the profiler sees kernels of those graphs alone that are made after its first use
        torch.cuda.reset_peak_memory_stats(device)
    clock, rows = StepClock(device, warmup, steps), list[MetricsRow]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder.create(Path(folder) / "run", config), on_row=rows.append, beat=clock.beat)
        try:
            trainer.run()
        except _MeasuredError:
            return clock.measured(rows), trainer
    raise AssertionError("the run ended before all steps were timed")


def measure_forward(trainer: Trainer, device: torch.device, calls: int) -> Measured:
    """Time the forward pass and loss of one step's tokens, without recording gradients.

    Peak memory is that of weights and forward pass, without what only training holds.

    Args:
        trainer: as :func:`measure_steps` left it.
        device: where it computes.
        calls: timed calls.
    """
    config = trainer.config
    batches = [batch.to(device) for batch in trainer.next_batches()]
    trainer.state.optimizer.zero_grad()

    @torch.no_grad()
    def forward() -> None:
        with autocast(device, config.compute_dtype):
            for batch in batches:
                trainer.loss(batch.tokens, batch.targets, batch.cu_seqlens, batch.max_seqlen)

    for _ in range(3):
        forward()
    kernel_us = kernel_times(forward, device)
    above = peak_mib(forward, device)
    clock = StepClock(device, -1, calls)
    with suppress(_MeasuredError):
        for number in range(calls + 1):
            clock.beat("forward", number, 0)
            forward()
    found = clock.measured([])
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters()) / MIB
    return Measured(found.timing, found.seconds, kernel_us, None if above is None else above + weights)
