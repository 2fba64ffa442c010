"""The watchdog's limits, and what must happen even when it cannot be told to anyone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train.run_folder import RunFolder
from nsa.train.watch.signals import Requests
from nsa.train.watch.watchdog import STARTING_LIMIT_S, Watchdog
from nsa.train.watch.watchdog_process import Beat, Watched, say


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


def test_the_watchdog_goes_on_without_a_terminal(tmp_path: Path) -> None:
    """Otherwise a hanging run would never be ended once its terminal has gone."""
    files = [str(tmp_path / name) for name in ("stacks", "log.txt", "events.jsonl", "alarm")]
    with terminal_gone():
        say(Watched(1, 0, 0, *files), "hang", Beat(1, 2, "step", 3.0, 4.0), "it hangs\n")
    assert (tmp_path / "log.txt").read_text().endswith("ERROR it hangs\n")


def test_a_watchdog_that_was_killed_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_signal_is_obeyed_without_a_terminal() -> None:
    with Requests() as requests:
        with terminal_gone():
            os.kill(os.getpid(), signal.SIGTERM)
        assert requests.stop == signal.SIGTERM


@pytest.mark.parametrize(
    ("handler", "stop"),
    [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)],
    ids=["terminal", "nohup"],
)
def test_a_closed_terminal_asks_once_however_often_it_signals(
    monkeypatch: pytest.MonkeyPatch, handler: Any, stop: int
) -> None:
    """And under nohup it asks for nothing."""

    def leave(code: int) -> None:
        raise AssertionError(f"left with code {code}")

    monkeypatch.setattr(os, "_exit", leave)
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with Requests() as requests:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
            assert requests.stop == stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_compilation_in_the_middle_of_a_run_has_time(tmp_path: Path) -> None:
    """A shape that is new to torch.compile may come in any step and takes longer than a step."""
    seen: list[Beat] = []

    def look() -> None:
        assert watchdog._memory is not None
        seen.append(Beat.from_bytes(watchdog._memory[:]))

    def slow(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        look()
        return module.forward

    with Watchdog(RunFolder(tmp_path), 0, 40.0) as watchdog:
        watchdog.beat("step", 7, 40.0)
        torch.compile(lambda x: x + 1, backend=slow)(torch.ones(3))
        look()
    during, after = seen
    assert during[1:4] == (7, "compile", STARTING_LIMIT_S)
    assert after[:4] == (during.number + 1, 7, "step", 40.0)
