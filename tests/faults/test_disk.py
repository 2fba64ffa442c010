"""A full disk: a warning, the older checkpoint stays, training goes on, and what waited is written
once there is room.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.faults.cases import (
    Run,
    events,
    outcome,
    rows_of,
    steps_of,
    undisturbed,
)


@pytest.fixture
def disk(tmp_path):
    """A file system of 3 MiB; only the superuser of a whole machine may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is refused here; the test with RLIMIT_FSIZE replaces it")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(path: Path) -> Path:
    """Leave not a byte."""
    file = path / "filler"
    with file.open("wb", buffering=0) as filler:
        for size in (65536, 1):
            try:
                while True:
                    filler.write(b"x" * size)
            except OSError:
                pass
    return file


def test_full_disk_is_survived(tmp_path, disk):
    whole = undisturbed(tmp_path, steps=40, keep_checkpoints=1)
    config = tmp_path / "tiny.yaml"
    with Run(tmp_path, config=config, path=disk / "run", fault=("slow", "0.05")) as run:
        run.wait_until(lambda: len(steps_of(run.path)) == 1)
        filler = fill(disk)
        run.wait_until(lambda: run.text.count("could not be written (") >= 3)
        assert steps_of(run.path)
        rows = rows_of(run.path)
        run.wait_for_text("rows of metrics could not be written and wait in memory")
        filler.unlink()
        run.wait_for_rows(rows + 2)
        assert run.end() == 0, run.text
        assert "the newest is step-" in run.text
    assert outcome(run.path) == outcome(whole)
    assert events(run.path, "checkpoint")


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
