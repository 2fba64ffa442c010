"""Faults of data: damaged shards, kills in the middle of a preparation, full disks, odd
configurations.
"""

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa.errors import UserError
from nsa.train.config import DataConfig
from nsa.train.data import (
    Origin,
    PrepareConfig,
    collate,
    open_data,
    open_shards,
    preparation,
    prepare,
)
from nsa.train.data.shards import PROGRESS, STAMP
from tests.faults.cases import DAMAGES, FORKS, damage, small_disk
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
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    source = write_folder(folder / "source", "parquet", make_texts(300))
    prepare(config_of(source, shard_tokens=20_000), folder / "out")
    open_shards(folder / "out")  # leaves its stamp
    return folder / "out"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "set"
    return write_folder(folder, "jsonl", make_texts(12_000, longest=8), files=5)


# --- damaged shards -------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=in_full)])
def test_damaged_shards_are_refused_by_name(
    shards: Path, tmp_path: Path, count, number: int
) -> None:
    rng, broken = random.Random(number), tmp_path / "broken"
    for attempt in range(number):
        shutil.copytree(shards, broken)
        if attempt % 2:
            open_shards(broken)  # so that the stamp belongs to these files
        file, other = rng.sample(files_of(broken), 2)
        times, how = file.stat(), rng.choice(DAMAGES)
        damage(file, other, how, rng)
        if file.exists() and rng.random() < 0.3:  # without a trace
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(UserError) as caught:
            open_folder(broken)
        assert str(file) in str(caught.value), (file.name, how)
        shutil.rmtree(broken)
    count("damaged shards, refused by name", number, number)


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
def test_killed_preparation_goes_on(
    source: Path, tmp_path: Path, count, tokenizer: str, number: int, seed: int
) -> None:
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
    count("preparations killed, gone on identically", kills, kills)


@pytest.mark.parametrize("tokenizer", ["byte", pytest.param("gpt2", marks=in_full)])
def test_a_process_that_reads_is_replaced(tmp_path: Path, tokenizer: str) -> None:
    # more than a pipe holds
    texts = make_texts(12_000, longest=200)
    source = as_clone(write_folder(tmp_path / "set", "jsonl", texts, files=5))
    prepare(config_of(source, tokenizer), tmp_path / "whole")
    kills = 0

    def kill(report: object) -> None:
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
def little_room(folder: Path, size: int, is_mounted: bool) -> Iterator[None]:
    """No file larger than ``size``, or a disk full but for it."""
    if is_mounted:
        free = os.statvfs(folder)
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(max(free.f_bavail * free.f_frsize - size, 0)))
        yield
        ballast.unlink()
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would leave half a file
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes


@pytest.mark.parametrize("is_mounted", [False, True], ids=["file size limit", "full disk"])
def test_a_full_disk_is_reported_and_the_work_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mounted: bool
) -> None:
    monkeypatch.setattr(preparation, "_COMMIT_S", 0.0)
    prepare(config_of(source), tmp_path / "whole")
    disk = tmp_path / "disk" if is_mounted else tmp_path
    with ExitStack() as stack:
        if is_mounted:
            stack.enter_context(small_disk(disk, "2m"))
        for size in (30_000, 60_000, 90_000):
            with little_room(disk, size, is_mounted), pytest.raises(UserError) as caught:
                prepare(config_of(source), disk / "cut")
            assert "--out must have room for the shards, got '" in str(caught.value)
            hint = "Make room and give the same command again: it goes on where it stopped."
            assert hint in str(caught.value)
        prepare(config_of(source), disk / "cut")
        assert contents(disk / "cut") == contents(tmp_path / "whole")


# --- odd configurations ---------------------------------------------------------------------------
SOUND: list[dict[str, Any]] = [
    {"source": "folder", "path": "text", "validation_fraction": 0.3},
    {"source": "shards", "path": "shards"},
    {"source": "stream", "path": "text", "validation_fraction": 0.3, "validation_tokens": 100},
    {"source": "stream", "path": "parquet", "validation_fraction": 0.3, "validation_tokens": 100},
    *({"source": task} for task in ("uniform", "copy", "induction", "needle")),
]
ODD: dict[str, list[Any]] = {
    "source": ["folder", "shards", "stream", "copy"],
    "path": ["text", "parquet", "empty", "binary.parquet", "gone", "shards", None],
    "pattern": ["*", "*.txt", "*.nothing", "", "/etc/*"],
    "text_field": ["text", "number", "gone"],
    "time_limit_s": [30.0, 0.0, -1.0],
    "validation_tokens": [0, 1, 500, 10**9],
    "tokenizer": ["byte", "gpt2", "bpe", "file"],
    "tokenizer_path": [None, "shards/tokenizer.json", "text"],
    "bpe_vocab_size": [0, 257, 300, 10**6],
    "validation_fraction": [0.0, 0.1, 0.3, 0.5, 0.7],
}
CHANGES = st.sampled_from([{name: value} for name, values in ODD.items() for value in values])


@pytest.mark.parametrize(("number", "least"), [(40, 8), pytest.param(600, 100, marks=in_full)])
def test_odd_configurations_of_data(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count, number: int, least: int
) -> None:
    """They are opened and give a batch that adds up, or an error says what is wrong."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shards, "shards")
    write_folder(Path("text"), "txt", make_texts(30))
    write_folder(Path("parquet"), "parquet", make_texts(60))
    Path("empty").mkdir()
    Path("binary.parquet").write_bytes(random.Random(0).randbytes(3000))
    opened = refused = 0

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(
        base=st.sampled_from(SOUND),
        changes=st.lists(CHANGES, max_size=3),
        seq_len=st.sampled_from([20, 64, 1, 300, 10**7]),
        document_mask=st.booleans(),
    )
    def check(
        base: dict[str, Any], changes: list[dict[str, Any]], seq_len: int, document_mask: bool
    ) -> None:
        nonlocal opened, refused
        config = dict(base)
        for change in changes:
            config |= change
        try:
            data = open_data(DataConfig(**config), seed=3, seq_len=seq_len)
            windows = data.sampler(seq_len, 3).next_indices(2)
            batch = collate(data.train, windows, seq_len, document_mask=document_mask)
        except UserError:
            refused += 1
            return
        opened += 1
        assert batch.tokens.shape == batch.targets.shape == (2 * seq_len,)
        assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < data.tokenizer.vocab_size
        counted = batch.targets[batch.targets >= 0]
        assert batch.num_targets == len(counted)
        assert batch.num_bytes == int(data.train.token_bytes[counted.numpy()].sum())

    check()
    assert min(opened, refused) >= least
    count("odd configurations of data, opened or refused", opened + refused, opened + refused)
