"""One model at one length: steps of the trainer, timed from outside, and the forward pass alone."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.bench.clock import (
    Timing,
    kernel_sums,
    kernel_times,
    peak_mib,
    percentiles,
    profiler,
    samples_ms,
    synchronize,
)
from nsa.train.config import TrainConfig
from nsa.train.data import Batch
from nsa.train.distributed.processes import Processes
from nsa.train.execution.compilation import compilations
from nsa.train.execution.precision import autocast
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import Row as MetricsRow
from nsa.train.telemetry.throughput import MIB, STARTING_STEPS
from nsa.train.trainer import Trainer

TIMING = "steps of the trainer"


class MeasuredError(Exception):
    """All wanted steps are done; leaves the run before it writes a checkpoint."""


@dataclass
class Measured:
    """What was seen of one model in one mode.

    Attributes:
        timing: of a step, or of the forward passes of as many tokens.
        seconds: all timed steps together, by the host's clock, everything between them included.
        trace: what the profiler saw of the profiled steps; None on a CPU, and of forward passes.
        kernel_us: kernels of one step.
        nonfinite: steps whose loss or gradient was not finite.
        peak_mib: most memory in tensors since the run began, weights and optimizer included, MiB;
            None on a CPU. A step that is replayed from a CUDA graph asks the allocator for nothing:
            its memory was counted when it was captured.
        reserved_mib: most that the allocator held since the run began.
        loss_nats: mean over the targets of the last steps for which the run wrote a row of metrics.
        compilations_after_5: graphs compiled by ``torch.compile`` and CUDA graphs captured after
            the fifth step; None where no more were done, and of forward passes.
        slowest_over_median: slowest step after the fifth over the median of the timed ones.
        host_ms_p50: median of what the host needs to issue a step, ms; None on a CPU.
        first_step_s: from the trainer's construction to the end of its first step, seconds.
    """

    timing: Timing
    seconds: float
    trace: Any = None
    kernel_us: dict[str, float] = field(default_factory=dict)
    nonfinite: int = 0
    peak_mib: float | None = None
    reserved_mib: float | None = None
    loss_nats: float | None = None
    compilations_after_5: int | None = None
    slowest_over_median: float | None = None
    host_ms_p50: float | None = None
    first_step_s: float | None = None


class StepClock:
    """Follows a run by its heartbeats: warm-up, steps under the profiler, then timed steps.

    A step begins with the first heartbeat that names it, so a time holds all that happens from one
    step to the next: data, forward, backward, clipping, optimizer, the reading of figures, the row
    of metrics. On a GPU a step's time is between CUDA events there; the host waits for the device
    before the first and after the last timed step, never between.

    Args:
        device: where the run computes.
        warmup: steps before the profiled ones.
        steps: timed steps.
        profiled: steps under the profiler, on a GPU.
    """

    def __init__(self, device: torch.device, warmup: int, steps: int, profiled: int = 1) -> None:
        self.device, self._warmup, self._first = device, warmup, warmup + profiled
        self._last, self._step, self._begin = self._first + steps, -1, 0.0
        self._marks: list[Any] = []  # when each step began
        self._compilations: int | None = None
        self._seconds = 0.0
        self._trace: Any = None

    def beat(self, phase: str, step: int, limit_s: float) -> None:
        """A heartbeat, as the trainer gives it.

        Raises:
            MeasuredError: the last timed step is done.
        """
        if step <= self._step:
            return
        self._step = step
        cuda = self.device.type == "cuda"
        if step == STARTING_STEPS:
            self._compilations = compilations.now.compilations
        if step == self._first:
            synchronize(self.device)
            if self._trace is not None:
                self._trace.stop()
            self._begin = time.perf_counter()
        self._marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            self._marks[-1].record()
        if cuda and step == self._warmup:
            synchronize(self.device)
            self._trace = profiler()
            self._trace.start()
        if step == self._last:
            synchronize(self.device)
            self._seconds = time.perf_counter() - self._begin
            raise MeasuredError

    def measured(self, rows: Sequence[MetricsRow]) -> Measured:
        """What was seen; ``rows`` are the metrics that the run wrote."""
        device, cuda, last = self.device, self.device.type == "cuda", rows[-1] if rows else {}
        times = [
            start.elapsed_time(end) if cuda else 1000 * (end - start)
            for start, end in pairwise(self._marks)
        ]
        profiled = range(self._warmup, self._first)
        later = [t for i, t in enumerate(times) if i >= STARTING_STEPS and i not in profiled]
        timing, compiled = percentiles(times[self._first :], 1, TIMING), None
        if self._compilations is not None:
            compiled = compilations.now.compilations - self._compilations
        return Measured(
            timing,
            self._seconds,
            self._trace,
            {} if self._trace is None else kernel_sums(self._trace),
            nonfinite=int(last.get("nonfinite_steps", 0)),
            peak_mib=torch.cuda.max_memory_allocated(device) / MIB if cuda else None,
            reserved_mib=torch.cuda.max_memory_reserved(device) / MIB if cuda else None,
            loss_nats=float(last["loss_nats"]) if last else None,
            compilations_after_5=compiled,
            slowest_over_median=max(later) / timing.p50 if later else None,
        )


class _TimedTrainer(Trainer):
    """Notes what the host needs to issue each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.host_ms: list[float] = []

    def train_step(self, batches: Sequence[Batch], num_targets: int | None = None) -> Tensor:
        begin = time.perf_counter()
        results = super().train_step(batches, num_targets)
        self.host_ms.append(1000 * (time.perf_counter() - begin))
        return results


def measure_steps(
    config: TrainConfig,
    device: torch.device,
    warmup: int,
    steps: int,
    *,
    processes: Processes | None = None,
    profiled: int = 1,
) -> tuple[Measured, Trainer]:
    """Train in a folder of its own and time the steps.

    Args:
        config: the run; it must be longer than ``warmup + profiled + steps`` steps.
        device: where it computes, as the trainer will choose it.
        warmup: steps before the profiled ones.
        steps: timed steps.
        processes: this process among those of the run, which all come here; None for a run of one.
        profiled: steps under the profiler, before the timed ones.

    Returns:
        What was seen, and the trainer, with the weights where training left them.
    """
    torch.compiler.reset()  # graphs of another length would make this one's shapes dynamic
    cuda, processes = device.type == "cuda", processes or Processes()
    if cuda:
        # The profiler sees kernels of those graphs alone that are made after its first use.
        kernel_times(lambda: None, device)
        torch.cuda.reset_peak_memory_stats(device)
    clock, rows = StepClock(device, warmup, steps, profiled), list[MetricsRow]()
    with _shared_folder(processes) as folder:
        with processes.main_first():
            path, main = folder / "run", processes.is_main
            run_folder = RunFolder.create(path, config) if main else RunFolder.open(path)
        trainer = _TimedTrainer(
            config,
            run_folder,
            processes=processes,
            on_row=rows.append,
            beat=clock.beat,
            stops_at_once=True,
        )
        with suppress(MeasuredError):
            trainer.run()
            raise AssertionError("the run ended before all steps were timed")
    found = clock.measured(rows)
    if cuda:  # on a CPU the host does the work itself
        found.host_ms_p50 = statistics.median(trainer.host_ms[-steps:])
    found.first_step_s = trainer.startup.first_step_s
    return found, trainer


@contextmanager
def _shared_folder(processes: Processes) -> Iterator[Path]:
    """A folder for the processes of one machine, removed when all have left."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(processes.all_of(own)[0])
        processes.wait_for_all()


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
    kernel_us, peak = kernel_times(forward, device), peak_mib(forward, device)
    if peak is not None:
        peak += sum(parameter.nbytes for parameter in trainer.model.parameters()) / MIB
    times = samples_ms(forward, device, calls)
    timing = percentiles(times, 1, TIMING)
    return Measured(timing, sum(times) / 1000, kernel_us=kernel_us, peak_mib=peak)
