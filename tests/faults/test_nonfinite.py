"""NaN planted in the weights of one rank of two: every rank follows the same policy at the same
step.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.train.checkpoint import list_checkpoints
from nsa.train.telemetry.metrics import read_metrics
from tests.faults.cases import TWO_RANKS, Nsa, Ranks, complete, events, outcome, write_config

CASES = [
    ("rollback", "ddp"),
    ("rollback", "fsdp"),
    *(pytest.param(policy, "ddp", marks=pytest.mark.faults) for policy in ("skip", "stop")),
]


@pytest.mark.parametrize(("policy", "strategy"), CASES)
def test_policy_is_coherent_on_all_ranks(tmp_path: Path, policy: str, strategy: str, count) -> None:
    config = write_config(
        tmp_path,
        steps=16,
        nonfinite=policy,
        nonfinite_limit=3,
        checkpoint_every=4,
    )
    words = ("train", config, "--run-dir", tmp_path / "run", *TWO_RANKS)
    with Ranks(
        *words,
        "--parallel.strategy",
        strategy,
        folder=tmp_path,
        fault=("nan-in-weights", "9", "1"),
    ) as run:
        codes = run.end()
        text = run.text
    kinds = [event["kind"] for event in events(tmp_path / "run")]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    if policy == "rollback":
        assert codes == [0, 0], text
        assert kinds.count("rollback") == 1
        assert rows[-1]["step"] == 16
        assert float(rows[-1]["loss_nats"]) < 5.4
    else:  # the weights of one rank are lost, so that skipping never ends
        assert codes == [1, 1], text
        wanted = "policy stop" if policy == "stop" else "3 in a row, nonfinite_limit 3"
        assert wanted in text
        assert "the last checkpoint is" in text
        assert kinds[-1] == "stop"
    assert "Traceback" not in text
    count("NaN in the weights of one rank of two, policy followed by both", 1, 1)


def test_weights_that_are_not_finite_never_become_a_checkpoint(tmp_path: Path, count) -> None:
    """Those that are lost must not push out the last sound ones: the run resumes from these,
    identically.
    """
    config = write_config(
        tmp_path,
        steps=20,
        checkpoint_every=2,
        keep_checkpoints=1,
        nonfinite="skip",
        nonfinite_limit=6,
    )
    complete("train", config, "--run-dir", tmp_path / "whole", folder=tmp_path)
    path = tmp_path / "run"
    with Nsa(
        "train",
        config,
        "--run-dir",
        path,
        said=tmp_path / "said",
        fault=("nan-in-weights", "9"),
    ) as nsa:
        assert nsa.end() == 1
        why = "(model.norm.weight is not finite); the newest is"
        assert f"checkpoint of step 10 could not be written {why}" in nsa.text
        assert "6 in a row, nonfinite_limit 6" in nsa.text
    assert list_checkpoints(path / "checkpoints")[-1].name == "step-00000008"
    complete("train", "--resume", path, folder=tmp_path)
    assert outcome(path) == outcome(tmp_path / "whole")
    count("NaN in the weights, no checkpoint of it, resumed identically", 1, 1)
