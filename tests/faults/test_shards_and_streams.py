"""Faults of data: damaged shards, kills in the middle of a preparation, full disks."""

from __future__ import annotations

import multiprocessing
import os
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
from nsa.train.config import DataConfig
from nsa.train.data import (
    Origin,
    PrepareConfig,
    open_data,
    open_shards,
    preparation,
    prepare,
)
from nsa.train.data.shards import PROGRESS, STAMP
from tests.faults.cases import FORKS
from tests.train.data.data_sets import as_clone, make_texts, write_folder

in_full = pytest.mark.faults


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != STAMP)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files_of(folder)}


def config_of(source: Path, tokenizer: Any = "byte", shard_tokens: int = 100_000) -> PrepareConfig:
    return PrepareConfig(
        Origin(str(source)), tokenizer, validation_fraction=0.2, shard_tokens=shard_tokens
    )


def open_folder(folder: Path) -> None:
    open_data(DataConfig(source="shards", path=str(folder)), seed=0, seq_len=64)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    source = write_folder(folder / "source", "parquet", make_texts(300))
    prepare(config_of(source, shard_tokens=20_000), folder / "out")
    open_shards(folder / "out")  # leaves its stamp
    return folder / "out"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "set"
    return write_folder(folder, "jsonl", make_texts(12_000, longest=8), files=5)


# --- damaged shards -------------------------------------------------------------------------------
def damage(file: Path, other: Path, rng: random.Random) -> str:
    """Change a file like a bad disk, or replace it by ``other``; return the kind of damage."""
    intact = file.read_bytes()
    place = rng.randrange(len(intact))
    flipped = bytes([intact[place] ^ 1 << rng.randrange(8)])
    changed = {
        "bit": intact[:place] + flipped + intact[place + 1 :],
        "truncated": intact[:place],
        "empty": b"",
        "missing": intact,
        "longer": intact + rng.randbytes(1 + place % 100),
        "swapped": other.read_bytes(),
        "zeros": intact[:place] + bytes(len(intact) - place),
    }
    how = rng.choice([*changed])
    file.write_bytes(changed[how])
    if changed[how] == intact:
        file.unlink()
    return how


@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=in_full)])
def test_damaged_shards_are_refused_by_name(shards, tmp_path, number):
    rng, broken = random.Random(number), tmp_path / "broken"
    for attempt in range(number):
        shutil.copytree(shards, broken)
        if attempt % 2:
            open_shards(broken)  # so that the stamp belongs to these files
        file, other = rng.sample(files_of(broken), 2)
        times, how = file.stat(), damage(file, other, rng)
        if file.exists() and rng.random() < 0.3:  # without a trace
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(UserError) as caught:
            open_folder(broken)
        assert str(file) in str(caught.value), (file.name, how)
        shutil.rmtree(broken)


# --- preparations that are interrupted ------------------------------------------------------------
def prepare_apart(config: PrepareConfig, out: Path, commit_s: float) -> None:
    os.setsid()
    preparation._COMMIT_S = commit_s
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


def session(leader: int) -> Iterator[int]:
    """Processes of a session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[3] == str(leader) and fields[0] not in "ZX":
                yield int(path.parent.name)


@pytest.mark.parametrize(
    ("tokenizer", "number", "seed"),
    [
        ("byte", 1, 1),
        pytest.param("gpt2", 1, 1, marks=in_full),
        *(pytest.param(("byte", "gpt2")[n % 2], 10, 10 + n, marks=in_full) for n in range(4)),
    ],
)
def test_killed_preparation_goes_on(source, tmp_path, tokenizer, number, seed):
    rng, kills, config, out = random.Random(seed), 0, config_of(source, tokenizer), tmp_path / "cut"
    prepare(config, tmp_path / "whole")
    while kills < number:
        is_done = False
        while not is_done:
            commit_s = 0.02 if kills < number else preparation._COMMIT_S
            process = FORKS.Process(target=prepare_apart, args=(config, out, commit_s))
            process.start()
            if kills < number:
                kill_in_the_middle(process, out, rng)
            process.join(120)
            is_done = process.exitcode == 0
            if not is_done:
                assert process.exitcode == -signal.SIGKILL
                kills += 1
                deadline = time.monotonic() + 30
                while left := list(session(process.pid)):
                    assert time.monotonic() < deadline, left
                    time.sleep(0.05)
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
