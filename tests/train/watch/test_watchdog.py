"""The watchdog, its limits and replacement, and requests by signals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nsa.train.run_folder import RunFolder
from nsa.train.watch.signals import Requests
from nsa.train.watch.watchdog import STARTING_LIMIT_S, Watchdog
from nsa.train.watch.watchdog_process import Beat, Process, watch


@contextmanager
def terminal_gone() -> Iterator[None]:
    """Standard error is a pipe without a reader."""
    kept = os.dup(2)
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 2)
    os.close(writes)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_reports_and_signals_without_a_terminal(tmp_path):
    with Requests() as requests, terminal_gone():
        Process(1, 0, tmp_path).say("hang", Beat(1, 2, "step", 3.0), "it hangs")
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.stop == signal.SIGTERM
    assert (tmp_path / "log.txt").read_text().endswith("ERROR it hangs\n")


@pytest.mark.parametrize(
    ("limit_s", "ends_at", "sent"),
    [
        (9.0, 1000.0, ["SIGUSR1", "SIGVTALRM", "SIGKILL"]),
        (0.0, 1000.0, []),  # without limit
        (9.0, 0.0, []),  # before the watchdog ran
        (9.0, 10.5, ["SIGUSR1"]),  # while it is asked for its stacks
        (9.0, 16.0, ["SIGUSR1", "SIGVTALRM"]),  # before SIGKILL
    ],
)
def test_signals_of_the_watchdog(tmp_path, monkeypatch, limit_s, ends_at, sent):
    """A process that has ended gets none: its number may belong to another process by then."""
    pid, now, found = 10**9, 0.0, list[str]()

    def sleep(seconds):
        nonlocal now
        now += seconds
        assert now < 2000

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "getppid", lambda: pid if now < ends_at else 1)
    monkeypatch.setattr(os, "kill", lambda _, number: found.append(signal.Signals(number).name))
    process = Process(pid, 0, tmp_path)
    process.stacks.parent.mkdir()
    process.stacks.touch()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.write(writes, b'[1, 2, "step", 1]\n' + json.dumps([2, 2, "step", limit_s]).encode() + b"\n")
    watch(process, reads)
    assert found == sent
    for descriptor in (reads, writes):
        os.close(descriptor)


def test_a_watchdog_that_was_killed_is_replaced(tmp_path, caplog):
    with Watchdog(RunFolder(tmp_path), 0, 40.0) as watchdog:
        first = watchdog._process
        assert first is not None
        first.kill()
        first.wait()
        for step in (7, 8):
            watchdog.beat("step", step, 40.0)
        second = watchdog._process
        assert second is not None
        assert second.pid != first.pid
        assert second.poll() is None
    assert second.poll() is not None  # it ends with the run
    assert caplog.text.count("the watchdog process has ended, another one is started") == 1


@pytest.mark.parametrize(
    ("phase", "limit_s", "allowed"),
    [
        ("step", 40.0, 200.0),
        ("evaluation", 40.0, 700.0),
        ("sample", 40.0, 200.0),
        ("sample", 300.0, 300.0),
        ("sample", 0.0, 0.0),
    ],
)
def test_limits_grow_with_earlier_durations(tmp_path, monkeypatch, phase, limit_s, allowed):
    """Ten times the last step (20 s) or the last batch of an evaluation (70 s) is allowed."""
    with Watchdog(RunFolder(tmp_path), 0, 40.0) as watchdog:
        for now, begins in ((0, "evaluation"), (9, "step"), (29, "evaluation"), (99, "checkpoint")):
            monkeypatch.setattr(time, "monotonic", lambda now=now: float(now))
            watchdog.beat(begins, 7, 40.0)
        watchdog.beat(phase, 7, limit_s)
        assert watchdog._last.limit_s == allowed
        monkeypatch.undo()


def test_the_end_of_torchrun_stops_the_run(monkeypatch):
    with Requests(agent=os.getppid()) as present, Requests(agent=os.getppid() + 1) as gone:
        present.look()
        assert (present.stop, gone.stop) == (0, 0)
        gone.look()
        assert (present.stop, gone.stop) == (0, signal.SIGTERM)


@pytest.mark.parametrize(("launched", "leaves_at"), [(True, 5), (False, 1)])
def test_a_second_signal(monkeypatch, launched, leaves_at):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with Requests(launched=launched):
        for second in (0, *range(1, leaves_at + 1)):
            assert codes == []
            monkeypatch.setattr(time, "monotonic", lambda now=second: 50.0 + now)
            os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM]
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert handler == (signal.SIG_IGN if launched else signal.SIG_DFL)


@pytest.mark.parametrize(
    ("handler", "stop"),
    [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)],
    ids=["terminal", "nohup"],
)
def test_hangups_stop_once(monkeypatch, handler, stop):
    """A closed terminal and its shell both signal; under nohup neither counts."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = signal.signal(signal.SIGHUP, handler)
    with Requests() as requests:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert (requests.stop, codes) == (stop, [])


def test_compilation_in_any_step_has_a_long_limit(tmp_path, monkeypatch):
    """torch.compile compiles when a shape is new, which takes longer than a step."""
    seen: list[Beat] = []

    def slow(module, inputs):
        seen.append(watchdog._last)
        return module.forward

    clock = SimpleNamespace(monotonic=lambda: 0.0)  # the time of the compiler is not a step's
    monkeypatch.setattr("nsa.train.watch.watchdog.time", clock)
    with Watchdog(RunFolder(tmp_path), 0, 40.0) as watchdog:
        watchdog.beat("step", 7, 40.0)
        torch.compile(lambda x: x + 1, backend=slow)(torch.ones(3))
        seen.append(watchdog._last)
    during, after = seen
    assert during[1:] == (7, "compile", STARTING_LIMIT_S)
    assert after == (during.number + 1, 7, "step", 40.0)


def test_a_watchdog_that_is_stopped_does_not_stop_the_run(tmp_path):
    """Its pipe is full after some thousand steps."""
    with Watchdog(RunFolder(tmp_path), 0, 1000.0) as watchdog:
        assert watchdog._process is not None
        watchdog._process.send_signal(signal.SIGSTOP)
        for step in range(5000):
            watchdog.beat("step", step, 1000.0)
