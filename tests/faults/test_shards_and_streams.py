"""Faults of data: damaged shards, kills in the middle of a preparation, full disks, servers that stall, odd configurations."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
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
from nsa.train.data.shards import INDEX, PROGRESS, STAMP, TOKENIZER
from tests.train.data.data_sets import hang_up, hub, make_texts, stall, write_folder
from tests.train.data.test_reader import on_hub


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != STAMP}


# -----------------------------------------------------------------------------------------------------
# damaged shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    source = write_folder(folder / "source", "parquet", make_texts(300))
    prepare(
        PrepareConfig(Origin(str(source)), "byte", validation_fraction=0.2, shard_tokens=20_000),
        folder / "out",
    )
    open_shards(folder / "out")  # leaves its stamp
    return folder / "out"


def damage(folder: Path, rng: random.Random) -> tuple[str, str]:
    """Do harm to one file; its name and what was done."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.name != STAMP))
    raw, times = path.read_bytes(), path.stat()
    how = rng.choice(
        [
            "gone",
            "truncated",
            "longer",
            "bit",
            "bit without a trace",
            "empty",
            "zeros",
            "another file",
        ]
    )
    place = rng.randrange(len(raw))
    if how == "gone":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(raw[:place])
    elif how == "longer":
        path.write_bytes(raw + rng.randbytes(1 + place))
    elif how.startswith("bit"):
        path.write_bytes(
            raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :]
        )
        if how == "bit without a trace":
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":
        path.write_bytes(raw[:place] + bytes(len(raw) - place))
    else:
        other = rng.choice(
            sorted(entry for entry in folder.iterdir() if entry.name not in (STAMP, path.name))
        )
        path.write_bytes(other.read_bytes())
    if how != "gone" and path.read_bytes() == raw:
        return damage(folder, rng)
    return path.name, how


def refused(shards: Path, tmp_path: Path, number: int, seed: int) -> int:
    rng, well = random.Random(seed), 0
    for attempt in range(number):
        broken = tmp_path / "broken"
        shutil.copytree(shards, broken)
        if attempt % 2:
            open_shards(broken)  # so that the stamp belongs to these files
        name, how = damage(broken, rng)
        with pytest.raises(UserError) as caught:
            open_data(DataConfig(source="shards", path=str(broken)), seed=0, seq_len=64)
        assert str(broken / name) in str(caught.value), (name, how)
        well += 1
        shutil.rmtree(broken)
    return well


def test_damaged_shards_are_refused_by_name(shards: Path, tmp_path: Path, count) -> None:
    count("damaged shards, refused by name", 60, refused(shards, tmp_path, 60, seed=1))


@pytest.mark.faults
def test_damaged_shards_are_refused_by_name_1000_times(shards: Path, tmp_path: Path, count) -> None:
    count("damaged shards, refused by name", 1000, refused(shards, tmp_path, 1000, seed=2))


# ----------------------------------------------------------------------------------------------
# preparation interrupted

FORKS = multiprocessing.get_context("forkserver")


def prepare_apart(source: str, out: str, tokenizer: str, commit_s: float) -> None:
    os.setsid()
    preparation._COMMIT_S = commit_s
    prepare(config_of(Path(source), tokenizer), out, workers=2)


class Preparation:
    """A preparation in a session of its own, which does not outlive the test; one that will be killed commits often."""

    def __init__(self, source: Path, out: Path, tokenizer: str, commit_s: float) -> None:
        self.out = out
        self.process = FORKS.Process(
            target=prepare_apart, args=(str(source), str(out), tokenizer, commit_s)
        )
        self.process.start()

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()

    def wait_for_commits(self, number: int) -> None:
        """Until the note of what is committed has changed so many times, or the preparation has ended."""
        seen: set[int] = set()
        while len(seen) <= number and self.process.is_alive():
            if (self.out / PROGRESS).exists():
                with suppress(FileNotFoundError):
                    seen.add((self.out / PROGRESS).stat().st_mtime_ns)
            time.sleep(0.001)

    def left_behind(self) -> list[int]:
        """Processes of its session that live on, after a moment in which they may end."""
        deadline = time.monotonic() + 10
        while (found := list(self._session())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _session(self) -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[3] == str(self.process.pid) and fields[0] not in "ZX":
                yield int(path.parent.name)


def killed(source: Path, tmp_path: Path, tokenizer: str, number: int, seed: int) -> int:
    """A preparation that is killed again and again; how many kills were survived."""
    rng, kills = random.Random(seed), 0
    prepare(config_of(source, tokenizer), tmp_path / "whole")
    while kills < number:
        out, is_done = tmp_path / "cut", False
        while not is_done:
            with Preparation(
                source, out, tokenizer, 0.02 if kills < number else preparation._COMMIT_S
            ) as run:
                if kills < number:
                    run.wait_for_commits(rng.randrange(0, 4))
                    time.sleep(rng.uniform(0, 0.02))
                    run.process.kill()
                run.process.join(120)
                is_done = run.process.exitcode == 0
                if not is_done:
                    assert run.process.exitcode == -signal.SIGKILL
                    assert not run.left_behind()
                    kills += 1
        assert contents(out) == contents(tmp_path / "whole")
        shutil.rmtree(out)
    return kills


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("source") / "set", "jsonl", make_texts(12_000, longest=8), files=5
    )


def config_of(source: Path, tokenizer: Any = "byte") -> PrepareConfig:
    return PrepareConfig(
        Origin(str(source)), tokenizer, validation_fraction=0.2, shard_tokens=100_000
    )


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_killed_preparation_goes_on(source: Path, tmp_path: Path, tokenizer: str, count) -> None:
    count(
        "preparations killed, gone on identically",
        1,
        killed(source, tmp_path, tokenizer, 1, seed=1),
    )


@pytest.mark.faults
@pytest.mark.parametrize("part", range(4))
def test_killed_preparation_goes_on_40_times(
    source: Path, tmp_path: Path, count, part: int
) -> None:
    count(
        "preparations killed, gone on identically",
        10,
        killed(source, tmp_path, ("byte", "gpt2")[part % 2], 10, 10 + part),
    )


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_a_process_that_reads_and_tokenises_is_replaced(
    tmp_path: Path, tokenizer: str, count
) -> None:
    # more than a pipe holds
    source = write_folder(tmp_path / "set", "jsonl", make_texts(12_000, longest=200), files=5)
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
    count("reading processes killed, replaced", 2, 2)


@contextmanager
def file_size_limit(folder: Path, size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A disk of its own in ``folder``, full but for ``size`` bytes."""
    (folder / "ballast").write_bytes(
        bytes(max(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - size, 0))
    )
    yield
    (folder / "ballast").unlink()


@pytest.fixture(params=["file size limit", "full disk"])
def little_room(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Path, Callable[[Path, int], Any]]]:
    if request.param == "file size limit":
        yield tmp_path, file_size_limit
        return
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "nsa-test", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting is refused here; the limit of file sizes is tested")
    try:
        yield folder, small_disk
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_and_the_work_goes_on(
    source: Path, tmp_path: Path, little_room, monkeypatch, count
) -> None:
    monkeypatch.setattr(preparation, "_COMMIT_S", 0.0)
    prepare(config_of(source), tmp_path / "whole")
    disk, limited = little_room
    said = 0
    for size in (30_000, 60_000, 90_000):
        with limited(disk, size), pytest.raises(UserError) as caught:
            prepare(config_of(source), disk / "cut")
        assert "--out must have room for the shards, got '" in str(caught.value)
        assert "Make room and give the same command again: it goes on where it stopped." in str(
            caught.value
        )
        said += 1
    prepare(config_of(source), disk / "cut")
    assert contents(disk / "cut") == contents(tmp_path / "whole")
    count("full disks, said and gone on", 3, said)


# ------------------------------------------------------------------------------------------------------
# a server's faults


@pytest.mark.faults
def test_a_server_that_stalls_or_hangs_up_anywhere(tmp_path: Path, count) -> None:
    """A short fault is overcome with every document in its place; one that lasts ends in an error within the time limit."""
    texts = make_texts(3000, longest=20)
    files = {
        path.name: path.read_bytes()
        for path in sorted(write_folder(tmp_path / "set", "parquet", texts, files=8).iterdir())
    }
    rng = random.Random(5)
    faults = {
        f"own/short-{i}": rng.choice([stall, hang_up])(rng.randrange(1, 9), 1) for i in range(20)
    }
    faults |= {
        f"own/lasting-{i}": rng.choice([stall, hang_up])(rng.randrange(1, 9), 10**9)
        for i in range(5)
    }
    with hub(dict.fromkeys(faults, files), faults) as address:
        attempts: list[tuple[str, float, dict[str, str]]] = [
            (name, 12.0 if "short" in name else 4.0, {}) for name in faults
        ]
        done = [
            result
            for part in range(0, 25, 5)
            for result in on_hub(address, tmp_path / "home", *attempts[part : part + 5])
        ]
    for name, result in zip(faults, done, strict=True):
        if "short" in name:
            assert result["error"] is None, (name, result["error"])
            assert result["texts"] == texts, name
        else:
            assert "must send documents within the time limit of 4 s" in result["error"][1]
            assert result["seconds"] < 15
    count("server faults, overcome or ended in time", len(faults), len(done))


# ----------------------------------------------------------------------------------------------------------------
# fuzzing


def configs(paths: dict[str, str]) -> st.SearchStrategy[dict[str, Any]]:
    """A sound configuration with up to three settings that may not belong there, or not exist."""
    sound: list[dict[str, Any]] = [
        {"source": "folder", "path": paths["text"], "validation_fraction": 0.3},
        {"source": "shards", "path": paths["shards"]},
        {
            "source": "stream",
            "path": paths["text"],
            "validation_fraction": 0.3,
            "validation_tokens": 100,
        },
        {
            "source": "stream",
            "path": paths["parquet"],
            "validation_fraction": 0.3,
            "validation_tokens": 500,
        },
        *({"source": task} for task in ("uniform", "copy", "induction", "needle")),
    ]
    odd: dict[str, list[Any]] = {
        "source": ["folder", "shards", "stream", "copy"],
        "path": [*paths.values(), None],
        "pattern": ["*", "*.txt", "*.nothing", "", "/etc/*"],
        "subset": [None, "small"],
        "split": ["train", "test", ""],
        "text_field": ["text", "number", "gone"],
        "time_limit_s": [30.0, 0.0, -1.0],
        "validation_tokens": [0, 1, 500, 10**9],
        "synthetic_fallback": ["none", "uniform", "copy"],
        "tokenizer": ["byte", "gpt2", "bpe", "file"],
        "tokenizer_path": [None, paths["tokenizer"], paths["text"]],
        "bpe_vocab_size": [0, 257, 300, 10**6],
        "validation_fraction": [0.0, 0.1, 0.3, 0.5, 0.7],
    }
    change = st.sampled_from([(name, value) for name, values in odd.items() for value in values])
    return st.builds(
        lambda base, changes: {**base, **dict(changes)},
        st.sampled_from(sound),
        st.lists(change, max_size=3),
    )


def fuzz(paths: dict[str, str], number: int) -> tuple[int, int]:
    """Open data at random: a batch that adds up, or an error that says what is wrong. How many of each."""
    opened = refused = 0

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(
        given=configs(paths),
        seq_len=st.sampled_from([20, 64, 1, 300, 10**7]),
        document_mask=st.booleans(),
    )
    def check(given: dict[str, Any], seq_len: int, document_mask: bool) -> None:
        nonlocal opened, refused
        try:
            data = open_data(DataConfig(**given), seed=3, seq_len=seq_len)
            batch = collate(
                data.train,
                data.sampler(seq_len, 3).next_windows(2),
                seq_len,
                document_mask=document_mask,
            )
        except UserError:
            refused += 1
            return
        opened += 1
        assert batch.tokens.shape == batch.targets.shape == (2 * seq_len,)
        assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < data.tokenizer.vocab_size
        counted = batch.targets[batch.targets >= 0]
        assert batch.num_targets == len(counted)
        assert batch.num_bytes == int(data.train.token_bytes[counted.numpy()].sum())
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == 2 * seq_len
        assert json.loads(json.dumps(data.description)) == data.description

    check()
    return opened, refused


@pytest.fixture(scope="module")
def paths(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("paths")
    write_folder(folder / "text", "txt", make_texts(30))
    write_folder(folder / "parquet", "parquet", make_texts(60))
    (folder / "empty").mkdir()
    (folder / "binary.parquet").write_bytes(np.random.default_rng(0).bytes(3000))
    names = ("text", "parquet", "empty", "binary.parquet")
    gone = str(folder / "not" / "there")
    return {
        **{name: str(folder / name) for name in names},
        "shards": str(shards),
        "gone": gone,
        "tokenizer": str(shards / TOKENIZER),
    }


def test_odd_configurations_of_data(paths: dict[str, str], count) -> None:
    opened, refused = fuzz(paths, 40)
    assert min(opened, refused) >= 8
    count("odd configurations of data, opened or refused", opened + refused, opened + refused)


@pytest.mark.faults
def test_odd_configurations_of_data_600_times(paths: dict[str, str], count) -> None:
    opened, refused = fuzz(paths, 600)
    assert min(opened, refused) >= 100
    count("odd configurations of data, opened or refused", opened + refused, opened + refused)


@settings(max_examples=40)
@given(data=st.data())
def test_odd_indexes_are_refused_by_name(
    data: st.DataObject, shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Fields left out or replaced, even under a hash that fits: nothing but an error that names the file."""
    from nsa.train.data.shards import index_digest

    index = json.loads((shards / INDEX).read_text())
    index.pop("sha256")
    node, places = index, []
    while True:
        key = data.draw(
            st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node)))
        )
        places.append(key)
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    relevant = places[0] in ("format", "sides") and "text_bytes" not in places
    node[key] = data.draw(st.sampled_from([None, -1, 0, 10**12, "", "../x", [], {}, 1.5, True]))
    folder = tmp_path_factory.mktemp("odd") / "out"
    shutil.copytree(shards, folder)
    (folder / INDEX).write_text(json.dumps({**index, "sha256": index_digest(index)}))
    said = ""
    try:
        open_data(DataConfig(source="shards", path=str(folder)), seed=0, seq_len=64)
    except UserError as error:
        said = str(error)
    assert str(folder) in said or (said == "" and not relevant), places
    shutil.rmtree(folder.parent)
