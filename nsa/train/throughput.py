"""How well a device is used: peak arithmetic rate and memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

# Dense bf16 matrix products with fp32 accumulation, operations a second, from NVIDIA's data sheets (without sparsity).
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


def peak_flops(device: torch.device, compute_dtype: str) -> float | None:
    """Peak rate of matrix products in operations a second, or None where it is not known.

    Args:
        device: where the run computes.
        compute_dtype: ``bf16`` or ``fp32``; known for ``bf16`` alone.
    """
    if device.type != "cuda" or compute_dtype != "bf16":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(gpu: str) -> float | None:
    """Peak rate of bf16 matrix products of the GPU of this name, operations a second; None where it is not known."""
    return next((peak for part, peak in _BF16_PEAKS if part in gpu), None)


def memory_row(device: torch.device) -> dict[str, float]:
    """Peak GPU memory of the process since its start, by the names of the metrics; empty on a CPU.

    Args:
        device: where the run computes; nothing waits for it.
    """
    if device.type != "cuda":
        return {}
    return {
        "memory_allocated_mib": torch.cuda.max_memory_allocated(device) / MIB,
        "memory_reserved_mib": torch.cuda.max_memory_reserved(device) / MIB,
    }


def utilisation_row(device: torch.device) -> dict[str, float]:
    """How busy the driver reports a GPU to be, by the name of the metric; empty on a CPU and where it cannot be asked.

    NVML, the driver's library, answers through nvidia-ml-py. A run does without it; ``nsa doctor`` says whether it answers.

    Args:
        device: where the run computes; nothing waits for it.
    """
    if device.type != "cuda" or find_spec("pynvml") is None:
        return {}
    from pynvml import NVMLError

    try:
        return {"gpu_utilisation_percent": float(torch.cuda.utilization(device))}
    except (RuntimeError, NVMLError):  # no access to the driver, or a slice of a GPU, for which it keeps no figure
        return {}


class DeviceClock:
    """Measures a step on a GPU, from its first kernel to its last, and on the host; nothing waits.

    Args:
        device: where the run computes; on a CPU nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._host_ms: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around what a step queues on the device."""
        if self._device.type != "cuda":
            yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        issued = time.perf_counter()
        begin.record()
        yield
        end.record()
        self._host_ms.append(1000 * (time.perf_counter() - issued))
        self._waiting.append((begin, end))

    def row(self) -> dict[str, float]:
        """Means since the last call, by the names of the metrics; empty without a GPU.

        The device's is of the steps that it is done with.
        """
        times, host_ms = [], self._host_ms
        self._host_ms = []
        while self._waiting and self._waiting[0][1].query():
            begin, end = self._waiting.popleft()
            times.append(begin.elapsed_time(end))
        row = {"gpu_step_time_ms": sum(times) / len(times)} if times else {}
        return {**row, "host_time_ms": sum(host_ms) / len(host_ms)} if host_ms else row
