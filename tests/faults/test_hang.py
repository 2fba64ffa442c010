"""A process that no longer gets anywhere is reported and ended, whatever it is stuck in."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.faults.cases import TWO_RANKS, Nsa, Ranks, events, rows_of, torchrun, write_config

LINUX = pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="needs /proc")


def test_main_thread_stuck_in_c_with_the_interpreter(tmp_path: Path, count) -> None:
    """No Python thread of the process can run any more; its stacks are written all the same."""
    config = write_config(tmp_path, stall_limit_s=2.0, data_limit_s=1.0)
    with Nsa(
        "train",
        config,
        "--run-dir",
        tmp_path / "run",
        said=tmp_path / "said",
        fault=("stuck-in-c", "8"),
    ) as nsa:
        nsa.wait_until(lambda: rows_of(tmp_path / "run") == 2)  # of steps 3 and 6
        begin = time.monotonic()
        assert nsa.end(60) == -signal.SIGKILL
        assert time.monotonic() - begin < 40
        said = nsa.text
    assert "watchdog: rank 0" in said
    assert "stall, zero throughput: no sign of life for" in said
    assert "last heartbeat: number" in said
    assert "step 8, phase step" in said
    assert 'tests/faults/plant.py", line' in said  # the stack shows where
    assert "in train_step" in said
    assert "ending rank 0" in said
    first = said[said.index("watchdog:") :].splitlines()[0]
    assert first in (tmp_path / "run" / "log.txt").read_text()
    assert [event["kind"] for event in events(tmp_path / "run")][-2:] == ["hang", "end"]
    assert (tmp_path / "run" / "stacks" / "rank-0.txt").stat().st_size > 0
    count("hang in C code, ended and reported", 1, 1)


@LINUX
def test_stopped_process_of_one(tmp_path: Path, count) -> None:
    config = write_config(tmp_path, steps=10_000, stall_limit_s=2.0, data_limit_s=1.0)
    with Nsa("train", config, "--run-dir", tmp_path / "run", said=tmp_path / "said") as nsa:
        nsa.wait_until(lambda: rows_of(tmp_path / "run") > 2)
        nsa.kill(signal.SIGSTOP)
        assert nsa.end(60) == -signal.SIGKILL
        assert "state: state T (stopped)" in nsa.text
        assert "stacks: none, the process cannot run" in nsa.text
    count("single process stopped (SIGSTOP), ended and reported", 1, 1)


@LINUX
def test_one_rank_stopped(tmp_path: Path, count) -> None:
    """The other rank waits for it in a collective and says so; of the stopped one the state is read
    from outside.
    """
    config = write_config(tmp_path, steps=10_000, stall_limit_s=3.0, data_limit_s=1.0)
    words = ("train", config, "--run-dir", tmp_path / "run", *TWO_RANKS)
    with Ranks(*words, folder=tmp_path) as run:
        run.ranks[0].wait_until(lambda: rows_of(tmp_path / "run") > 2)
        run.ranks[1].kill(signal.SIGSTOP)
        begin = time.monotonic()
        codes = run.end(60)
        assert time.monotonic() - begin < 40
        said = [rank.text for rank in run.ranks]
    assert all(code != 0 for code in codes), codes
    assert "stacks (also in" in said[0]
    assert "nsa/train/trainer.py" in said[0]
    for part in (
        "rank 1",
        "state: state T (stopped)",
        "wait channel",
        "last heartbeat: number",
        "stacks: none",
    ):
        assert part in said[1]
    hangs = [event["message"] for event in events(tmp_path / "run") if event["kind"] == "hang"]
    assert {message.split()[2] for message in hangs} == {"0", "1"}
    count("one rank of two stopped (SIGSTOP), both reported", 1, 1)


def test_a_process_says_where_it_stands_when_another_rank_hangs(tmp_path: Path) -> None:
    """Also one that has nothing to fear from its own watchdog yet; and it goes on."""
    config = write_config(tmp_path, steps=10_000, stall_limit_s=300.0, data_limit_s=100.0)
    with Nsa("train", config, "--run-dir", tmp_path / "run", said=tmp_path / "said") as nsa:
        nsa.wait_until(lambda: rows_of(tmp_path / "run") > 2)
        with (tmp_path / "run" / "stacks" / "alarm").open("a") as alarm:
            alarm.write("1\n")
        nsa.wait_until(lambda: "watchdog: rank 0" in nsa.text)
        before = rows_of(tmp_path / "run")
        nsa.wait_until(lambda: rows_of(tmp_path / "run") > before + 2)
        nsa.kill(signal.SIGTERM)
        assert nsa.end() == 128 + signal.SIGTERM
        said = nsa.text
    assert "watchdog: rank 0" in said
    assert ": another rank hangs: no sign of life for" in said
    assert 'nsa/train/trainer.py", line' in said
    assert said.count("watchdog:") == 1


def test_a_pause_of_everything_is_no_hang(tmp_path: Path) -> None:
    """Ctrl-Z and a machine that sleeps stop the watchdog as well; time that it did not see does not
    count.
    """
    config = write_config(tmp_path, steps=10_000, stall_limit_s=4.0, data_limit_s=1.0)
    with Nsa("train", config, "--run-dir", tmp_path / "run", said=tmp_path / "said") as nsa:
        nsa.wait_until(lambda: rows_of(tmp_path / "run") > 2)
        listed = Path(f"/proc/{nsa.pid}/task/{nsa.pid}/children").read_text()
        children = [int(word) for word in listed.split()]
        assert len(children) == 1
        for pid in (*children, nsa.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8)
        for pid in (nsa.pid, *children):
            os.kill(pid, signal.SIGCONT)
        before = rows_of(tmp_path / "run")
        nsa.wait_until(lambda: rows_of(tmp_path / "run") > before + 2)
        nsa.kill(signal.SIGTERM)
        assert nsa.end() == 128 + signal.SIGTERM
        assert "watchdog" not in nsa.text


def test_a_process_that_goes_on_in_time_is_left_alone(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=10_000, stall_limit_s=4.0, data_limit_s=1.0)
    with Nsa("train", config, "--run-dir", tmp_path / "run", said=tmp_path / "said") as nsa:
        nsa.wait_until(lambda: rows_of(tmp_path / "run") > 2)
        nsa.kill(signal.SIGSTOP)
        nsa.wait_until(lambda: "watchdog: rank 0" in nsa.text)
        nsa.kill(signal.SIGCONT)
        nsa.wait_until(lambda: "watchdog: rank 0 goes on" in nsa.text)
        nsa.kill(signal.SIGTERM)
        assert nsa.end() == 128 + signal.SIGTERM


@LINUX
@pytest.mark.faults
def test_one_rank_stopped_under_torchrun_with_the_usual_limits(tmp_path: Path, count) -> None:
    """The whole as a user has it, from SIGSTOP to the end of torchrun, within 60 s."""
    config = write_config(tmp_path, steps=1_000_000, checkpoint_every=100_000, eval_every=0)
    process = torchrun("train", config, "--run-dir", tmp_path / "run", *TWO_RANKS)
    try:
        deadline = time.monotonic() + 120
        while rows_of(tmp_path / "run") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        stopped = _pid_of_rank(tmp_path / "run", 1)
        os.kill(stopped, signal.SIGSTOP)
        begin = time.monotonic()
        said, _ = process.communicate(timeout=120)
        seconds = time.monotonic() - begin
    finally:
        process.kill()
    print(said, file=sys.stderr)
    assert process.returncode != 0
    assert seconds < 60
    assert f"rank 1 (process {stopped})" in said
    assert "state: state T (stopped)" in said
    assert "nsa/train/trainer.py" in said
    count(
        "one rank of two stopped under torchrun, reported and ended within 60 s",
        1,
        1,
        seconds=round(seconds),
    )


def _pid_of_rank(path: Path, rank: int) -> int:
    """The process that holds the stacks file of the rank open."""
    target = str(path / "stacks" / f"rank-{rank}.txt")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) == target for link in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError("no such process")
