from __future__ import annotations

import dataclasses
import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsa.errors import UserError
from nsa.train.config import DataConfig
from nsa.train.data import Origin, PrepareConfig, make_tokenizer, open_shards, preparation, prepare
from nsa.train.data.documents import SIDES, side_of
from nsa.train.data.shards import INDEX, OFFSET_DTYPE, PROGRESS, STAMP
from tests.train.data.data_sets import make_texts, write_folder, write_jsonl, write_parquet

TEXTS = make_texts(300)
SHARE = 0.2


def config_of(source: Path, **changes: Any) -> PrepareConfig:
    settings = {"tokenizer": "byte", "validation_fraction": SHARE, "shard_tokens": 20_000, **changes}
    return PrepareConfig(Origin(str(source)), **settings)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != STAMP}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("source") / "set", "parquet", TEXTS)


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "bpe"])
def test_shards_hold_the_documents_of_each_side_in_order(tokenizer: Any, source: Path, tmp_path: Path) -> None:
    index = prepare(config_of(source, tokenizer=tokenizer, bpe_vocab_size=400), tmp_path / "out", workers=2)
    assert not {path.name for path in (tmp_path / "out").iterdir()} & {PROGRESS, "prepare.lock"}
    shards = open_shards(tmp_path / "out")
    assert shards.index == index == json.loads((tmp_path / "out" / INDEX).read_text())
    for side in SIDES:
        expected = [text for text in TEXTS if side_of(text.encode(), SHARE) == side]
        of_side = index["sides"][side]
        assert of_side["documents"] == len(expected)
        assert of_side["text_bytes"] == sum(len(text.encode()) for text in expected)
        found = []
        for shard in of_side["shards"]:
            tokens = np.fromfile(tmp_path / "out" / f"{shard['name']}.tokens", np.dtype(index["token_dtype"]))
            starts = np.fromfile(tmp_path / "out" / f"{shard['name']}.offsets", OFFSET_DTYPE)
            for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
                assert tokens[int(stop) - 1] == shards.tokenizer.separator_id
                found.append(shards.tokenizer.decode(tokens[int(start) : int(stop)]).decode())
        assert found == expected
    assert len(index["sides"]["train"]["shards"]) > 1
    assert index["tokenizer"]["kind"] == tokenizer == shards.tokenizer.kind
    if tokenizer != "bpe":
        made = make_tokenizer(DataConfig(tokenizer=tokenizer), ())
        assert shards.tokenizer.fingerprint == made.fingerprint


def test_result_depends_on_the_documents_alone(source: Path, tmp_path: Path) -> None:
    """Not on the number of workers, nor on the form in which the documents come."""
    prepare(config_of(source), tmp_path / "one", workers=1)
    prepare(config_of(source), tmp_path / "three", workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    prepare(config_of(write_jsonl(tmp_path / "all.jsonl.gz", TEXTS)), tmp_path / "jsonl")
    first, second = contents(tmp_path / "one"), contents(tmp_path / "jsonl")
    assert first.pop(INDEX) != second.pop(INDEX)
    assert first == second


def test_what_is_no_text_is_left_out_and_counted(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["good " * 50, None, "", "a\0b", *TEXTS[:20]])
    index = prepare(config_of(path), tmp_path / "out")
    assert index["left_out"] == {"empty": 2, "unreadable": 1}
    assert sum(index["sides"][side]["documents"] for side in SIDES) == 21


def test_copies_of_a_document_are_on_the_same_side(tmp_path: Path) -> None:
    index = prepare(config_of(write_jsonl(tmp_path / "a.jsonl", TEXTS[:50] * 3)), tmp_path / "out")
    for side in SIDES:
        assert index["sides"][side]["documents"] == 3 * sum(side_of(text.encode(), SHARE) == side for text in TEXTS[:50])


def test_max_tokens_ends_with_the_document_that_reaches_it(source: Path, tmp_path: Path) -> None:
    sizes = [(side_of(text.encode(), SHARE), len(text.encode()) + 1) for text in TEXTS]
    total = sum(size for side, size in sizes if side == "train")
    first_held_out = [side for side, _ in sizes].index("validation")
    least = sum(size for _, size in sizes[:first_held_out]) + 1
    for limit in (least, total // 2, total, total + 1):
        index = prepare(config_of(source, max_tokens=limit), tmp_path / str(limit))
        expected = dict.fromkeys(SIDES, 0)
        for side, size in sizes:
            expected[side] += size
            if expected["train"] >= limit:
                break
        assert {side: index["sides"][side]["tokens"] for side in SIDES} == expected


class _InterruptedError(Exception):
    pass


@pytest.mark.parametrize("max_tokens", [None, 60_000])
def test_interrupted_preparation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int | None) -> None:
    """Interrupted again and again, with and without a commit before; nothing of the result shows it."""
    texts = make_texts(7500, longest=5)  # eight batches
    config = config_of(write_folder(tmp_path / "set", "jsonl", texts, files=5), max_tokens=max_tokens)
    prepare(config, tmp_path / "whole")
    attempts, is_done = 0, False
    while not is_done:
        left = 2 + attempts % 2

        def interrupt(report: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise _InterruptedError

        monkeypatch.setattr(preparation, "_COMMIT_S", 0.0 if attempts % 3 else 1e9)
        attempts += 1
        try:
            prepare(config, tmp_path / "cut", on_progress=interrupt)
            is_done = True
        except _InterruptedError:
            assert (tmp_path / "cut" / PROGRESS).exists()
    assert attempts > 3
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_complete_preparation_is_not_repeated(source: Path, tmp_path: Path) -> None:
    index = prepare(config_of(source), tmp_path / "out")
    before = contents(tmp_path / "out")

    def never(report: object) -> None:
        raise AssertionError("something was done again")

    assert prepare(config_of(source), tmp_path / "out", on_progress=never) == index
    assert contents(tmp_path / "out") == before


def test_folders_of_others_are_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(config_of(source), out)
    for changes, message in (
        ({"tokenizer": "gpt2"}, "tokenizer must be byte as in .*out so far, got gpt2. Give another --out"),
        ({"validation_fraction": 0.1}, "validation_fraction must be 0.2 as in .*out so far, got 0.1"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(config_of(source, **changes), out)
    with pytest.raises(UserError, match=r"source must be .*set as in .*out so far, got .*elsewhere"):
        prepare(dataclasses.replace(config_of(source), origin=Origin(str(tmp_path / "elsewhere"))), out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"--out must be a new folder, or one that prepare has begun, got one with thesis\.tex"):
        prepare(config_of(source), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must exist"):
        prepare(config_of(tmp_path / "no" / "such" / "folder"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mistaken_start_is_corrected_in_the_same_folder(source: Path, tmp_path: Path) -> None:
    """Nothing had been read for it, so there is nothing to protect."""
    mistaken = dataclasses.replace(config_of(source), origin=Origin(str(source), text_field="body"))
    with pytest.raises(UserError, match="text_field must be one of the columns"):
        prepare(mistaken, tmp_path / "out")
    (tmp_path / "out" / "train-00000.tokens").write_bytes(b"not committed")
    prepare(config_of(source), tmp_path / "out")
    prepare(config_of(source), tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_second_preparation_in_the_same_folder_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="--out must be a folder that no other process prepares data in"):
            prepare(config_of(source), tmp_path / "out")


def test_changed_source_is_noticed(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "set", "jsonl", TEXTS)

    def interrupt(report: object) -> None:
        raise _InterruptedError

    with pytest.raises(_InterruptedError):
        prepare(config_of(source), tmp_path / "out", on_progress=interrupt)
    write_jsonl(source / "part-00003.jsonl", ["more"])
    with pytest.raises(UserError, match="SOURCE must hold the same files as before the interruption, got other files in"):
        prepare(config_of(source), tmp_path / "out")


def test_damaged_notes_are_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name, content in ((PROGRESS, "{"), (PROGRESS, "[]"), (INDEX, "{}")):
        (tmp_path / "out" / name).write_text(content)
        with pytest.raises(UserError, match=rf"{name} must be .*Remove the folder to start anew"):
            prepare(config_of(source), tmp_path / "out")
        (tmp_path / "out" / name).unlink()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_fraction": 0.0}, "--validation-fraction must be above 0 and at most 0.5, got 0.0"),
        ({"max_tokens": 0}, "--max-tokens must be positive, got 0"),
        ({"shard_tokens": 0}, "--shard-tokens must be positive, got 0"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(Path("x"), **changes)
