"""Measurement of a call: correctness first, then time, kernels and memory."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

BUDGET_MS = 300.0
MIN_SAMPLES, MAX_SAMPLES = 7, 50
WARM_UP_CALLS = 3
# Shorter calls are repeated within one graph, so that its overhead is small.
MIN_SAMPLE_MS = 0.3
MAX_CALLS = 32
_NAME_LENGTH = 120


@dataclass(frozen=True)
class Timing:
    """Times of one call.

    Attributes:
        p50, p20, p80, mean: median, percentiles and mean of the samples, ms per call.
        samples: number of samples.
        method: ``cuda graph``, ``launches`` (with the reason if there is no graph) or ``cpu``. The
            L2 cache is not flushed.
    """

    p50: float
    p20: float
    p80: float
    mean: float
    samples: int
    method: str

    def fields(self) -> dict[str, Any]:
        """Return the fields of a row."""
        times = {f"ms_{name}": getattr(self, name) for name in ("p50", "p20", "p80")}
        return {**times, "timing": self.method, "samples": self.samples}


def percentiles(samples_ms: Sequence[float], calls: int, method: str) -> Timing:
    """Summarize samples of ``calls`` calls each."""
    each = sorted(sample / calls for sample in samples_ms)
    p20, p80 = (each[round(q * (len(each) - 1))] for q in (0.2, 0.8))
    mean = statistics.fmean(each)
    return Timing(statistics.median(each), p20, p80, mean, len(each), method)


def time_call(
    call: Callable[[], object],
    device: torch.device,
    budget_ms: float | None = None,
    capture: bool = True,
) -> Timing:
    """Time ``call`` after warm-up for about ``budget_ms`` (default ``BUDGET_MS``).

    On a GPU, CUDA events around replays of a CUDA graph exclude the host's time; a call that cannot
    be captured is launched directly. ``capture=False`` disables graphs: a graph has its own memory,
    which is never freed after an out-of-memory error.
    """
    budget_ms = BUDGET_MS if budget_ms is None else budget_ms
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
    for _ in range(2):  # the first capture of cuDNN's backward in a process fails
        try:
            graph = _capture(call, calls)
            break
        except RuntimeError as error:  # raised at the end of the capture, after its cause
            reason = str(error.__context__ or error).partition("\n")[0]
        synchronize(device)  # outside the handler: the error refers to the captured tensors
    if graph is None:
        times = samples_ms(call, device, samples)
        return percentiles(times, 1, f"launches: no graph, {reason}")
    graph.replay()
    timing = percentiles(samples_ms(graph.replay, device, samples), calls, "cuda graph")
    graph.reset()
    return timing


def _capture(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Capture ``calls`` calls; a call on a side stream first makes all lazy allocations."""
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
    """Time ``count`` calls, ms each: with CUDA events, or on a CPU with the clock."""
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
    """Wait for a GPU; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Free cached memory for the next measurement or its CUDA graph."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Peak memory of a call and its results above the memory before it; None on a CPU."""
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
    """Return PyTorch's profiler of GPU activity."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA])


def profiled(call: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Row fields of the kernels, copies and fills of a warmed-up call; empty on a CPU."""
    if device.type != "cuda":
        return {}
    call()
    synchronize(device)
    with profiler() as trace:
        call()
        synchronize(device)
    events = gpu_events(trace)
    kernel_us = kernel_sums(trace)
    gpu_ms = sum(float(event.time_range.elapsed_us()) for event in events) / 1000
    found = {"launches": len(events), "gpu_ms": gpu_ms}
    return {**found, "kernel_us": kernel_us, "kernels": [*kernel_us]}


def gpu_events(trace: Any) -> list[Any]:
    """Kernels, copies and fills in a profile."""
    return [event for event in trace.events() or () if event.device_type.name == "CUDA"]


def kernel_sums(trace: Any) -> dict[str, float]:
    """Total microseconds of each kernel in a profile."""
    times: dict[str, float] = {}
    for event in gpu_events(trace):
        if not event.name.startswith(("Memcpy", "Memset")):
            name = short_name(event.name)
            times[name] = times.get(name, 0.0) + float(event.time_range.elapsed_us())
    return {name: round(times[name], 2) for name in sorted(times)}


def short_name(kernel: str) -> str:
    """Strip return type, template arguments and parameters from a kernel's name."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)", "anonymous")
    return re.split(r"[<(]", name, maxsplit=1)[0][:_NAME_LENGTH]


# --- A measurement
class UnsupportedError(RuntimeError):
    """A provider cannot compute a case on this machine; the message is the reason."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a correctness gate.

    Attributes:
        correct: None if nothing ran.
        errors: ``||x - oracle|| / ||oracle||`` over the compared rows, by result.
        note: the error, or the reason why nothing ran.
    """

    correct: bool | None
    errors: dict[str, float]
    note: str | None = None


def judge(compare: Callable[[dict[str, float]], None]) -> Verdict:
    """Run a comparison that adds errors to a dict and raises AssertionError at a large one."""
    errors, note = dict[str, float](), None
    try:
        compare(errors)
    except AssertionError as error:
        note = str(error)
    rounded = {name: float(f"{error:.3g}") for name, error in errors.items()}
    return Verdict(note is None, rounded, note)


@dataclass(frozen=True)
class Subject:
    """A call to be measured.

    Attributes:
        call: the call.
        check: compares its result with fp64.
        fault: returns the reason why the profiled kernels are not the provider's, or None.
        work: useful ``flops``, moved ``bytes``, counted bytes ``read``, or ``tokens`` per call.
        time: times the call; None means :func:`time_call`.
        capture: see :func:`time_call`.
        extra: additional fields of the row.
    """

    call: Callable[[], Any]
    check: Callable[[], Verdict]
    fault: Callable[[Sequence[str]], str | None] = lambda kernels: None
    work: Callable[[], dict[str, int]] = dict
    time: Callable[[], Timing] | None = None
    capture: bool = True
    extra: Callable[[], dict[str, Any]] = dict


def measure(
    make: Callable[[], Subject], device: torch.device, *, is_ours: bool = True
) -> dict[str, Any]:
    """Return the fields of a row: the gate, then time, kernels and memory of the same call.

    Args:
        make: prepares the call.
        device: the measured device.
        is_ours: whether an error is a bug and is raised again, instead of recorded in the row.
    """
    release_memory(device)
    try:
        subject = make()
        found = asdict(subject.check())
        if not found["correct"]:
            return found
        timing = (
            subject.time or (lambda: time_call(subject.call, device, None, subject.capture))
        )()
        found |= profiled(subject.call, device)
        fault = subject.fault(found["kernels"]) if judges_kernels(device) else None
        if fault is not None:
            return {**found, "correct": False, "note": fault}
        found["peak_mib"] = peak_mib(subject.call, device)
        return {
            **found,
            **timing.fields(),
            **_rates(subject.work(), timing, device),
            **subject.extra(),
        }
    except refusals() as error:
        if isinstance(error, torch.OutOfMemoryError):
            return not_run("out of GPU memory")
        if is_ours and not isinstance(error, UnsupportedError):
            raise
        return not_run((str(error).splitlines() or [type(error).__name__])[0])


def _rates(work: dict[str, int], timing: Timing, device: torch.device) -> dict[str, Any]:
    """Row fields for the work per second."""
    found: dict[str, Any] = {}
    if "flops" in work:
        found["tflops_useful"] = work["flops"] / timing.p50 / 1e9
    if "bytes" in work or "read" in work:
        found["tbps_useful"] = work.get("bytes", work.get("read", 0)) / timing.p50 / 1e9
    if "read" in work:
        copied = copy_tbps(device)
        found |= {"mib_read": work["read"] / 2**20, "of_copy": found["tbps_useful"] / copied}
        found["settings"] = {"copy_tbps": round(copied, 3)}
    if "tokens" in work:
        found["tokens_per_s"] = 1000 * work["tokens"] / timing.mean
    return found


@cache
def copy_tbps(device: torch.device) -> float:
    """Bandwidth of copying a large tensor, bytes read and written, TB/s."""
    size = 2**30 if device.type == "cuda" else 2**24
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / time_call(lambda: target.copy_(source), device, 100.0).p50 / 1e9


def refusals() -> tuple[type[Exception], ...]:
    """Exceptions if a computation cannot run here, including those of Triton's compiler."""
    from triton.errors import TritonError

    return RuntimeError, TritonError


def not_run(reason: str) -> dict[str, Any]:
    """Fields of a row without a time, with the reason."""
    return asdict(Verdict(None, {}, f"not run: {reason}"))


def judges_kernels(device: torch.device) -> bool:
    """Whether the profiler records kernels, as it does on a GPU."""
    return device.type == "cuda"
