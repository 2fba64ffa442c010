"""A full disk: a warning, the older checkpoint stays, training goes on, and what waited is written
once there is room.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa.train.checkpoint import list_checkpoints
from tests.faults.cases import Nsa, complete, events, outcome, rows_of, write_config


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB; only the superuser of a whole machine may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting is refused here; the test with RLIMIT_FSIZE takes its place")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


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


def test_full_disk_is_survived(tmp_path: Path, small_disk: Path, count) -> None:
    config = write_config(tmp_path, steps=60, keep_checkpoints=1)
    complete("train", config, "--run-dir", tmp_path / "whole", folder=tmp_path)
    path = small_disk / "run"
    with Nsa(
        "train",
        config,
        "--run-dir",
        path,
        said=tmp_path / "said",
        fault=("slow", "0.05"),
    ) as nsa:
        nsa.wait_until(lambda: len(list_checkpoints(path / "checkpoints")) == 1)
        filler = fill(small_disk)
        nsa.wait_until(lambda: nsa.text.count("could not be written (") >= 3)
        kept = list_checkpoints(path / "checkpoints")
        rows = rows_of(path)
        assert kept
        nsa.wait_until(
            lambda: "rows of metrics could not be written and wait in memory" in nsa.text,
        )
        filler.unlink()
        nsa.wait_until(lambda: rows_of(path) > rows + 1)
        assert nsa.end() == 0, nsa.text
        assert "the newest is step-" in nsa.text
    assert outcome(path) == outcome(tmp_path / "whole")
    assert any(event["kind"] == "checkpoint" for event in events(path))
    count("full disk (small tmpfs), training went on, nothing lost", 1, 1)


def test_run_whose_last_checkpoint_has_no_room_says_so(
    tmp_path: Path,
    small_disk: Path,
    count,
) -> None:
    config = write_config(tmp_path, steps=40, checkpoint_every=10)
    path = small_disk / "run"
    with Nsa(
        "train",
        config,
        "--run-dir",
        path,
        said=tmp_path / "said",
        fault=("slow", "0.05"),
    ) as nsa:
        nsa.wait_until(lambda: len(list_checkpoints(path / "checkpoints")) == 1)
        fill(small_disk)
        assert nsa.end() == 1
        assert "stopped: checkpoint of step 40 could not be written" in nsa.text
        assert "the last checkpoint is" in nsa.text
    count("full disk at the end, reported with exit code 1", 1, 1)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs file size limits")
def test_files_that_may_not_grow(tmp_path: Path, count) -> None:
    """RLIMIT_FSIZE below the size of a checkpoint: every write of one fails half-way, the run goes
    on to its end.
    """
    config = write_config(tmp_path, steps=20, checkpoint_every=5)
    with Nsa(
        "train",
        config,
        "--run-dir",
        tmp_path / "run",
        said=tmp_path / "said",
        fault=("small-files", "60000"),
    ) as nsa:
        assert nsa.end() == 1
        assert "checkpoint of step 5 could not be written" in nsa.text
        assert "step 20/20 |" in nsa.text
        assert "stopped: checkpoint of step 20 could not be written" in nsa.text
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    count("files that may not grow (RLIMIT_FSIZE), training went on", 1, 1)
