"""Timed steps of the trainer, the forward pass alone, and communication between GPUs."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from nsa.bench.clock import (
    Timing,
    kernel_sums,
    peak_mib,
    percentiles,
    profiled,
    profiler,
    samples_ms,
    synchronize,
)
from nsa.train.config import TrainConfig
from nsa.train.distributed.processes import Processes
from nsa.train.execution.precision import autocast
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import Row as MetricsRow
from nsa.train.telemetry.throughput import MIB
from nsa.train.trainer import Trainer

TIMING = "steps of the trainer"
PROFILED_STEPS = 3
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of PyTorch's traces


class MeasuredError(Exception):
    """All timed steps are done; stops the run before it writes a checkpoint."""


@dataclass
class Measured:
    """Measurements of one model in one mode; None if not measured.

    Attributes:
        timing: time of a step, or of the forward passes of its tokens.
        seconds: total time of the timed steps by the host's clock, including gaps.
        trace: profile of the profiled steps, on a GPU.
        kernel_us: microseconds per step, by kernel.
        nonfinite: number of steps whose loss or gradient was not finite.
        peak_mib: peak memory of tensors since the start, including weights and optimizer, MiB. The
            memory of a CUDA graph is counted at its capture.
        reserved_mib: peak memory of the allocator, MiB.
        loss_nats: mean loss in the last row of metrics.
    """

    timing: Timing
    seconds: float
    trace: Any = None
    kernel_us: dict[str, float] = field(default_factory=dict)
    nonfinite: int = 0
    peak_mib: float | None = None
    reserved_mib: float | None = None
    loss_nats: float | None = None


class StepClock:
    """Times the steps of a run by its heartbeats: warm-up, profiled steps, then timed steps.

    A step lasts from its first heartbeat to the first one of the next step, so its time includes
    data, forward, backward, optimizer and metrics. On a GPU it is measured with CUDA events; the
    host waits for the device only before the first and after the last timed step.
    """

    def __init__(self, device: torch.device, warmup: int, steps: int) -> None:
        self._device, self._warmup = device, warmup
        self._first = warmup + PROFILED_STEPS
        self._last, self._step, self._begin, self._seconds = self._first + steps, -1, 0.0, 0.0
        self._marks: list[Any] = []  # start of each step
        self._trace: Any = None

    def beat(self, phase: str, step: int, limit_s: float) -> None:
        """Receive a heartbeat of the trainer.

        Raises:
            MeasuredError: the last timed step is done.
        """
        if step <= self._step:
            return
        self._step = step
        cuda = self._device.type == "cuda"
        if step == self._first:
            synchronize(self._device)
            if self._trace is not None:
                self._trace.stop()
            self._begin = time.perf_counter()
        self._marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            self._marks[-1].record()
        if cuda and step == self._warmup:
            synchronize(self._device)
            self._trace = profiler()
            self._trace.start()
        if step == self._last:
            synchronize(self._device)
            self._seconds = time.perf_counter() - self._begin
            raise MeasuredError

    def measured(self, rows: Sequence[MetricsRow]) -> Measured:
        """Summarize the steps and the rows of metrics."""
        cuda, last = self._device.type == "cuda", rows[-1] if rows else {}
        times = [
            start.elapsed_time(end) if cuda else 1000 * (end - start)
            for start, end in pairwise(self._marks)
        ]
        timing = percentiles(times[self._first :], 1, TIMING)
        found = Measured(timing, self._seconds, self._trace)
        found.nonfinite = int(last.get("nonfinite_steps", 0))
        found.loss_nats = float(last["loss_nats"]) if last else None
        if cuda:
            found.peak_mib = torch.cuda.max_memory_allocated(self._device) / MIB
            found.reserved_mib = torch.cuda.max_memory_reserved(self._device) / MIB
            sums = kernel_sums(self._trace)
            found.kernel_us = {name: round(us / PROFILED_STEPS, 2) for name, us in sums.items()}
        return found


def measure_steps(
    config: TrainConfig,
    device: torch.device,
    warmup: int,
    steps: int,
    processes: Processes | None = None,
) -> tuple[Measured, Trainer]:
    """Train in a temporary folder and time the steps.

    Args:
        config: the run, longer than the warm-up, profiled and timed steps.
        device: the device of the trainer.
        warmup: steps before the profiled ones.
        steps: timed steps.
        processes: the processes of the run; None means a single process.

    Returns:
        The measurements, and the trainer after its last step.
    """
    torch.compiler.reset()  # otherwise another length makes shapes dynamic
    cuda, processes = device.type == "cuda", processes or Processes()
    if cuda:
        # The profiler records kernels only of CUDA graphs captured after its first use.
        profiled(lambda: None, device)
        torch.cuda.reset_peak_memory_stats(device)
    clock = StepClock(device, warmup, steps)
    rows = list[MetricsRow]()
    with tempfile.TemporaryDirectory() as own:
        path = Path(processes.all_of(own)[0]) / "run"
        with processes.main_first():
            main = processes.is_main
            run_folder = RunFolder.create(path, config) if main else RunFolder.open(path)
        given: dict[str, Any] = {"on_row": rows.append, "beat": clock.beat, "stops_at_once": True}
        trainer = Trainer(config, run_folder, processes=processes, **given)
        with suppress(MeasuredError):
            trainer.run()
            raise AssertionError("the run ended before all steps were timed")
        processes.wait_for_all()  # before the main process removes the folder
    return clock.measured(rows), trainer


def measure_forward(trainer: Trainer, device: torch.device, calls: int) -> Measured:
    """Time the forward pass and loss of one step's tokens, without recording gradients.

    Peak memory is that of weights and forward pass.

    Args:
        trainer: returned by :func:`measure_steps`.
        device: the device of the run.
        calls: number of timed calls.
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
    kernel_us = profiled(forward, device).get("kernel_us", {})
    peak = peak_mib(forward, device)
    if peak is not None:
        peak += sum(parameter.nbytes for parameter in trainer.model.parameters()) / MIB
    times = samples_ms(forward, device, calls)
    timing = percentiles(times, 1, TIMING)
    return Measured(timing, sum(times) / 1000, kernel_us=kernel_us, peak_mib=peak)


# --- Communication
def communication_ms(trace: Any, processes: Processes) -> dict[str, float]:
    """Row fields of communication: ms per profiled step, mean over the processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        found = communication_us(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    totals = processes.total(*map(round, found))
    names = ("communication_ms", "exposed_ms", "idle_ms")
    each = 1000 * processes.world_size * PROFILED_STEPS
    return {name: total / each for name, total in zip(names, totals, strict=True)}


def communication_us(events: Iterable[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return three durations from the trace of one process, microseconds.

    The time in which an NCCL kernel ran, including waits for slower processes; the part of it in
    which nothing else ran on the GPU; the idle time between the first and the last kernel.

    Args:
        events: ``traceEvents`` of PyTorch's profiler, with ``ts`` and ``dur`` in microseconds.
    """
    found = [
        (float(event["ts"]), float(event["ts"] + event["dur"]), "nccl" in event["name"].lower())
        for event in events
        if event.get("cat") in _ON_DEVICE and event.get("ph", "X") == "X"
    ]
    sent, computed = (_covered(one for one in found if one[2] is sends) for sends in (True, False))
    ran = _covered(found)
    span = max(one[1] for one in found) - min(one[0] for one in found) if found else 0.0
    return sent, ran - computed, span - ran


def _covered(intervals: Iterable[tuple[float, float, bool]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end, _ in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
