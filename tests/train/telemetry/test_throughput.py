"""The clock of a device: longest steps, the host's part, and what belongs to no step."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from nsa.train.telemetry import throughput
from nsa.train.telemetry.metrics import read_metrics
from nsa.train.telemetry.throughput import STARTING_STEPS, DeviceClock
from tests.train.cases import make_trainer, tiny_config


class Times:
    """A clock that is set by hand, seconds."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Event:
    """A CUDA event on a device that runs ``LATE`` seconds behind the host."""

    LATE = 0.5
    times: ClassVar[Times]
    finished: ClassVar[bool] = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = self.times.now + self.LATE

    def query(self) -> bool:
        return self.finished

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    found = Times()
    monkeypatch.setattr(throughput, "time", found)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "times", found, raising=False)
    return found


def steps(clock: DeviceClock, times: Times, *lengths: float) -> None:
    """Steps of so many seconds, a quarter of a second between them and a long pause after them."""
    for number, length in enumerate(lengths, start=1):
        with clock.step(pause_follows=number == len(lengths)):
            times.now += length
        times.now += 100 if number == len(lengths) else 0.25


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_longest_step_is_warm_and_ends_before_a_pause(times: Times, kind: str) -> None:
    clock = DeviceClock(torch.device(kind))
    steps(clock, times, *[30.0] * STARTING_STEPS)
    assert "step_time_max_ms" not in clock.row()  # they compile
    steps(clock, times, 1, 2, 1, 1)
    assert clock.row()["step_time_max_ms"] == pytest.approx(2250)  # to the next one
    steps(clock, times, 1, 1, 3)
    assert clock.row()["step_time_max_ms"] == pytest.approx(3000)  # to its own end
    assert clock.row() == {}
    steps(clock, times, 1, 1)  # a checkpoint follows, and no row
    steps(clock, times, 1, 1)
    assert clock.row()["step_time_max_ms"] == pytest.approx(1250)


def test_a_step_of_the_warm_up_is_left_out_one_by_one(times: Times) -> None:
    clock = DeviceClock(torch.device("cpu"))
    steps(clock, times, *[30.0] * STARTING_STEPS, 1.0, 2.0)
    assert clock.row()["step_time_max_ms"] == pytest.approx(2000)


def test_of_a_gpu_the_mean_times_of_device_and_host_are_told(times: Times) -> None:
    clock = DeviceClock(torch.device("cuda"))
    steps(clock, times, 1, 2, 3)
    assert clock.row() == pytest.approx({"gpu_step_time_ms": 2000, "host_time_ms": 2000})


def test_steps_that_the_gpu_works_on_count_in_the_next_row(times: Times, monkeypatch) -> None:
    clock = DeviceClock(torch.device("cuda"))
    monkeypatch.setattr(Event, "finished", False)
    steps(clock, times, 1, 2)
    assert clock.row() == {}
    monkeypatch.setattr(Event, "finished", True)
    assert clock.row()["gpu_step_time_ms"] == pytest.approx(1500)


def test_rows_of_a_run_have_the_longest_step(tmp_path: Path) -> None:
    make_trainer(tiny_config(tmp_path, steps=12, log_every=5, eval_every=0), tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [5, 10, 12]
    assert ["step_time_max_ms" in row for row in rows] == [False, True, True]
    assert all("host_time_ms" not in row for row in rows)
    for row in rows[1:]:
        assert float(row["step_time_max_ms"]) > 0.5 * float(row["step_time_ms"])
