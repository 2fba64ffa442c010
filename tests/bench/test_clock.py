"""Percentiles, names of kernels, and how a GPU is timed; the test plays the GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from nsa.bench import clock
from nsa.bench.clock import peak_mib, percentiles, profiled, time_call

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_percentiles_are_of_one_call():
    samples = [float(sample) for sample in (50, 10, 30, 20, 40, 60, 70, 80, 100, 90, 110)]
    timing = percentiles(samples, 10, "cuda graph")
    assert timing == (6.0, 3.0, 9.0, 11, "cuda graph")


def test_the_cpu_is_timed_by_the_clock():
    calls = []
    timing = time_call(lambda: calls.append(1), CPU, budget_ms=0.0)
    assert (timing.timing, timing.samples, len(calls)) == ("cpu", 3, 5)  # two to warm up
    assert 0 <= timing.ms_p20 <= timing.ms_p50 <= timing.ms_p80 < 100
    assert peak_mib(lambda: None, CPU) is None
    assert profiled(lambda: None, CPU) == {}


REFUSED = RuntimeError("operation not permitted when stream is capturing\nmore")
LAUNCHES = "launches: no graph, operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("ms", "refused", "method", "calls", "samples"),
    [
        (0.01, [], "cuda graph", 30, 50),
        (0.15, [REFUSED], "cuda graph", 2, 50),  # the second attempt counts
        (20.0, [], "cuda graph", 1, 15),
        (1000.0, [], "cuda graph", 1, 7),
        (0.01, [REFUSED, REFUSED], LAUNCHES, 0, 50),
    ],
)
def test_a_gpu_is_timed_by_replays_of_a_graph(
    ms,
    refused,
    method,
    calls,
    samples,
    monkeypatch,
):
    """A call gives its time."""
    errors, asked = iter(refused), list[int]()

    def capture(call, calls):
        if error := next(errors, None):
            raise error
        asked.append(calls)
        return SimpleNamespace(replay=lambda: calls * ms, reset=lambda: None)

    monkeypatch.setattr(clock, "_capture", capture)
    monkeypatch.setattr(clock, "samples_ms", lambda call, _, count: [call() for _ in range(count)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    timing = time_call(lambda: ms, CUDA)
    assert (timing.timing, timing.samples, asked[-1:]) == (method, samples, [calls] * bool(calls))
    assert timing.ms_p50 == pytest.approx(ms)


def test_kernels_are_what_the_profiler_saw_on_the_gpu(monkeypatch):
    def event(name, us, kind="CUDA"):
        time = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind), time_range=time)

    void = "void (anonymous namespace)::b_kernel"
    events = [event(f"{void}<4>(int)", 2.0), event(f"{void}<8>(int)", 3.0)]
    events += [event("a_kernel", 1.0), event("cudaLaunchKernel", 9.0, "CPU")]
    events += [event("Memcpy DtoD", 9.0), event("Memset (Device)", 9.0)]
    trace = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: trace)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    calls: list[int] = []
    kernel_us = {"a_kernel": 1.0, "anonymous::b_kernel": 5.0}
    seen = {"launches": 5, "kernel_us": kernel_us, "kernels": [*kernel_us]}
    assert profiled(lambda: calls.append(1), CUDA) == seen
    assert len(calls) == 2  # once before, so that nothing compiles or allocates under the profiler


def test_peak_memory_is_counted_from_what_was_there(monkeypatch):
    used = {"now": 3 * 2**20, "peak": 50 * 2**20}
    for name, value in {
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
        "memory_allocated": lambda _: used["now"],
        "max_memory_allocated": lambda _: used["peak"],
        "reset_peak_memory_stats": lambda _: used.update(peak=used["now"]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert peak_mib(lambda: used.update(peak=used["now"] + 7 * 2**20), CUDA) == 7.0
