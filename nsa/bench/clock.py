"""How long a call takes, how much memory it needs, and which kernels it runs."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

MIN_SAMPLES, MAX_SAMPLES = 7, 50
WARM_UP_CALLS = 3
# Shorter calls are repeated within one graph, so that a sample is long compared with its overhead.
MIN_SAMPLE_MS = 0.3
MAX_CALLS = 32
_NAME_LENGTH = 120


@dataclass(frozen=True)
class Timing:
    """Times of one call.

    Attributes:
        p50, p20, p80: median and percentiles over the samples, ms a call.
        samples: how many there are.
        method: ``cuda graph``, ``launches`` (with the reason why there is no graph) or ``cpu``.
            Nothing flushes the L2 cache.
    """

    p50: float
    p20: float
    p80: float
    samples: int
    method: str

    def fields(self) -> dict[str, Any]:
        """What a row says of it."""
        times = {f"ms_{name}": getattr(self, name) for name in ("p50", "p20", "p80")}
        return {**times, "timing": self.method, "samples": self.samples}


def percentiles(samples_ms: Sequence[float], calls: int, method: str) -> Timing:
    """Summary of samples of ``calls`` calls each."""
    each = sorted(sample / calls for sample in samples_ms)
    p20, p80 = (each[round(q * (len(each) - 1))] for q in (0.2, 0.8))
    return Timing(statistics.median(each), p20, p80, len(each), method)


def time_call(
    call: Callable[[], object],
    device: torch.device,
    budget_ms: float = 300.0,
    capture: bool = True,
) -> Timing:
    """Time ``call``, warmed up, for about ``budget_ms``.

    On a GPU between CUDA events before and after replays of a CUDA graph, so that it holds no time
    of the host; where the call cannot be captured, plain launches. Without ``capture`` no graph is
    tried: a graph holds memory of its own, and one that runs out of memory never gives it back.
    """
    if device.type != "cuda":
        once = samples_ms(call, device, 2)[-1]
        count = max(3, min(MAX_SAMPLES, round(budget_ms / max(once, 1e-3))))
        return percentiles(samples_ms(call, device, count), 1, "cpu")
    for _ in range(WARM_UP_CALLS):
        call()
    once = samples_ms(call, device, 2)[-1]
    calls = max(1, min(MAX_CALLS, round(MIN_SAMPLE_MS / max(once, 1e-3))))
    samples = max(MIN_SAMPLES, min(MAX_SAMPLES, round(budget_ms / max(once * calls, 1e-3))))
    if not capture:
        return percentiles(samples_ms(call, device, samples), 1, "launches")
    graph, reason = None, ""
    for _ in range(2):  # the first capture of cuDNN's backward in a process fails, later ones work
        try:
            graph = _capture(call, calls)
            break
        except RuntimeError as error:  # of the end of the capture, after what made it fail
            reason = str(error.__context__ or error).partition("\n")[0]
        synchronize(device)  # outside: the error holds what was captured
    if graph is None:
        times = samples_ms(call, device, samples)
        return percentiles(times, 1, f"launches: no graph, {reason}")
    graph.replay()
    timing = percentiles(samples_ms(graph.replay, device, samples), calls, "cuda graph")
    graph.reset()
    return timing


def _capture(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls; a call on a side stream first allocates what is made lazily."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def samples_ms(call: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Milliseconds of each of ``count`` calls: between CUDA events, or on a CPU by the clock."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            call()
            marks.append(time.perf_counter())
        return [1000 * (end - start) for start, end in pairwise(marks)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give back what the allocator keeps, for the next measurement or its CUDA graph."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Most memory above what is there before the call, its results included; None on a CPU."""
    if device.type != "cuda":
        return None
    release_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak / 2**20


def profiler() -> Any:
    """PyTorch's profiler of what runs on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA])


def profiled(call: Callable[[], object], device: torch.device) -> Any:
    """What the profiler sees of a call on a GPU."""
    synchronize(device)
    with profiler() as trace:
        call()
        synchronize(device)
    return trace


def gpu_events(trace: Any) -> list[Any]:
    """Kernels, copies and fills that a profiler recorded."""
    return [event for event in trace.events() or () if event.device_type.name == "CUDA"]


def kernel_times(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Kernels of one call: name, and microseconds of all its launches; empty on a CPU."""
    if device.type != "cuda":
        return {}
    call()
    return kernel_sums(profiled(call, device))


def kernel_sums(trace: Any) -> dict[str, float]:
    """Kernels that a profiler recorded: name, and microseconds of all launches together."""
    times: dict[str, float] = {}
    for event in gpu_events(trace):
        if not event.name.startswith(("Memcpy", "Memset")):
            name = short_name(event.name)
            times[name] = times.get(name, 0.0) + float(event.time_range.elapsed_us())
    return {name: round(times[name], 2) for name in sorted(times)}


def short_name(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)", "anonymous")
    return re.split(r"[<(]", name, maxsplit=1)[0][:_NAME_LENGTH]
