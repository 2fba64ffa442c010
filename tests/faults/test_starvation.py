"""Data that stop coming: the run ends by itself, with a checkpoint, and can be resumed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nsa.train.checkpoint import list_checkpoints
from tests.faults.cases import TWO_RANKS, Nsa, Ranks, complete, outcome, rows_of, write_config


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("starve", "no batch in 1 s (data_limit_s)"),
        (
            "lose-data",
            "DocumentReader: source must send documents within the time limit of 300 s, got none.",
        ),
    ],
)
def test_starving_run_leaves_a_checkpoint_and_resumes_identically(
    tmp_path: Path,
    fault: str,
    what: str,
    count,
) -> None:
    config = write_config(
        tmp_path,
        steps=20,
        checkpoint_every=1000,
        data_limit_s=1.0,
        stall_limit_s=20.0,
    )
    complete("train", config, "--run-dir", tmp_path / "whole", folder=tmp_path)
    path = tmp_path / "run"
    with Nsa(
        "train",
        config,
        "--run-dir",
        path,
        said=tmp_path / "said",
        fault=(fault, "14"),
    ) as nsa:
        nsa.wait_until(lambda: rows_of(path) == 2)  # of steps 3 and 6
        begin = time.monotonic()
        assert nsa.end() == 1
        assert time.monotonic() - begin < 30
        assert f"stopped: data starvation after step 7: {what}; the last checkpoint is" in nsa.text
    assert [path.name for path in list_checkpoints(path / "checkpoints")] == ["step-00000007"]
    complete("train", "--resume", path, folder=tmp_path)
    assert outcome(path) == outcome(tmp_path / "whole")
    count("data stopped coming, left with a checkpoint, resumed identically", 1, 1)


def test_one_starving_rank_ends_both_with_a_checkpoint(tmp_path: Path, count) -> None:
    config = write_config(
        tmp_path,
        steps=20,
        checkpoint_every=1000,
        data_limit_s=1.0,
        stall_limit_s=20.0,
    )
    words = ("train", config, "--run-dir", tmp_path / "run", *TWO_RANKS)
    with Ranks(*words, folder=tmp_path, fault=("starve", "7", "1")) as run:
        assert run.end() == [1, 1], run.text
        assert "data starvation after step 7: another process got no batch" in run.ranks[0].text
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step-00000007",
    ]
    count("data stopped coming to one rank of two, both left with a checkpoint", 1, 1)
