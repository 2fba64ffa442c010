"""A full disk: a warning, and training goes on."""

from __future__ import annotations

from tests.faults.cases import Run


def test_files_that_may_not_grow(tmp_path):
    """RLIMIT_FSIZE below the size of a checkpoint: every write of one fails half-way, the run goes
    on to its end.
    """
    with Run(tmp_path, steps=20, checkpoint_every=5, fault=("small_files", "60000")) as run:
        assert run.end() == 1
        assert "checkpoint of step 5 could not be written" in run.text
        assert "step 20/20 |" in run.text
        assert "stopped: checkpoint of step 20 could not be written" in run.text
    assert list((run.path / "checkpoints").iterdir()) == []
