"""Files on this machine: which are read, what is skipped, and that no byte of them changes."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest

from nsa import cli
from nsa.cli.generation import _from_file, _given
from nsa.errors import UserError
from nsa.train.config import DataConfig
from nsa.train.data import (
    ByteTokenizer,
    DataBundle,
    Origin,
    PrepareConfig,
    open_data,
    open_shards,
    prepare,
)
from nsa.train.data.local import find_files
from nsa.train.data.reader import read_documents
from nsa.train.runs.inputs import read_text
from tests.train.data.data_sets import as_clone, make_texts, write_folder

TEXTS = make_texts(40)


def write(folder: Path, *names: str) -> Path:
    """Files that hold their own names, as a text or in a row."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_row = "json" in name
        path.write_text(json.dumps({"text": name}) + "\n" if is_row else name)
    return folder


def read(source: Path, **origin: Any) -> list[bytes]:
    _, batches = read_documents(Origin(str(source), **origin), list, time_limit_s=60)
    return [text for batch in batches for text in batch.payload]


NINE = [f"{name}-{kind}.txt" for name in "abc" for kind in ("notes", "test", "train")]


@pytest.mark.parametrize(
    ("there", "origin", "expected"),
    [
        (NINE, {}, NINE),
        (["my_test_notes.txt"], {}, ["my_test_notes.txt"]),
        (["README.md", "a.txt", "c.pdf", "d", "e/b.md"], {}, ["README.md", "a.txt", "e/b.md"]),
        (["a.txt", "b.py", "c.PY"], {"pattern": "*.py"}, ["b.py"]),
        (["a.txt", "b.jsonl", "c.csv"], {"pattern": "*.jsonl"}, ["b.jsonl"]),
        (["a.txt", "out/index.json", "out/progress.json", "out/tokenizer.json"], {}, ["a.txt"]),
        (["a.TXT", "config.json", ".b.txt", ".git/c.txt"], {}, ["a.TXT"]),
        (["README.md", "a.json", "b.json", "test.ndjson"], {}, ["a.json", "b.json", "test.ndjson"]),
        (["test/1.jsonl", "train-1.json", "train-2.json"], {}, ["train-1.json", "train-2.json"]),
        (["a.jsonl", "b-test.json", "train.json"], {}, ["a.jsonl", "b-test.json", "train.json"]),
        (["x_train.jsonl", "x_val.jsonl"], {"split": "validation"}, ["x_val.jsonl"]),
        (["trains.jsonl", "a-test.jsonl"], {"split": "test"}, ["a-test.jsonl"]),
        (["a-dev.jsonl", "b-test.jsonl"], {}, ["a-dev.jsonl", "b-test.jsonl"]),
    ],
)  # fmt: skip
def test_files_are_read_or_named(there, origin, expected, tmp_path):
    """Every file that does not begin with a dot is one or the other."""
    write(tmp_path, *there)
    assert read(tmp_path, **origin) == [name.encode() for name in expected]
    found = find_files(Origin(str(tmp_path), **origin))
    assert list(found.files) == expected
    visible = {name for name in there if not name.startswith(".")}
    assert {*found.files, *found.skipped} == visible


@pytest.mark.parametrize(
    ("there", "origin", "message"),
    [
        (
            ["a.txt", "b.txt", "c.jsonl"],
            {},
            r"source must hold files of one format, got a.txt beside c.jsonl in .*\. Choose with",
        ),
        (["a.jsonl", "b.parquet"], {}, "one format, got a.jsonl beside b.parquet"),
        (["a.csv"], {}, r"names end in .*\.md, maybe compressed, got a.csv in .*--pattern"),
        (["a.txt"], {"pattern": "*.py"}, "maybe compressed, got a.txt in"),
        (["a.txt"], {"pattern": "../*"}, r"pattern must be a glob below the folder"),
        (["a.txt"], {"split": "test"}, "split must be one of train, got test"),
        (["train.jsonl", "dev.jsonl"], {"split": "test"}, "one of train, validation, got test"),
        (["a.jsonl"], {"text_field": "body"}, r"columns of a.jsonl \(text\), got body"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(there, origin, message, tmp_path):
    write(tmp_path, *there)
    with pytest.raises(UserError, match=message):
        read(tmp_path, **origin)


def test_a_folder_keeps_its_fingerprint(tmp_path):
    """What ``datasets`` found in a folder is what is found now, so that preparations go on."""
    source = as_clone(write_folder(tmp_path / "set", "jsonl", TEXTS))
    found, batches = read_documents(Origin(str(source)), list, time_limit_s=60)
    batches.close()
    (source / "README.md").unlink()
    assert find_files(Origin(str(source))) == found


# --- rows -----------------------------------------------------------------------------------------
LINES = b'{"text": "one"}\n\n {"text": null, "n": 1}\r\n{"n": 2}\n'
LINES += b'{"text": "caf\xe9"}\n{"text": "\\ud800"}'
ROWS = [b"one", b"", b"", b"caf\xed\xb3\xa9", b"\xed\xa0\x80"]


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("a.jsonl", LINES, ROWS),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES, ROWS),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0), ROWS),
        ("a.json.bz2", bz2.compress(LINES), ROWS),
        ("a.ndjson.xz", lzma.compress(LINES), ROWS),
        ("a.jsonl.zst", pyarrow.compress(LINES, "zstd", asbytes=True), ROWS),
        ("a.json", b'\n[{"text": "one"},\n {"text": "two", "n": [1]}]', [b"one", b"two"]),
        ("a.json", b'["one", "two"]', [b"one", b"two"]),
        ("a.json", b"", []),
        ("a.md.gz", gzip.compress(b"one\r\n", mtime=0), [b"one\r\n"]),
    ],
)
def test_rows_of_every_form(name, raw, expected, tmp_path):
    (tmp_path / name).write_bytes(raw)
    assert read(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"text": "fine"}\n[1]\n', r"a.jsonl\. Row 2 is no object"),
        (b"[1, 2]", r"a.jsonl\. Row 1 is no object"),
        (b'{"text": 3}', "text_field must hold text in a.jsonl, got int"),
        (b'{"text": "fine"}\n{"text": "cut', r"a.jsonl\. Row 2 is not JSON: Unterminated string"),
    ],
)
def test_rows_that_are_none_are_named(raw, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(raw)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.jsonl")


# --- the same bytes on each way in ----------------------------------------------------------------
ODD = "\ufefffirst\r\nsecond\rthird\n\r\n  \u2028 end \r\n"


def shards_of(source: Path, out: Path, **config: Any) -> DataBundle:
    config = {"tokenizer": "byte", "validation_fraction": 0.25, **config}
    prepare(PrepareConfig(Origin(str(source)), **config), out)
    return open_data(
        DataConfig("shards", str(out), tokenizer=config["tokenizer"]), seed=0, seq_len=4
    )


def folder_of(source: Path, **config: Any) -> DataBundle:
    config = {"validation_fraction": 0.25, **config}
    return open_data(DataConfig("folder", str(source), **config), seed=0, seq_len=4)


def text_of(data: DataBundle, *sides: str) -> bytes:
    sources = (getattr(data, side) for side in sides)
    return b"".join(data.tokenizer.decode(source.read(0, 10**9)) for source in sources)


def test_a_text_is_the_same_bytes_on_each_way_in(tmp_path, monkeypatch):
    """Ends of lines and a byte order mark are text, wherever they come from."""
    raw, both = (40 * ODD).encode(), ("train", "validation")
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    row = tmp_path / "rows" / "b.jsonl"
    row.parent.mkdir()
    row.write_text(json.dumps({"text": 40 * ODD}))
    assert text_of(folder_of(path), *both) == raw
    assert text_of(shards_of(path, tmp_path / "out"), *both) == raw
    (tmp_path / "clone").mkdir()
    clone = as_clone(tmp_path / "clone")
    (clone / "part-0.txt").write_bytes(raw)
    assert read(path) == read(row) == read(clone) == [raw]
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    run: Any = SimpleNamespace(tokenizer=tmp_path / "tokenizer.json")
    given = SimpleNamespace(buffer=io.BytesIO(raw))
    monkeypatch.setattr("sys.stdin", given)
    assert read_text("eval", run, str(path)).tokens.tobytes() == raw + b"\0"
    assert read_text("eval", run, "-").tokens.tobytes() == raw + b"\0"
    given.buffer.seek(0)
    assert [prompt.encode() for prompt in _given(["-"])] == [raw]
    path.write_text("\ufeffone\r\ntwo\n", encoding="utf-8", newline="")
    assert _from_file(path) == ["\ufeffone", "two"]
    row.write_text('\ufeff{"text": "\ufeffone\\r\\n"}\r\n', encoding="utf-8", newline="")
    assert _from_file(row) == ["\ufeffone\r\n"]


@pytest.mark.parametrize(
    ("tokenizer", "fractions"),
    [("byte", {"test_fraction": 0.1}), ("byte", {}), ("bpe", {"test_fraction": 0.1})],
)
def test_one_text_sets_its_tail_aside_as_a_folder_does(tokenizer, fractions, tmp_path):
    """The vocabulary of bpe comes from its training part alone."""
    (tmp_path / "set").mkdir()
    text = "\n".join(TEXTS)
    (tmp_path / "set" / "a.md").write_text(text)
    given = {"tokenizer": tokenizer, "bpe_vocab_size": 300, **fractions}
    prepared = shards_of(tmp_path / "set", tmp_path / "out", max_tokens=10**9, **given)
    opened = folder_of(tmp_path / "set", **given)
    assert prepared.description["split_rule"] == opened.description["split_rule"] == "tail"
    assert prepared.tokenizer.fingerprint == opened.tokenizer.fingerprint
    for side in ("train", "validation", "test")[: 2 + len(fractions)]:
        first, second = (getattr(data, side).read(0, 10**9) for data in (prepared, opened))
        assert np.array_equal(first, second)
    sides = open_shards(tmp_path / "out").index["sides"].values()
    assert sum(side["text_bytes"] for side in sides) == len(text.encode())


# --- source folder, and commands ------------------------------------------------------------------
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.jsonl.gz"])
def test_a_folder_of_rows_is_refused_by_name(name, tmp_path):
    write(tmp_path, name)
    for path in (tmp_path, tmp_path / name):
        message = rf"data\.path must hold text; `nsa data prepare` reads .*, got {name}"
        with pytest.raises(UserError, match=message):
            folder_of(path)


def test_rows_beside_text_are_named(tmp_path, caplog):
    write(tmp_path, *(f"{number}.txt" for number in range(20)), "a.jsonl", "deep/b.parquet")
    data = folder_of(tmp_path)
    assert data.description["files_left_out"] == 2
    assert "skipped files: 2 (a.jsonl, deep/b.parquet)" in caplog.text
    assert b"jsonl" not in text_of(data, "train", "validation")


def test_the_command_names_what_it_skips(tmp_path, capsys):
    write(tmp_path / "set", *(f"{number}.txt" for number in range(40)), "a.pdf", "b.py")
    words = ["data", "prepare", str(tmp_path / "set"), "--tokenizer", "byte"]
    words += ["--validation-fraction", "0.3", "--out"]
    assert cli.main([*words, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("skipped files: 2 (a.pdf, b.py)\ntrain: ")
    assert open_shards(tmp_path / "out").index["source"]["num_skipped"] == 2
    assert cli.main([*words, str(tmp_path / "other"), "--pattern", "*"]) == 0
    assert "skipped" not in capsys.readouterr().out
