"""NaN planted in the weights of one rank of two: every rank follows the same policy at the same step."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.train.metrics import read_metrics
from tests.faults.cases import Ranks, events, write_config

CASES = [
    ("rollback", "ddp"),
    ("rollback", "fsdp"),
    *(pytest.param(policy, "ddp", marks=pytest.mark.faults) for policy in ("skip", "stop")),
]


@pytest.mark.parametrize(("policy", "strategy"), CASES)
def test_policy_is_coherent_on_all_ranks(tmp_path: Path, policy: str, strategy: str, count) -> None:
    config = write_config(tmp_path, steps=16, nonfinite=policy, nonfinite_limit=3, checkpoint_every=4)
    words = ("train", config, "--run-dir", tmp_path / "run", "--world-size", "2", "--accumulation", "1")
    with Ranks(*words, "--parallel.strategy", strategy, folder=tmp_path, fault=("nan-in-weights", "9", "1")) as run:
        codes = run.end(60)
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
