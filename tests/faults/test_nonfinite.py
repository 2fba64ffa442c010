"""NaN planted in the weights of one rank of two: every rank follows the same policy at the same
step.
"""

from __future__ import annotations

from typing import Any

from nsa.train.telemetry.metrics import read_metrics
from tests.faults.cases import Run, TwoRanks, check_resumed, events, steps_of, undisturbed


def test_rollback_is_coherent_on_all_ranks(tmp_path):
    words = ("--nonfinite", "rollback", "--parallel.strategy", "fsdp")
    settings: dict[str, Any] = {"steps": 16, "checkpoint_every": 4}
    with TwoRanks(tmp_path, *words, fault=("nan_in_weights", "9", "1"), **settings) as run:
        assert run.end() == [0, 0], run.text
    rows = read_metrics(run.path / "metrics.jsonl")
    assert len(events(run.path, "rollback")) == 1
    assert rows[-1]["step"] == 16
    assert float(rows[-1]["loss_nats"]) < 5.4


def test_weights_that_are_not_finite_never_become_a_checkpoint(tmp_path):
    """Those that are lost must not push out the last sound ones: the run resumes from these,
    identically.
    """
    settings: dict[str, Any] = {"keep_checkpoints": 1, "nonfinite": "skip", "nonfinite_limit": 6}
    whole = undisturbed(tmp_path, steps=20, **settings)
    with Run(tmp_path, config=tmp_path / "tiny.yaml", fault=("nan_in_weights", "9")) as run:
        assert run.end() == 1
        why = "(model.norm.weight is not finite); the newest is"
        assert f"checkpoint of step 10 could not be written {why}" in run.text
        assert "6 in a row, nonfinite_limit 6" in run.text
    assert steps_of(run.path)[-1] == 8
    check_resumed(run.path, whole)
