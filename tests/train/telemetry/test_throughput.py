"""The clock of a device: longest steps, the host's part, and what belongs to no step."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from nsa.train.telemetry import throughput
from nsa.train.telemetry.throughput import STARTING_STEPS, DeviceClock


class Times:
    """A clock that is set by hand, seconds."""

    now: ClassVar[float] = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


class Event:
    """A CUDA event on a device that runs half a second behind the host."""

    finished: ClassVar[bool] = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: torch.device) -> None:
        assert stream.type == "cuda"
        self.at = Times.now + 0.5

    def query(self) -> bool:
        return self.finished

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture(params=["cpu", "cuda"])
def clock(request, monkeypatch):
    monkeypatch.setattr(throughput, "time", Times)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return DeviceClock(torch.device(request.param))


on_a_gpu = pytest.mark.parametrize("clock", ["cuda"], indirect=True)


def steps(clock: DeviceClock, *lengths: float) -> None:
    """Steps of so many seconds, a quarter of a second between them and a long pause after them."""
    for number, length in enumerate(lengths, start=1):
        with clock.step(pause_follows=number == len(lengths)):
            Times.now += length
        Times.now += 100 if number == len(lengths) else 0.25


def test_the_longest_step_is_warm_and_ends_before_a_pause(clock):
    steps(clock, *[30.0] * (STARTING_STEPS - 1))
    assert "step_time_max_ms" not in clock.row()  # they compile
    steps(clock, 30, 1, 2, 1, 1)  # the first of these still belongs to the start
    assert clock.row()["step_time_max_ms"] == pytest.approx(2250)  # to the next one
    steps(clock, 1, 1, 3)
    assert clock.row()["step_time_max_ms"] == pytest.approx(3000)  # to its own end
    assert clock.row() == {}
    steps(clock, 1, 1)  # a checkpoint follows, and no row
    steps(clock, 1, 1)
    assert clock.row()["step_time_max_ms"] == pytest.approx(1250)


@on_a_gpu
def test_the_row_of_a_gpu_has_mean_times_of_device_and_host(clock):
    steps(clock, 1, 2, 3)
    assert clock.row() == pytest.approx({"gpu_step_time_ms": 2000, "host_time_ms": 2000})


@on_a_gpu
def test_steps_that_the_gpu_works_on_count_in_the_next_row(clock, monkeypatch):
    monkeypatch.setattr(Event, "finished", False)
    steps(clock, 1, 2)
    assert clock.row() == {}
    monkeypatch.setattr(Event, "finished", True)
    assert clock.row()["gpu_step_time_ms"] == pytest.approx(1500)
