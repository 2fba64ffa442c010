"""A process that no longer gets anywhere is reported and ended, whatever it is stuck in."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases import Run, TwoRanks, events

LINUX = pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="needs /proc")


def endless(stall_limit_s: float) -> dict[str, Any]:
    return {"steps": 10_000, "stall_limit_s": stall_limit_s, "data_limit_s": stall_limit_s / 3}


def test_main_thread_stuck_in_c_with_the_interpreter(tmp_path):
    """No Python thread of the process can run any more; its stacks are written all the same."""
    with Run(tmp_path, fault=("stuck_in_c", "8"), **endless(3.0)) as run:
        assert run.end() == -signal.SIGKILL
        said = run.text
    for part in (
        "watchdog: rank 0",
        "stall, zero throughput: no sign of life for",
        "last heartbeat: number",
        "step 8, phase step",
        'tests/faults/plant.py", line',  # the stack shows where
        "in train_step",
        "ending rank 0",
    ):
        assert part in said, said
    first = said[said.index("watchdog:") :].splitlines()[0]
    assert first in (run.path / "log.txt").read_text()
    assert [event["kind"] for event in events(run.path)][-2:] == ["hang", "end"]
    assert (run.path / "stacks" / "rank-0.txt").stat().st_size > 0


@LINUX
def test_one_rank_stopped(tmp_path):
    """The other rank waits for it in a collective and says so; of the stopped one the state is read
    from outside.
    """
    with TwoRanks(tmp_path, **endless(3.0)) as run:
        run.wait_for_rows(3)
        run.ranks[1].kill(signal.SIGSTOP)
        assert 0 not in run.end(), run.text
        first, second = (rank.text for rank in run.ranks)
    assert "stacks: (also in" in first
    assert "nsa/train/trainer.py" in first
    state = ("rank 1", "state: T (stopped)", "last heartbeat: number")
    for part in (*state, "stacks: none"):
        assert part in second
    assert {event["message"].split()[2] for event in events(run.path, "hang")} == {"0", "1"}


def test_a_process_says_where_it_stands_when_another_rank_hangs(tmp_path):
    """Also one that is far from its own limit; and it goes on."""
    with Run(tmp_path, **endless(300.0)) as run:
        run.wait_for_rows(3)
        with (run.path / "stacks" / "alarm").open("a") as alarm:
            alarm.write("1\n")
        run.wait_for_text("watchdog: rank 0")
        run.goes_on()
        run.stop()
    assert ": another rank hangs: no sign of life for" in run.text
    assert 'nsa/train/trainer.py", line' in run.text
    assert run.text.count("watchdog:") == 1


@LINUX
def test_a_pause_of_everything_is_no_hang(tmp_path):
    """Ctrl-Z and a machine that sleeps stop the watchdog as well; time that it did not see does not
    count.
    """
    with Run(tmp_path, **endless(4.0)) as run:
        run.wait_for_rows(3)
        (child,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        for pid in (int(child), run.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8)
        for pid in (run.pid, int(child)):
            os.kill(pid, signal.SIGCONT)
        run.goes_on()
        run.stop()
        assert "watchdog" not in run.text


def test_a_process_that_goes_on_in_time_is_left_alone(tmp_path):
    with Run(tmp_path, **endless(4.0)) as run:
        run.wait_for_rows(3)
        run.kill(signal.SIGSTOP)
        run.wait_for_text("watchdog: rank 0")
        run.kill(signal.SIGCONT)
        run.wait_for_text("watchdog: rank 0 continues")
        run.stop()
