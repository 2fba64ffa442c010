"""What a run can be asked from outside: stop, checkpoint, stacks; and how fast it answers."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from nsa.train.checkpoint import list_checkpoints, step_of
from tests.faults.cases import (
    TWO_RANKS,
    Nsa,
    Ranks,
    complete,
    events,
    outcome,
    rows_of,
    write_config,
)


def steps_of(path: Path) -> list[int]:
    return [step_of(checkpoint) for checkpoint in list_checkpoints(path / "checkpoints")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run, with its configuration beside it."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder, steps=30, checkpoint_every=1000)
    complete("train", config, "--run-dir", folder / "run", folder=folder)
    return folder


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP", "halt"])
def test_leaves_with_a_checkpoint_and_resumes_identically(
    tmp_path: Path,
    whole: Path,
    how: str,
    count,
) -> None:
    config, path = whole / "tiny.yaml", tmp_path / "run"
    with Nsa(
        "train",
        config,
        "--run-dir",
        path,
        said=tmp_path / "said",
        fault=("slow", "0.05"),
    ) as nsa:
        nsa.wait_until(lambda: rows_of(path) > 1)
        begin = time.monotonic()
        if how == "halt":
            (path / "halt").touch()
        else:
            nsa.kill(signal.Signals[how])
        assert nsa.end() == (0 if how == "halt" else 128 + signal.Signals[how])
        assert time.monotonic() - begin < 30
    assert not (path / "halt").exists()
    (step,) = steps_of(path)
    assert 0 < step < 30
    (event,) = [event for event in events(path) if event["kind"] == "stop"]
    assert event["step"] == step
    assert event["message"].startswith(
        f"stopped by {'the halt file' if how == 'halt' else how} after step {step} of 30",
    )
    complete("train", "--resume", path, folder=tmp_path)
    assert outcome(path) == outcome(whole / "run")
    count("stopped by a signal or the halt file, left within 30 s, resumed identically", 1, 1)


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("halt", marks=pytest.mark.faults)])
def test_leaves_at_once_while_no_data_come(tmp_path: Path, how: str, count) -> None:
    """A wait of minutes for a stream must not stand in the way."""
    config = write_config(
        tmp_path,
        steps=20,
        log_every=1,
        checkpoint_every=1000,
        data_limit_s=300.0,
        stall_limit_s=400.0,
    )
    complete("train", config, "--run-dir", tmp_path / "whole", folder=tmp_path)
    path = tmp_path / "run"
    with Nsa(
        "train",
        config,
        "--run-dir",
        path,
        said=tmp_path / "said",
        fault=("starve", "14"),
    ) as nsa:
        nsa.wait_until(lambda: rows_of(path) == 7)
        begin = time.monotonic()
        if how == "halt":
            (path / "halt").touch()
        else:
            nsa.kill(signal.SIGTERM)
        assert nsa.end() == (0 if how == "halt" else 128 + signal.SIGTERM)
        assert time.monotonic() - begin < 15
    assert steps_of(path) == [7]
    complete("train", "--resume", path, folder=tmp_path)
    assert outcome(path) == outcome(tmp_path / "whole")
    count("stopped while no data came, left at once with a checkpoint, resumed identically", 1, 1)


@pytest.mark.faults
def test_both_ranks_leave_at_once_while_one_gets_no_data(tmp_path: Path, count) -> None:
    config = write_config(
        tmp_path,
        steps=20,
        log_every=1,
        checkpoint_every=1000,
        data_limit_s=300.0,
        stall_limit_s=400.0,
    )
    words = ("train", config, "--run-dir", tmp_path / "run", *TWO_RANKS)
    with Ranks(*words, folder=tmp_path, fault=("starve", "7", "1")) as run:
        run.ranks[0].wait_until(lambda: rows_of(tmp_path / "run") == 7)
        for rank in run.ranks:  # as torchrun does
            rank.kill(signal.SIGTERM)
        assert run.end(30) == [128 + signal.SIGTERM] * 2, run.text
    assert steps_of(tmp_path / "run") == [7]
    count("stopped while no data came, left at once with a checkpoint, resumed identically", 1, 1)


def test_a_second_process_is_kept_from_a_run(tmp_path: Path, count) -> None:
    config, path = write_config(tmp_path, steps=10_000, checkpoint_every=5), tmp_path / "run"
    with Nsa("train", config, "--run-dir", path, said=tmp_path / "said") as nsa:
        nsa.wait_until(lambda: bool(steps_of(path)))
        with Nsa("train", "--resume", path, said=tmp_path / "second") as second:
            assert second.end() == 2
            rule = "RUN must be a run that no other process works on"
            assert f"{rule}, got {path}. Stop that process first" in second.text
        before = rows_of(path)
        nsa.wait_until(lambda: rows_of(path) > before + 2)
        nsa.kill(signal.SIGTERM)
        assert nsa.end() == 128 + signal.SIGTERM
    assert [event["kind"] for event in events(path) if event["kind"] in ("start", "error")] == [
        "start",
    ]
    count("a second process kept from a run", 1, 1)


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, count) -> None:
    config = write_config(tmp_path, log_every=1, checkpoint_every=1000)
    with Nsa(
        "train",
        config,
        "--run-dir",
        tmp_path / "run",
        said=tmp_path / "said",
        fault=("slow", "30", "1"),
    ) as nsa:
        nsa.wait_until(lambda: rows_of(tmp_path / "run") == 1)
        time.sleep(1)  # and the long step has begun
        begin = time.monotonic()
        nsa.kill(signal.SIGTERM)
        nsa.wait_until(lambda: "finishing this step" in nsa.text)
        nsa.kill(signal.SIGTERM)
        assert nsa.end() == 128 + signal.SIGTERM
        assert time.monotonic() - begin < 20
    assert steps_of(tmp_path / "run") == []
    count("second signal, left at once", 1, 1)


def test_a_signal_that_a_launcher_passes_on_is_the_same_one(tmp_path: Path, count) -> None:
    """A cluster signals torchrun and its processes, to which torchrun then sends it again."""
    config = write_config(tmp_path, log_every=1, checkpoint_every=1000)
    words = ("train", config, "--run-dir", tmp_path / "run", *TWO_RANKS)
    with Ranks(*words, folder=tmp_path, fault=("slow", "2")) as run:
        run.ranks[0].wait_until(lambda: rows_of(tmp_path / "run") > 0)
        time.sleep(0.5)  # in the middle of the next step, which both signals meet
        for _ in range(2):
            for rank in run.ranks:
                rank.kill(signal.SIGTERM)
            time.sleep(0.1)
        assert run.end(30) == [128 + signal.SIGTERM] * 2
        assert "leaving at once" not in run.text
    assert len(steps_of(tmp_path / "run")) == 1
    count("signal that came twice through a launcher, left with a checkpoint", 1, 1)


def test_stacks_and_checkpoint_on_demand(tmp_path: Path, count) -> None:
    config = write_config(tmp_path, steps=10_000, checkpoint_every=0, log_every=1, eval_every=0)
    path = tmp_path / "run"
    with Nsa("train", config, "--run-dir", path, said=tmp_path / "said") as nsa:
        nsa.wait_until(lambda: rows_of(path) > 3)
        nsa.kill(signal.SIGUSR1)
        stacks = path / "stacks" / "rank-0.txt"
        nsa.wait_until(lambda: "nsa/train/trainer.py" in stacks.read_text())
        assert steps_of(path) == []
        for _ in range(
            400,
        ):  # reading the stacks of running threads in a signal handler would have ended it by now
            nsa.kill(signal.SIGUSR1)
            time.sleep(0.005)
        nsa.kill(signal.SIGUSR2)
        nsa.wait_until(lambda: bool(steps_of(path)))
        before = rows_of(path)
        nsa.wait_until(lambda: rows_of(path) > before + 3)  # neither ends the run
        nsa.kill(signal.SIGTERM)
        nsa.end()
        assert "SIGUSR2 received: a checkpoint after this step" in nsa.text
    count("stacks (SIGUSR1) and checkpoint (SIGUSR2) on demand", 2, 2)


def test_a_signal_to_one_rank_stops_both_at_the_same_step(tmp_path: Path, count) -> None:
    config = write_config(tmp_path, steps=100_000, checkpoint_every=100_000, eval_every=0)
    words = ("train", config, "--run-dir", tmp_path / "run", *TWO_RANKS)
    with Ranks(*words, folder=tmp_path) as run:
        run.ranks[0].wait_until(lambda: rows_of(tmp_path / "run") > 1)
        run.ranks[1].kill(signal.SIGUSR2)
        run.ranks[0].wait_until(lambda: len(steps_of(tmp_path / "run")) == 1)
        run.ranks[1].kill(signal.SIGTERM)
        assert run.end(30) == [128 + signal.SIGTERM] * 2
    assert len(steps_of(tmp_path / "run")) == 2
    count("stop and checkpoint asked of one rank of two, done by both", 2, 2)
