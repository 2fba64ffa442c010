"""How long something takes, how much memory it needs, and which kernels it runs."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MIN_SAMPLES, MAX_SAMPLES = 7, 50
WARM_UP_CALLS = 3
MIN_SAMPLE_MS = 0.3  # shorter calls are repeated inside one graph, so that a sample is long against its own overhead
MAX_CALLS = 32
_NAME_LENGTH = 120


@dataclass(frozen=True)
class Timing:
    """Times of one call.

    Attributes:
        p50, p20, p80: median and percentiles over the samples, ms a call.
        samples: how many there are.
        calls: calls in a sample, one after the other.
        method: ``cuda graph``, ``launches`` (with the reason why there is no graph) or ``cpu``. Nothing flushes the L2 cache.
    """

    p50: float
    p20: float
    p80: float
    samples: int
    calls: int
    method: str


def percentiles(samples_ms: list[float], calls: int, method: str) -> Timing:
    """Summary of samples of ``calls`` calls each."""
    each = sorted(sample / calls for sample in samples_ms)
    p20, p80 = (each[round(q * (len(each) - 1))] for q in (0.2, 0.8))
    return Timing(statistics.median(each), p20, p80, len(each), calls, method)


def time_call(call: Callable[[], object], device: torch.device, budget_ms: float = 300.0, capture: bool = True) -> Timing:
    """Time ``call``, warmed up, for about ``budget_ms``.

    On a GPU by CUDA events around replays of a CUDA graph, so that no time of the host is in it; where the call cannot be
    captured, around plain launches. Without ``capture`` no graph is tried: it holds memory of its own, and one that runs out of
    it never gives it back.
    """
    if device.type != "cuda":
        return _time_on_host(call, budget_ms)
    for _ in range(WARM_UP_CALLS):
        call()
    once = _events(call, 2)[-1]
    calls = max(1, min(MAX_CALLS, round(MIN_SAMPLE_MS / max(once, 1e-3))))
    samples = max(MIN_SAMPLES, min(MAX_SAMPLES, round(budget_ms / max(once * calls, 1e-3))))
    if not capture:
        return percentiles(_events(call, samples), 1, "launches")
    graph, reason = None, ""
    for _ in range(2):  # the first capture of cuDNN's backward in a process fails, later ones do not
        try:
            graph = _capture(call, calls)
            break
        except RuntimeError as error:  # of the end of the capture, after what made it fail
            reason = str(error.__context__ or error).partition("\n")[0]
        torch.cuda.synchronize()  # outside: the error holds what was captured
    if graph is None:
        return percentiles(_events(call, samples), 1, f"launches: no graph, {reason}")
    replay = graph.replay
    replay()
    timing = percentiles(_events(replay, samples), calls, "cuda graph")
    graph.reset()
    return timing


def _capture(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls; a side stream first, as capture demands of anything that allocates lazily."""
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


def _events(call: Callable[[], object], samples: int) -> list[float]:
    """Milliseconds of each of ``samples`` calls, by CUDA events."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _time_on_host(call: Callable[[], object], budget_ms: float) -> Timing:
    call()
    samples: list[float] = []
    while len(samples) < 3 or (sum(samples) < budget_ms and len(samples) < MAX_SAMPLES):
        begin = time.perf_counter()
        call()
        samples.append(1000 * (time.perf_counter() - begin))
    return percentiles(samples, 1, "cpu")


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Most memory beyond what is there before the call, results and saved tensors included, MiB; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak / 2**20


def kernel_times(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Kernels of one call as the profiler sees them: name, and microseconds of all its launches together; empty on the CPU."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return kernel_sums(trace)


def kernel_sums(trace: Any) -> dict[str, float]:
    """Kernels of what a profiler recorded: name, and microseconds of all launches together."""
    times: dict[str, float] = {}
    for event in trace.events() or ():
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset")):
            name = short_name(event.name)
            times[name] = times.get(name, 0.0) + float(event.time_range.elapsed_us())
    return {name: round(times[name], 2) for name in sorted(times)}


def short_name(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    name = re.sub(r"^void ", "", kernel)
    name = re.split(r"[<(]", name.replace("(anonymous namespace)", "anonymous"), maxsplit=1)[0]
    return name[:_NAME_LENGTH]
