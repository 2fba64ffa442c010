"""What must come even when nobody can be told about it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsa.train.signals import Requests
from nsa.train.watchdog_process import Beat, Watched, say


@contextmanager
def terminal_gone() -> Iterator[None]:
    """Standard error is a pipe that nobody reads any more."""
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
    watched = Watched(1, 0, 0, "", str(tmp_path / "log.txt"), str(tmp_path / "events.jsonl"))
    with terminal_gone():
        say(watched, "hang", Beat(1, 2, "step", 3.0, 4.0), "watchdog: it hangs\n")
    assert (tmp_path / "log.txt").read_text().endswith("ERROR watchdog: it hangs\n")


def test_a_signal_is_obeyed_without_a_terminal() -> None:
    with Requests() as requests:
        with terminal_gone():
            os.kill(os.getpid(), signal.SIGTERM)
        assert requests.stop == signal.SIGTERM
