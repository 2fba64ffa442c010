"""A run that goes on but not as it should: it says so, once, in the log and among the events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases import Run, events


@pytest.mark.parametrize(
    ("fault", "kind", "what"),
    [
        pytest.param(
            *("slow 1.5 14", "throughput", "throughput fell to"), marks=pytest.mark.faults
        ),
        ("starve 30 0 0.6", "data", "the device waits for data"),
        ("dead_gate 14", "gates", "gate collapse in layer 0: means cmp"),
    ],
)
def test_what_goes_wrong_is_said_once(tmp_path: Path, fault: str, kind: str, what: str) -> None:
    settings: dict[str, Any] = {"steps": 20, "log_every": 2, "eval_every": 2, "checkpoint_every": 0}
    with Run(tmp_path, fault=tuple(fault.split()), **settings) as run:
        assert run.end() == 0, run.text
        assert run.text.count(what) == 1, run.text
    (event,) = events(run.path, kind)
    assert event["message"].startswith(f"step {event['step']}: {what}")
    assert event["step"] > 14
