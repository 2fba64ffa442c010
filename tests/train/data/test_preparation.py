from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsa.errors import UserError
from nsa.train.config import DataConfig
from nsa.train.data import Origin, PrepareConfig, open_data, open_shards, preparation, prepare
from nsa.train.data.documents import SIDES, side_of
from nsa.train.data.shards import INDEX, OFFSET_DTYPE, PROGRESS, with_digest
from tests.train.cases import contents
from tests.train.data.data_sets import make_texts, write_folder, write_jsonl, write_parquet

TEXTS = make_texts(300)
SHARE, TEST_SHARE = 0.2, 0.1


def config_of(source: Path, **changes: Any) -> PrepareConfig:
    settings = {"tokenizer": "byte", "validation_fraction": SHARE, "test_fraction": TEST_SHARE}
    settings["shard_tokens"] = 15_000
    return PrepareConfig(Origin(str(source)), **{**settings, **changes})


class _InterruptedError(Exception):
    pass


def interrupt(line: str) -> None:
    raise _InterruptedError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("source") / "set", "parquet", TEXTS)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(config_of(source), out)
    return out


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_shards_contain_the_documents_of_each_split_in_order(tokenizer, source, tmp_path):
    out = tmp_path / "out"
    index = prepare(config_of(source, tokenizer=tokenizer, bpe_vocab_size=400), out, workers=2)
    assert not {path.name for path in out.iterdir()} & {PROGRESS, "prepare.lock"}
    shards, before = open_shards(out), contents(out)
    assert shards.index == index == json.loads((out / INDEX).read_text())
    for side in SIDES:
        expected = [text for text in TEXTS if side_of(text.encode(), SHARE, TEST_SHARE) == side]
        of_side, found = index["sides"][side], []
        assert of_side["documents"] == len(expected)
        assert of_side["text_bytes"] == sum(len(text.encode()) for text in expected)
        for shard in of_side["shards"]:
            path = out / shard["name"]
            tokens = np.fromfile(f"{path}.tokens", np.dtype(index["token_dtype"]))
            starts = np.fromfile(f"{path}.offsets", OFFSET_DTYPE).astype(int)
            for document in np.split(tokens, starts[1:]):
                assert document[-1] == shards.tokenizer.separator_id
                found.append(shards.tokenizer.decode(document).decode())
        assert found == expected
    assert len(index["sides"]["train"]["shards"]) > 1
    assert index["tokenizer"]["kind"] == tokenizer == shards.tokenizer.kind
    again = config_of(source, tokenizer=tokenizer, bpe_vocab_size=400)
    assert prepare(again, out, on_progress=interrupt) == index  # nothing is read again
    assert contents(out) == before


def test_result_depends_on_the_documents_alone(source, whole, tmp_path):
    """Not on the number of workers, nor on the form in which the documents come."""
    for workers in (1, 3):
        prepare(config_of(source, tokenizer="gpt2"), tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    prepare(config_of(write_jsonl(tmp_path / "all.jsonl.gz", TEXTS)), tmp_path / "jsonl")
    first, second = contents(whole), contents(tmp_path / "jsonl")
    assert first.pop(INDEX) != second.pop(INDEX)
    assert first == second


def test_rows_without_text_are_counted_and_copies_stay_together(tmp_path):
    rows = [None, "", "a\0b", *TEXTS[:50] * 3]
    index = prepare(config_of(write_parquet(tmp_path / "a.parquet", rows)), tmp_path / "out")
    assert index["left_out"] == {"empty": 2, "unreadable": 1}
    sides = [side_of(text.encode(), SHARE, TEST_SHARE) for text in TEXTS[:50]]
    found = {side: index["sides"][side]["documents"] for side in SIDES}
    assert found == {side: 3 * sides.count(side) for side in SIDES}


def test_max_tokens_ends_with_the_document_that_reaches_it(source, tmp_path):
    rows = [(side_of(text.encode(), SHARE, TEST_SHARE), len(text.encode()) + 1) for text in TEXTS]
    total = sum(size for side, size in rows if side == "train")
    for limit in (total // 3, total + 1):
        index = prepare(config_of(source, max_tokens=limit), tmp_path / str(limit))
        expected = dict.fromkeys(SIDES, 0)
        for side, size in rows:
            expected[side] += size
            if expected["train"] >= limit:
                break
        assert {side: index["sides"][side]["tokens"] for side in SIDES} == expected


@pytest.mark.parametrize("max_tokens", [None, 60_000])
def test_interrupted_preparation_continues(tmp_path, monkeypatch, max_tokens):
    """Interrupted again and again, with and without a commit before; the result is the same."""
    source = write_folder(tmp_path / "set", "jsonl", make_texts(7500, longest=5), files=5)
    config = config_of(source, max_tokens=max_tokens)  # ten batches
    prepare(config, tmp_path / "whole")
    for attempt in itertools.count():
        batches = itertools.count(attempt % 2)

        def interrupt_later(line, batches=batches):
            if next(batches) == 1:
                raise _InterruptedError

        monkeypatch.setattr(preparation, "_COMMIT_S", 0.0 if attempt % 3 else 1e9)
        try:
            prepare(config, tmp_path / "cut", on_progress=interrupt_later)
            break
        except _InterruptedError:
            assert (tmp_path / "cut" / PROGRESS).exists()
    assert attempt > 3
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_data_of_before_there_was_a_test_split_stay_usable(source, tmp_path):
    out, config = tmp_path / "out", config_of(source, test_fraction=0.0)
    index = prepare(config, out)
    del index["request"]["test_fraction"]
    (out / INDEX).write_text(json.dumps(with_digest(index)))
    assert prepare(config, out)["sides"].keys() == {"train", "validation"}
    settings = DataConfig("shards", str(out))
    assert open_data(settings, seed=0, seq_len=64).test is None
    for changes, name in (
        ({"test_fraction": TEST_SHARE}, r"test_fraction must be 0\.0"),
        ({"tokenizer": "gpt2"}, "tokenizer must be byte"),
        ({"origin": Origin("other")}, "source must be .*set"),
    ):
        message = f"{name} as in .*out so far, got .* Give another --out"
        with pytest.raises(UserError, match=message):
            prepare(dataclasses.replace(config, **changes), out)


@pytest.mark.parametrize("content", ["{", "{}", '{"shards": {}, "sha256": "0"}'])
def test_a_folder_that_cannot_be_used_stays_as_it_was(content, source, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"--out must be a new folder, .*, got one with thesis"):
        prepare(config_of(source), tmp_path)
    with pytest.raises(UserError, match="must exist"):
        prepare(config_of(tmp_path / "no" / "such" / "folder"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with (tmp_path / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="--out must be a folder that no other process"):
            prepare(config_of(source), tmp_path)
    (tmp_path / PROGRESS).write_text(content)
    with pytest.raises(UserError, match=rf"{PROGRESS} must be JSON with the SHA-256 .*emove"):
        prepare(config_of(source), tmp_path)


def test_a_mistaken_start_is_corrected_in_the_same_folder(source, whole, tmp_path):
    """Nothing had been read for it, so there is nothing to protect."""
    origin = Origin(str(source), text_field="body")
    with pytest.raises(UserError, match="text_field must be one of the columns"):
        prepare(dataclasses.replace(config_of(source), origin=origin), tmp_path / "out")
    (tmp_path / "out" / "train-00000.tokens").write_bytes(b"not committed")
    prepare(config_of(source), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(whole)


def test_changed_source_is_noticed(tmp_path):
    source = write_folder(tmp_path / "set", "jsonl", TEXTS)
    with pytest.raises(_InterruptedError):
        prepare(config_of(source), tmp_path / "out", on_progress=interrupt)
    write_jsonl(source / "part-00003.jsonl", ["more"])
    message = "SOURCE must contain the same files as before the interruption, got other files in"
    with pytest.raises(UserError, match=message):
        prepare(config_of(source), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_fraction": 0.0}, "--validation-fraction must be above 0 and at most 0.5"),
        (
            {"test_fraction": 0.4},
            r"--test-fraction must be .* --validation-fraction \(0.2\), got 0.4",
        ),
        ({"max_tokens": 0}, "--max-tokens must be positive, got 0"),
        ({"tokenizer_path": "x"}, "--tokenizer-path must be given with .* only then, got x"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(UserError, match=message):
        config_of(Path("x"), **changes)
