"""Faults of data: kills in the middle of a preparation, full disks."""

from __future__ import annotations

import multiprocessing
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from nsa.errors import UserError
from nsa.train.data import (
    Origin,
    PrepareConfig,
    preparation,
    prepare,
)
from nsa.train.data.shards import PROGRESS
from tests.faults.cases import FORKS
from tests.train.cases import contents
from tests.train.data.data_sets import as_clone, make_texts, write_folder

in_full = pytest.mark.faults


def config_of(source: Path, tokenizer: Any = "byte") -> PrepareConfig:
    return PrepareConfig(
        Origin(str(source)), tokenizer, validation_fraction=0.2, shard_tokens=100_000
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "set"
    return write_folder(folder, "jsonl", make_texts(12_000, longest=8), files=5)


# --- preparations that are interrupted ------------------------------------------------------------
def prepare_apart(config: PrepareConfig, out: Path) -> None:
    preparation._COMMIT_S = 0.02
    prepare(config, out, workers=2)


def kill_in_the_middle(process: Any, out: Path, rng: random.Random) -> None:
    """After some commits, which change the note of what is committed."""
    seen: set[int] = set()
    commits = rng.randrange(0, 4)
    while len(seen) <= commits and process.is_alive():
        with suppress(FileNotFoundError):
            seen.add((out / PROGRESS).stat().st_mtime_ns)
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.02))
    process.kill()
    process.join()


@pytest.mark.parametrize(
    ("tokenizer", "number"),
    [("byte", 1), *(pytest.param(name, 20, marks=in_full) for name in ("byte", "gpt2"))],
)
def test_killed_preparation_goes_on(source, tmp_path, tokenizer, number):
    rng, config, out = random.Random(number), config_of(source, tokenizer), tmp_path / "cut"
    prepare(config, tmp_path / "whole")
    kills = 0
    while kills < number:
        process = FORKS.Process(target=prepare_apart, args=(config, out))
        process.start()
        kill_in_the_middle(process, out, rng)
        kills += process.exitcode == -signal.SIGKILL
        prepare(config, out)
        assert contents(out) == contents(tmp_path / "whole")
        shutil.rmtree(out)


@pytest.mark.parametrize("tokenizer", ["byte", pytest.param("gpt2", marks=in_full)])
def test_a_process_that_reads_is_replaced(tmp_path, tokenizer):
    # more than a pipe holds
    texts = make_texts(12_000, longest=200)
    source = as_clone(write_folder(tmp_path / "set", "jsonl", texts, files=5))
    prepare(config_of(source, tokenizer), tmp_path / "whole")
    kills = 0

    def kill(report):
        nonlocal kills
        for process in multiprocessing.active_children():
            if process.name == "nsa-documents" and kills < 2:
                process.kill()
                process.join()
                kills += 1

    prepare(config_of(source, tokenizer), tmp_path / "cut", on_progress=kill)
    assert kills == 2
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Context manager: no file can grow beyond ``size`` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would leave half a file
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes


def test_a_full_disk_is_reported_and_the_work_goes_on(source, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_COMMIT_S", 0.0)
    prepare(config_of(source), tmp_path / "whole")
    for size in (30_000, 60_000, 90_000):
        with largest_file(size), pytest.raises(UserError) as caught:
            prepare(config_of(source), tmp_path / "cut")
        assert "--out must have room for the shards, got '" in str(caught.value)
        hint = "Make room and give the same command again: it goes on where it stopped."
        assert hint in str(caught.value)
    prepare(config_of(source), tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
