"""Several processes: the same run as one process, resumed on another number, and restarted when one dies."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from nsa.train.checkpoint import list_checkpoints
from nsa.train.metrics import Row
from tests.faults.cases import Nsa, Ranks, events, outcome, torchrun, write_config
from tests.train.cases import reproducible_rows

TWO = ("--world-size", "2", "--accumulation", "1")


def near(rows: list[Row], expected: list[Row]) -> None:
    """Equal but for the rounding of sums in another order."""
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with its configuration beside it."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder, steps=20, eval_windows=5, checkpoint_every=6)
    with Nsa("train", config, "--run-dir", folder / "run", said=folder / "said") as nsa:
        assert nsa.end() == 0
    return folder


@pytest.mark.parametrize("changes", [{}, {"--optim.name": "muon", "--loss-chunk": "50"}])
def test_two_processes_train_like_one(tmp_path: Path, whole: Path, changes: dict[str, str]) -> None:
    more = [word for pair in changes.items() for word in pair]
    expected = whole / "run"
    if changes:
        expected = tmp_path / "one"
        with Nsa("train", whole / "tiny.yaml", "--run-dir", expected, *more, said=tmp_path / "said") as nsa:
            assert nsa.end() == 0
    with Ranks("train", whole / "tiny.yaml", "--run-dir", tmp_path / "run", *TWO, *more, folder=tmp_path) as run:
        assert run.end() == [0, 0], run.text
        assert "2 windows x 1 micro-batches x 2 processes = 4 windows" in run.ranks[0].text
        assert "step" not in run.ranks[1].text  # one of them speaks
    near(reproducible_rows(tmp_path / "run"), reproducible_rows(expected))


@pytest.mark.parametrize("first", [1, 2])
def test_resumed_on_another_number_the_data_go_on(tmp_path: Path, whole: Path, first: int, count) -> None:
    path, config = tmp_path / "run", whole / "tiny.yaml"
    halt: dict[str, Any] = {"fault": ("die", "9", "0", str(int(signal.SIGTERM)))}
    if first == 1:
        with Nsa("train", config, "--run-dir", path, said=tmp_path / "said", **halt) as nsa:
            assert nsa.end() == 128 + signal.SIGTERM
        with Ranks("train", "--resume", path, *TWO, folder=tmp_path) as run:
            assert run.end() == [0, 0], run.text
    else:
        with Ranks("train", config, "--run-dir", path, *TWO, folder=tmp_path, **halt) as run:
            assert run.end() == [128 + signal.SIGTERM] * 2, run.text
        with Nsa("train", "--resume", path, "--world-size", "1", "--accumulation", "2", said=tmp_path / "said") as nsa:
            assert nsa.end() == 0, nsa.text
    near(reproducible_rows(path), reproducible_rows(whole / "run"))
    places = [outcome(run)[3] for run in (path, whole / "run")]
    assert places[0] == places[1]
    count("resumed on another number of processes, same data and curve", 1, 1)


def test_rank_that_dies_is_started_anew_and_the_run_resumes(tmp_path: Path, whole: Path, count) -> None:
    """SIGKILL to one rank; torchrun ends the other, starts both again with the same words, and the run goes on."""
    path = tmp_path / "run"
    fault = ("die", "13", "1", str(int(signal.SIGKILL)))
    process = torchrun("train", whole / "tiny.yaml", "--run-dir", path, *TWO, fault=fault, restarts=1)
    try:
        said, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, said
    (resumed,) = [event for event in events(path) if event["kind"] == "resume"]
    assert resumed["step"] == 12
    assert list_checkpoints(path / "checkpoints")[-1].name == "step-00000020"
    near(reproducible_rows(path), reproducible_rows(whole / "run"))
    count("rank killed under torchrun, restarted and resumed", 1, 1)


def test_batch_that_cannot_be_divided_is_refused_before_the_start(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    with Ranks("train", whole / "tiny.yaml", "--run-dir", path, "--world-size", "2", folder=tmp_path) as run:
        assert run.end() == [2, 2]
        assert "global_batch must equal micro_batch * accumulation * world_size (8), got 4" in run.text
    with Ranks("train", whole / "tiny.yaml", "--run-dir", path, folder=tmp_path) as run:
        assert run.end() == [2, 2]
        assert "world_size must equal the number of processes launched (2), got 1. Start it with: torchrun" in run.text
    with Ranks("train", whole / "tiny.yaml", *TWO, folder=tmp_path) as run:
        assert run.end() == [2, 2]
        assert "--run-dir must be given with torchrun" in run.text
    assert not path.exists()
