"""A run that goes on but not as it should: it says so, once, in the log and among the events."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cases import Nsa, events, write_config


@pytest.mark.parametrize(
    ("fault", "kind", "what"),
    [
        (("slow", "1.5", "14"), "throughput", "throughput fell to"),
        (("starve", "30", "0", "0.6"), "data", "the device waits for data"),
        (("dead-gate", "14"), "gates", "gate collapse in layer 0: branch slc is dead"),
    ],
)
def test_what_goes_wrong_is_said_once(
    tmp_path: Path,
    fault: tuple[str, ...],
    kind: str,
    what: str,
    count,
) -> None:
    config = write_config(tmp_path, steps=20, log_every=2, eval_every=2, checkpoint_every=0)
    with Nsa(
        "train",
        config,
        "--run-dir",
        tmp_path / "run",
        said=tmp_path / "said",
        fault=fault,
    ) as nsa:
        assert nsa.end() == 0, nsa.text
        assert nsa.text.count(what) == 1, nsa.text
    (event,) = [event for event in events(tmp_path / "run") if event["kind"] == kind]
    assert event["message"].startswith(f"step {event['step']}: {what}")
    assert event["step"] > 14
    count("throughput fell, data waited for, gates collapsed: said once", 1, 1)
