"""Measurement of a call: correctness first, then time, kernels and memory."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

BUDGET_MS = 300.0
MIN_SAMPLES, MAX_SAMPLES = 7, 50
WARM_UP_CALLS = 3
# Shorter calls are repeated within one graph, so that its overhead is small.
MIN_SAMPLE_MS = 0.3
MAX_CALLS = 32
_NAME_LENGTH = 120

Fields = dict[str, Any]  # fields of a row


class Timing(NamedTuple):
    """Times of one call.

    Attributes:
        ms_p50, ms_p20, ms_p80: median and percentiles of the samples, ms per call.
        samples: number of samples.
        timing: ``cuda graph``, ``launches`` (with the reason if there is no graph) or ``cpu``. The
            L2 cache is not flushed.
    """

    ms_p50: float
    ms_p20: float
    ms_p80: float
    samples: int
    timing: str


def percentiles(samples_ms: Sequence[float], calls: int, method: str) -> Timing:
    """Summarize samples of ``calls`` calls each."""
    each = sorted(sample / calls for sample in samples_ms)
    p20, p80 = (each[round(q * (len(each) - 1))] for q in (0.2, 0.8))
    return Timing(statistics.median(each), p20, p80, len(each), method)


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
    budget_ms, on_gpu = BUDGET_MS if budget_ms is None else budget_ms, device.type == "cuda"
    for _ in range(WARM_UP_CALLS if on_gpu else 0):
        call()
    once = max(samples_ms(call, device, 2)[-1], 1e-3)
    calls = max(1, min(MAX_CALLS, round(MIN_SAMPLE_MS / once))) if on_gpu else 1
    fewest = MIN_SAMPLES if on_gpu else 3
    samples = max(fewest, min(MAX_SAMPLES, round(budget_ms / (once * calls))))
    method = "launches" if on_gpu else "cpu"
    # The first capture of cuDNN's backward pass in a process fails.
    for _ in range(2 if on_gpu and capture else 0):
        try:
            graph = _capture(call, calls)
        except RuntimeError as error:  # raised at the end of the capture, after its cause
            cause = str(error.__context__ or error).partition("\n")[0]
            method = f"launches: no graph, {cause}"
        else:
            graph.replay()
            timing = percentiles(samples_ms(graph.replay, device, samples), calls, "cuda graph")
            graph.reset()
            return timing
        synchronize(device)  # outside the handler: the error refers to the captured tensors
    return percentiles(samples_ms(call, device, samples), 1, method)


def _capture(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Capture ``calls`` calls; a call on another stream first makes all lazy allocations."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def samples_ms(call: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Time ``count`` calls, ms each: with CUDA events, or on a CPU with the clock."""
    marks = [time_mark(device)]
    for _ in range(count):
        call()
        marks.append(time_mark(device))
    return elapsed_ms(marks, device)


def time_mark(device: torch.device) -> Any:
    """Return the time as a recorded CUDA event, or on a CPU in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(marks: Sequence[Any], device: torch.device) -> list[float]:
    """Milliseconds between consecutive time marks; waits for a GPU."""
    synchronize(device)
    on_gpu = device.type == "cuda"
    return [a.elapsed_time(b) if on_gpu else 1000 * (b - a) for a, b in pairwise(marks)]


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


def profiled(call: Callable[[], object], device: torch.device) -> Fields:
    """Row fields of the kernels, copies and fills of a warmed-up call; empty on a CPU."""
    if device.type != "cuda":
        return {}
    call()
    synchronize(device)
    with profiler() as trace:
        call()
        synchronize(device)
    return {"launches": len(gpu_events(trace)), **kernel_fields(trace)}


def gpu_events(trace: Any) -> list[Any]:
    """Kernels, copies and fills in a profile."""
    return [event for event in trace.events() or () if event.device_type.name == "CUDA"]


def kernel_fields(trace: Any, calls: int = 1) -> Fields:
    """Row fields of the kernels in a profile of ``calls`` calls: names, and microseconds a call."""
    times: dict[str, float] = {}
    for event in gpu_events(trace):
        if not event.name.startswith(("Memcpy", "Memset")):
            name = short_name(event.name)
            times[name] = times.get(name, 0.0) + float(event.time_range.elapsed_us())
    kernel_us = {name: round(times[name] / calls, 2) for name in sorted(times)}
    return {"kernel_us": kernel_us, "kernels": [*kernel_us]}


def short_name(kernel: str) -> str:
    """Strip return type, template arguments and parameters from a kernel's name."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)", "anonymous")
    return re.split(r"[<(]", name, maxsplit=1)[0][:_NAME_LENGTH]


# --- A measurement
class UnsupportedError(RuntimeError):
    """A provider cannot compute a case on this machine; the message is the reason."""


def verdict(
    correct: bool | None, errors: dict[str, float] | None = None, note: str | None = None
) -> Fields:
    """Return the fields of a row about correctness.

    Args:
        correct: None if nothing ran.
        errors: ``||x - oracle|| / ||oracle||`` over the compared rows, by result.
        note: the error, or the reason why nothing ran.
    """
    rounded = {name: float(f"{error:.3g}") for name, error in (errors or {}).items()}
    return {"correct": correct, "errors": rounded, "note": note}


def judge(compare: Callable[[], dict[str, float]]) -> Fields:
    """Run a comparison that returns errors by result, or raises AssertionError at a large one."""
    try:
        return verdict(True, compare())
    except AssertionError as error:
        return verdict(False, note=str(error))


def not_run(reason: str) -> Fields:
    """Fields of a row without a time, with the reason."""
    return verdict(None, note=f"not run: {reason}")


@dataclass(frozen=True)
class Subject:
    """A call to be measured.

    Attributes:
        call: the call.
        check: compares its result with fp64 and returns a :func:`verdict`.
        fault: returns the reason why the profiled kernels are not the provider's, or None.
        work: useful ``flops``, moved ``bytes``, counted bytes ``read``, or ``tokens`` per call.
        time: times the call; None means :func:`time_call`.
        capture: see :func:`time_call`.
        extra: additional fields of the row.
    """

    call: Callable[[], Any]
    check: Callable[[], Fields]
    fault: Callable[[Sequence[str]], str | None] = lambda kernels: None
    work: Callable[[], dict[str, int]] = dict
    time: Callable[[], Timing] | None = None
    capture: bool = True
    extra: Callable[[], Fields] = dict


def measure(make: Callable[[], Subject], device: torch.device, *, is_ours: bool = True) -> Fields:
    """Return the fields of a row: the gate, then time, kernels and memory of the same call.

    Args:
        make: prepares the call.
        device: the measured device.
        is_ours: whether an error is a bug and is raised again, instead of recorded in the row.
    """
    release_memory(device)
    try:
        subject = make()
        found = subject.check()
        if not found["correct"]:
            return found
        usual = partial(time_call, subject.call, device, None, subject.capture)
        timing = (subject.time or usual)()
        found = {**found, **profiled(subject.call, device)}
        fault = subject.fault(found["kernels"]) if "kernels" in found else None
        if fault is not None:
            return {**found, "correct": False, "note": fault}
        found["peak_mib"] = peak_mib(subject.call, device)
        rates = _rates(subject.work(), timing.ms_p50)
        return {**found, **timing._asdict(), **rates, **subject.extra()}
    except refusals() as error:
        if isinstance(error, torch.OutOfMemoryError):
            return not_run("out of GPU memory")
        if is_ours and not isinstance(error, UnsupportedError):
            raise
        return not_run((str(error).splitlines() or [type(error).__name__])[0])


def _rates(work: dict[str, int], ms: float) -> Fields:
    """Row fields for the work of a call per second."""
    found: Fields = {}
    if "flops" in work:
        found["tflops_useful"] = work["flops"] / ms / 1e9
    if "bytes" in work:
        found["tbps_useful"] = work["bytes"] / ms / 1e9
    if "read" in work:
        found |= {"mib_read": work["read"] / 2**20, "tbps_useful": work["read"] / ms / 1e9}
    if "tokens" in work:
        found["tokens_per_s"] = 1000 * work["tokens"] / ms
    return found


def refusals() -> tuple[type[Exception], ...]:
    """Exceptions if a computation cannot run here, including those of Triton's compiler."""
    from triton.errors import TritonError

    return RuntimeError, TritonError
