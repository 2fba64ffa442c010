"""Data that stop coming: the run ends by itself, with a checkpoint, and can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases import Run, TwoRanks, check_resumed, steps_of, undisturbed

SETTINGS: dict[str, Any] = {
    "steps": 20,
    "checkpoint_every": 1000,
    "data_limit_s": 1.0,
    "stall_limit_s": 20.0,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("whole"), **SETTINGS)


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
def test_starving_run_leaves_a_checkpoint_and_resumes_identically(
    tmp_path: Path, whole: Path, fault: str, what: str
) -> None:
    with Run(tmp_path, config=whole.parent / "tiny.yaml", fault=(fault, "14")) as run:
        assert run.end() == 1
        assert f"stopped: data starvation after step 7: {what}; the last checkpoint is" in run.text
    assert steps_of(run.path) == [7]
    check_resumed(run.path, whole)


def test_one_starving_rank_ends_both_with_a_checkpoint(tmp_path: Path) -> None:
    with TwoRanks(tmp_path, fault=("starve", "7", "1"), **SETTINGS) as run:
        assert run.end() == [1, 1], run.text
        assert "data starvation after step 7: another process got no batch" in run.ranks[0].text
    assert steps_of(run.path) == [7]
