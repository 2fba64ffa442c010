"""Percentiles, names of kernels, and the order in which a GPU is timed; the test plays the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.bench.clock import kernel_times, peak_mib, percentiles, short_name, time_call

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_percentiles_are_of_one_call() -> None:
    samples = [float(sample) for sample in (50, 10, 30, 20, 40, 60, 70, 80, 100, 90, 110)]
    timing = percentiles(samples, 10, "cuda graph")
    assert (timing.p20, timing.p50, timing.p80) == (3.0, 6.0, 9.0)
    assert (timing.samples, timing.calls, timing.method) == (11, 10, "cuda graph")


def test_the_cpu_is_timed_by_the_clock() -> None:
    calls = []
    timing = time_call(lambda: calls.append(1), CPU, budget_ms=0.0)
    assert (timing.method, timing.samples, len(calls)) == ("cpu", 3, 4)  # one to warm up
    assert 0 <= timing.p20 <= timing.p50 <= timing.p80 < 100
    assert peak_mib(lambda: None, CPU) is None
    assert kernel_times(lambda: None, CPU) == {}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("range_fwd_kernel", "range_fwd_kernel"),
        ("void at::elementwise_kernel<4, at::Fill>(int, char*)", "at::elementwise_kernel"),
        ("void flash::fwd_kernel<Traits<64>, false>(Params)", "flash::fwd_kernel"),
        ("void (anonymous namespace)::reduce<3>(float*)", "anonymous::reduce"),
        ("x" * 500, "x" * 120),
    ],
)
def test_names_of_kernels_are_readable(kernel: str, name: str) -> None:
    assert short_name(kernel) == name


class Gpu:
    """Plays a GPU on which a call takes ``ms`` and which may refuse to be captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ms: float, captures: bool = True) -> None:
        self.now, self.ms, self.captures, self.recording, self.graph_calls = 0.0, ms, captures, 0, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        class Graph:
            def replay(self) -> None:
                gpu.now += gpu.ms * gpu.graph_calls

            def reset(self) -> None:
                pass

        @contextlib.contextmanager
        def capture(graph: Any) -> Iterator[None]:
            gpu.recording = True
            try:
                yield
            finally:
                gpu.recording = False

        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda: stream)

    def call(self) -> None:
        if self.recording and not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.graph_calls += self.recording
        self.now += 0 if self.recording else self.ms


@pytest.mark.parametrize(
    ("ms", "calls", "samples"),
    [(0.01, 30, 50), (0.2, 2, 50), (20.0, 1, 15), (1000.0, 1, 7)],
)
def test_a_gpu_is_timed_by_replays_of_a_graph(
    ms: float,
    calls: int,
    samples: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch, ms)
    timing = time_call(gpu.call, CUDA, budget_ms=300.0)
    assert (timing.method, timing.calls, timing.samples) == ("cuda graph", calls, samples)
    assert timing.p50 == pytest.approx(ms)
    assert gpu.graph_calls == calls


def test_what_cannot_be_captured_is_launched_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = time_call(Gpu(monkeypatch, 0.01, captures=False).call, CUDA, budget_ms=300.0)
    reason = "launches: no graph, operation not permitted when stream is capturing"
    assert (timing.method, timing.calls) == (reason, 1)
    assert timing.p50 == pytest.approx(0.01)


def test_kernels_are_what_the_profiler_saw_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, us: float, kind: str = "CUDA") -> SimpleNamespace:
        time = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind), time_range=time)

    events = [event("void b_kernel<4>(int)", 2.0), event("void b_kernel<8>(int)", 3.0)]
    events += [event("a_kernel", 1.0), event("cudaLaunchKernel", 9.0, "CPU")]
    events += [event("Memcpy DtoD", 9.0), event("Memset (Device)", 9.0)]

    @contextlib.contextmanager
    def profile(activities: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    calls: list[int] = []
    assert kernel_times(lambda: calls.append(1), CUDA) == {"a_kernel": 1.0, "b_kernel": 5.0}
    assert len(calls) == 2  # once before, so that nothing compiles or allocates under the profiler


def test_peak_memory_is_counted_from_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
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
