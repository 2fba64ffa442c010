"""Readings of a device: peak rate, memory, utilisation, small tensors, and times of steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Info = TypeVar("Info")

# Dense bf16 matrix products with fp32 accumulation, operations a second, from NVIDIA's data sheets
# (without sparsity).
_BF16_PEAKS = (
    ("B200", 2250e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165.2e12),
)
MIB = 2**20
# First steps of a process, in which everything is compiled and captured.
STARTING_STEPS = 5


def peak_flops(device: torch.device, compute_dtype: str) -> float | None:
    """Peak rate of matrix products in operations per second; None if it is unknown.

    Args:
        device: device of the run.
        compute_dtype: ``bf16`` or ``fp32``; the rate is known for ``bf16`` only.
    """
    if device.type != "cuda" or compute_dtype != "bf16":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(gpu: str) -> float | None:
    """Peak rate of bf16 matrix products of a GPU in operations per second; None if unknown."""
    return next((peak for part, peak in _BF16_PEAKS if part in gpu), None)


def memory_row(device: torch.device) -> dict[str, float]:
    """Metrics of the peak GPU memory of the process since its start; empty on a CPU.

    Args:
        device: device of the run; nothing waits for it.
    """
    if device.type != "cuda":
        return {}
    return {
        "memory_allocated_mib": torch.cuda.max_memory_allocated(device) / MIB,
        "memory_reserved_mib": torch.cuda.max_memory_reserved(device) / MIB,
    }


def utilisation_row(device: torch.device) -> dict[str, float]:
    """Metric of the utilisation of a GPU; empty on a CPU and if the driver does not report it.

    The driver reports it through nvidia-ml-py, which a run does not need.

    Args:
        device: device of the run; nothing waits for it.
    """
    if device.type != "cuda" or find_spec("pynvml") is None:
        return {}
    from pynvml import NVMLError

    try:
        return {"gpu_utilisation_percent": float(torch.cuda.utilization(device))}
    # no access to the driver, or a slice of a GPU, for which it reports nothing
    except (RuntimeError, NVMLError):
        return {}


class LateReader(Generic[Info]):
    """A queue of small device tensors that are read some steps after they were computed.

    :meth:`put` starts a copy to the host and returns at once; :meth:`take` waits for that copy
    only, while the device continues with later work.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Info, Tensor, torch.cuda.Event | None]] = deque()

    def put(self, info: Info, values: Tensor) -> None:
        """Queue ``values``, a 1-D tensor, with data of the host."""
        copied = None
        if values.device.type == "cuda":
            host = torch.empty_like(values, device="cpu", pin_memory=True)
            values, device = host.copy_(values, non_blocking=True), values.device
            copied = torch.cuda.current_stream(device).record_event()
        self._waiting.append((info, values, copied))

    def take(self, keep: int) -> list[tuple[Info, list[float]]]:
        """Take all entries except the newest ``keep``, oldest first."""
        taken = []
        while len(self._waiting) > keep:
            info, host, copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
            taken.append((info, host.tolist()))
        return taken


class _HostEvent(float):
    """A time of the host's clock in ms, with the methods of a CUDA event."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: float) -> float:
        return end - self


@dataclass
class _TimedStep:
    """Events of one step.

    Attributes:
        begin: before its first kernel.
        end: after its last kernel.
        until: beginning of the next step; ``end`` if something else happens first.
        host_ms: time that the host took to queue it.
        is_warm: whether it came after the first steps of the process.
    """

    begin: Any
    end: Any
    until: Any
    host_ms: float
    is_warm: bool


class DeviceClock:
    """Times optimizer steps by the clock of the device, without waiting for it.

    Times are measured with stream events on a GPU and with the host's clock on a CPU.

    Args:
        device: device of the run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._waiting: deque[_TimedStep] = deque()
        self._previous: _TimedStep | None = None
        self._num_steps = 0

    @contextmanager
    def step(self, *, pause_follows: bool = False) -> Iterator[None]:
        """Context manager of a step that is queued on the device.

        Args:
            pause_follows: whether something other than a step comes next, for example an
                evaluation, whose time belongs to no step.
        """
        begin, issued = self._now(), _host_ms()
        if self._previous is not None:
            self._previous.until = begin
        yield
        host_ms, end = _host_ms() - issued, self._now()
        step = _TimedStep(begin, end, end, host_ms, self._num_steps >= STARTING_STEPS)
        self._num_steps += 1
        self._previous = None if pause_follows else step
        self._waiting.append(step)

    def row(self) -> dict[str, float]:
        """Metrics of the steps that the device has finished since the last call.

        Returns:
            ``step_time_max_ms`` if a step came after the first ``STARTING_STEPS`` of the process;
            on a GPU also ``gpu_step_time_ms`` and ``host_time_ms``, means over the steps. Empty
            without a step.
        """
        done, found = list[_TimedStep](), {}
        while self._waiting and self._waiting[0].until.query():
            done.append(self._waiting.popleft())
        if warm := [step.begin.elapsed_time(step.until) for step in done if step.is_warm]:
            found["step_time_max_ms"] = max(warm)
        if done and self._on_gpu:
            spans = [step.begin.elapsed_time(step.end) for step in done]
            found["gpu_step_time_ms"] = statistics.fmean(spans)
            found["host_time_ms"] = statistics.fmean(step.host_ms for step in done)
        return found

    def _now(self) -> Any:
        if not self._on_gpu:
            return _HostEvent(_host_ms())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _host_ms() -> float:
    return 1000 * time.perf_counter()
