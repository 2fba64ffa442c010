"""Percentiles, names of kernels, and the order in which a GPU is timed; the GPU itself is played by the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.bench import clock
from nsa.bench.clock import kernel_times, peak_mib, percentiles, short_name, time_call

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_percentiles_are_of_one_call() -> None:
    timing = percentiles([float(sample) for sample in (50, 10, 30, 20, 40, 60, 70, 80, 100, 90, 110)], 10, "cuda graph")
    assert (timing.p20, timing.p50, timing.p80) == (3.0, 6.0, 9.0)
    assert (timing.samples, timing.calls, timing.method) == (11, 10, "cuda graph")


def test_the_cpu_is_timed_by_the_clock() -> None:
    calls = []
    timing = time_call(lambda: calls.append(1), CPU, budget_ms=0.0)
    assert timing.method == "cpu"
    assert (timing.samples, len(calls)) == (3, 4)  # one call to warm up
    assert 0 <= timing.p20 <= timing.p50 <= timing.p80 < 100
    assert peak_mib(lambda: None, CPU) is None
    assert kernel_times(lambda: None, CPU) == {}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("range_fwd_kernel", "range_fwd_kernel"),
        ("void at::native::elementwise_kernel<4, at::native::Fill>(int, char*)", "at::native::elementwise_kernel"),
        ("void pytorch_flash::flash_fwd_kernel<Traits<64>, false>(Flash_fwd_params)", "pytorch_flash::flash_fwd_kernel"),
        ("void (anonymous namespace)::reduce<3>(float*)", "anonymous::reduce"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"),
        ("x" * 500, "x" * 120),
    ],
)  # fmt: skip
def test_names_of_kernels_are_readable(kernel: str, name: str) -> None:
    assert short_name(kernel) == name


class Gpu:
    """Plays a GPU on which a call takes ``ms`` and which may refuse to be captured."""

    def __init__(self, ms: float, *, captures: bool = True) -> None:
        self.now, self.ms, self.captures, self.recording, self.calls = 0.0, ms, captures, False, 0
        self.graph_calls = 0

    def call(self) -> None:
        self.calls += 1
        if self.recording:
            if not self.captures:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            self.graph_calls += 1
        else:
            self.now += self.ms

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = 0.0

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
        for name, value in {
            "Event": Event, "CUDAGraph": Graph, "graph": capture, "Stream": lambda: stream, "current_stream": lambda: stream,
            "stream": lambda _: contextlib.nullcontext(), "synchronize": lambda *_: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(("ms", "calls", "samples"), [(0.01, 30, 50), (0.2, 2, 50), (20.0, 1, 15), (1000.0, 1, 7)])
def test_a_gpu_is_timed_by_replays_of_a_graph(ms: float, calls: int, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(ms)
    gpu.install(monkeypatch)
    timing = time_call(gpu.call, CUDA, budget_ms=300.0)
    assert (timing.method, timing.calls, timing.samples) == ("cuda graph", calls, samples)
    assert timing.p50 == pytest.approx(ms)
    assert gpu.graph_calls == calls


def test_what_cannot_be_captured_is_launched_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0.01, captures=False)
    gpu.install(monkeypatch)
    timing = time_call(gpu.call, CUDA, budget_ms=300.0)
    assert timing.method == "launches: no graph, operation not permitted when stream is capturing"
    assert timing.calls == 1
    assert timing.p50 == pytest.approx(0.01)


def test_kernels_are_what_the_profiler_saw_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, kind: str, us: float) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, device_type=SimpleNamespace(name=kind), time_range=SimpleNamespace(elapsed_us=lambda: us)
        )

    events = [
        event("void b_kernel<4>(int)", "CUDA", 2.0),
        event("a_kernel", "CUDA", 1.0),
        event("void b_kernel<8>(int)", "CUDA", 3.0),
        event("cudaLaunchKernel", "CPU", 9.0),
        event("Memcpy DtoD", "CUDA", 9.0),
        event("Memset (Device)", "CUDA", 9.0),
    ]

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

    def call() -> None:
        used["peak"] = used["now"] + 7 * 2**20

    for name, value in {
        "empty_cache": lambda: None, "synchronize": lambda *_: None, "memory_allocated": lambda _: used["now"],
        "max_memory_allocated": lambda _: used["peak"],
        "reset_peak_memory_stats": lambda _: used.update(peak=used["now"]),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    assert clock.peak_mib(call, CUDA) == 7.0
