"""Signals and the halt file: stop, checkpoint, stacks.

No test measures how fast a run reacts: whatever it must not wait for takes longer than its limit.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.faults.cases import (
    Nsa,
    Run,
    TwoRanks,
    check_resumed,
    events,
    steps_of,
    undisturbed,
)

TERMINATED = 128 + signal.SIGTERM
in_full = pytest.mark.faults
# A step or a wait for data that takes an hour ends the run by none of these limits.
PATIENT: dict[str, Any] = {
    "log_every": 1,
    "checkpoint_every": 1000,
    "data_limit_s": 1000.0,
    "stall_limit_s": 2000.0,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("whole"), **PATIENT)


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        # Signals in the process itself: tests/train/test_resume.py.
        ("halt", ("slow", "0.05")),
        # A wait of minutes for a stream must not delay the end.
        ("SIGTERM", ("starve", "7")),
    ],
    ids=str,
)
def test_leaves_with_a_checkpoint_and_resumes_identically(tmp_path, whole, how, fault):
    with Run(tmp_path, config=whole.parent / "tiny.yaml", fault=fault) as run:
        run.wait_for_rows(7 if fault[0] == "starve" else 2)
        run.stop(how)
    assert not (run.path / "halt").exists()
    (step,) = steps_of(run.path)
    assert 0 < step < 30
    assert fault[0] != "starve" or step == 7
    (event,) = events(run.path, "stop")
    assert event["step"] == step
    by = "the halt file" if how == "halt" else how
    assert event["message"].startswith(f"stopped by {by} after step {step} of 30")
    check_resumed(run.path, whole)


def test_a_second_process_is_kept_from_a_run(tmp_path):
    with Run(tmp_path, steps=10_000, checkpoint_every=5) as run:
        run.wait_until(lambda: bool(steps_of(run.path)))
        with Nsa("train", "--resume", run.path, said=tmp_path / "second") as second:
            assert second.end() == 2
            rule = "RUN must be a run that no other process is working on"
            assert f"{rule}, got {run.path}. Stop that process first" in second.text
        run.goes_on()
        run.stop()
    assert len(events(run.path, "start")) == 1
    assert events(run.path, "error") == []


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    """Without waiting for its step, which takes an hour."""
    with Run(tmp_path, fault=("slow", "3600", "1"), **PATIENT) as run:
        run.wait_for_rows(1)
        time.sleep(1)  # and the long step has begun
        run.kill(signal.SIGTERM)
        run.wait_for_text("finishing this step")
        run.stop()
        assert "SIGTERM again: leaving at once" in run.text
    assert steps_of(run.path) == []


def test_a_signal_that_a_launcher_passes_on_is_the_same_one(tmp_path):
    """A cluster signals torchrun and its processes, to which torchrun then sends it again."""
    with TwoRanks(tmp_path, fault=("slow", "2"), log_every=1, checkpoint_every=1000) as run:
        run.wait_for_rows(1)
        time.sleep(0.5)  # in the middle of the next step, in which both signals arrive
        for _ in range(2):
            run.kill(signal.SIGTERM)
            time.sleep(0.1)
        assert run.end() == [TERMINATED] * 2
        assert "leaving at once" not in run.text
    assert len(steps_of(run.path)) == 1


def test_stacks_and_checkpoint_on_demand(tmp_path):
    with Run(tmp_path, steps=10_000, checkpoint_every=0, log_every=1, eval_every=0) as run:
        run.wait_for_rows(4)
        run.kill(signal.SIGUSR1)
        stacks = run.path / "stacks" / "rank-0.txt"
        run.wait_until(lambda: "nsa/train/trainer.py" in stacks.read_text())
        assert steps_of(run.path) == []
        # Reading the stacks of running threads in a signal handler would have ended the run by now.
        for _ in range(400):
            run.kill(signal.SIGUSR1)
            time.sleep(0.005)
        run.kill(signal.SIGUSR2)
        run.wait_until(lambda: bool(steps_of(run.path)))
        run.goes_on()
        run.stop()
        assert "SIGUSR2 received: a checkpoint after this step" in run.text


def test_a_signal_to_one_rank_stops_both_at_the_same_step(tmp_path):
    with TwoRanks(tmp_path, steps=100_000, checkpoint_every=100_000, eval_every=0) as run:
        run.wait_for_rows(2)
        run.ranks[1].kill(signal.SIGUSR2)
        run.ranks[0].wait_until(lambda: len(steps_of(run.path)) == 1)
        run.ranks[1].kill(signal.SIGTERM)
        assert run.end() == [TERMINATED] * 2
    assert len(steps_of(run.path)) == 2


STARVED: dict[str, Any] = {
    "steps": 20,
    "checkpoint_every": 1000,
    "data_limit_s": 1.0,
    "stall_limit_s": 20.0,
}


@pytest.fixture(scope="module")
def starved(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("starved"), **STARVED)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("starve", "no batch in 1 s (data_limit_s)"),
        (
            "lose_data",
            "source must send documents within the time limit of 300 s, got none.",
        ),
    ],
)
def test_starving_run_leaves_a_checkpoint_and_resumes_identically(tmp_path, starved, fault, what):
    with Run(tmp_path, config=starved.parent / "tiny.yaml", fault=(fault, "7")) as run:
        assert run.end() == 1
        assert f"stopped: data starvation after step 7: {what}; the last checkpoint is" in run.text
    assert steps_of(run.path) == [7]
    check_resumed(run.path, starved)


def test_one_starving_rank_ends_both_with_a_checkpoint(tmp_path):
    with TwoRanks(tmp_path, fault=("starve", "7", "1"), **STARVED) as run:
        assert run.end() == [1, 1], run.text
        assert "data starvation after step 7: another process got no batch" in run.ranks[0].text
    assert steps_of(run.path) == [7]
