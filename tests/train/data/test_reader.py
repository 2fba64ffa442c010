"""Documents of data sets: what is read, in which order, what is skipped, and faults."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import threading
from contextlib import closing
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
    DataUnavailableError,
    Origin,
    PrepareConfig,
    open_data,
    open_shards,
    prepare,
)
from nsa.train.data.local import Documents, Found, Place, find_files
from nsa.train.data.reader import read_documents
from nsa.train.runs.evaluation import read_text
from tests.train.data.data_sets import (
    COMMIT,
    as_clone,
    hang_up,
    hub,
    make_texts,
    stall,
    write_folder,
    write_parquet,
)

ROOT = Path(__file__).resolve().parents[3]
TEXTS = make_texts(200)
RAW = [text.encode() for text in TEXTS]


def batches_of(
    source: Path | str, start: tuple[int, int] = (0, 0), **origin: Any
) -> tuple[Found, list[Documents]]:
    found, batches = read_documents(
        Origin(str(source), **origin), start=Place(*start), time_limit_s=60
    )
    with closing(batches):
        return found, list(batches)


def read(source: Path | str, **how: Any) -> list[bytes]:
    return [text for batch in batches_of(source, **how)[1] for text in batch.texts]


def write(folder: Path, names: str) -> None:
    """Write files that contain their own names, as a text or in a row."""
    for name in names.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n" if "json" in name else name)


# --- documents ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "form", "rows"),
    [
        ("parquet", "parquet", (0, 6, 7, 19, 20, 39)),
        ("jsonl.gz", "json", (0, 6, 20)),
        ("txt", "text", (0, 7, 39)),
    ],
)
def test_every_form_gives_the_same_documents_from_any_position(kind, form, rows, tmp_path):
    """Positions in the middle of row groups, at their borders, and at those of files."""
    source = write_folder(tmp_path / "set", kind, TEXTS[:40], files=2)
    found, batches = batches_of(source)
    assert (found.format, found.revision, found.licence) == (form, None, None)
    assert list(found.files) == sorted(path.name for path in source.iterdir())
    size = 40 // len(found.files)
    assert [batch.end for batch in batches] == [(file, size) for file in range(40 // size)]
    for row in rows:
        assert read(source, start=(row // size, row % size)) == RAW[row:40]
    assert read(source, start=batches[-1].end) == []


def test_batches_are_of_bounded_size(tmp_path):
    texts = ["x" * 100_000] * 200 + ["y"] * 3000
    batches = batches_of(write_parquet(tmp_path / "a.parquet", texts, rows=500))[1]
    assert sum(len(batch.texts) for batch in batches) == 3200
    assert max(len(batch.texts) for batch in batches) == 1000
    assert (1 << 20) - 100_000 < max(sum(map(len, batch.texts)) for batch in batches) <= 1 << 20


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


def test_rows_of_parquet_without_text_are_empty(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["a", None, "", "b"])
    assert read(path) == [b"a", b"", b"", b"b"]


NINE = "a-notes.txt a-test.txt a-train.txt b-notes.txt b-test.txt b-train.txt"


@pytest.mark.parametrize(
    ("there", "origin", "expected"),
    [
        (NINE, {}, NINE),
        ("my_test_notes.txt", {}, "my_test_notes.txt"),
        ("README.md a.txt c.pdf d e/b.md", {}, "README.md a.txt e/b.md"),
        ("a.txt b.py c.PY", {"pattern": "*.py"}, "b.py"),
        ("a.txt out/index.json out/progress.json out/tokenizer.json", {}, "a.txt"),
        ("a.TXT config.json .b.txt .git/c.txt", {}, "a.TXT"),
        ("README.md a.json b.json test.ndjson", {}, "a.json b.json test.ndjson"),
        ("a.jsonl b-test.json train.json", {}, "a.jsonl b-test.json train.json"),
        ("x_train.jsonl x_val.jsonl", {"split": "validation"}, "x_val.jsonl"),
        ("trains.jsonl a-test.jsonl", {"split": "test"}, "a-test.jsonl"),
        ("a-dev.jsonl b-test.jsonl", {}, "a-dev.jsonl b-test.jsonl"),
    ],
)
def test_files_are_read_or_named(there, origin, expected, tmp_path):
    """Every file that does not begin with a dot is one or the other."""
    write(tmp_path, there)
    found, batches = batches_of(tmp_path, **origin)
    assert b" ".join(text for batch in batches for text in batch.texts) == expected.encode()
    assert " ".join(found.files) == expected
    visible = {name for name in there.split() if not name.startswith(".")}
    assert {*found.files, *found.skipped} == visible


@pytest.mark.parametrize(
    ("there", "origin", "message"),
    [
        ("a.txt b.txt c.jsonl", {}, r"of one format, got a.txt beside c.jsonl in .*\. Choose"),
        ("a.csv", {}, r"names that end in .parquet, .*\.md, got a.csv in .*--pattern"),
        ("a.txt", {"pattern": "*.py"}, "names that end in .*, got a.txt in"),
        ("a.txt", {"pattern": "../*"}, r"pattern must be a glob below the folder"),
        ("a.txt", {"split": "test"}, "split must be one of train, got test"),
        ("train.jsonl dev.jsonl", {"split": "test"}, "one of train, validation, got test"),
        ("a.jsonl", {"text_field": "body"}, r"columns of a.jsonl \(text\), got body"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(there, origin, message, tmp_path):
    write(tmp_path, there)
    with pytest.raises(UserError, match=message):
        read(tmp_path, **origin)


CUT = gzip.compress(b'{"text": "fine"}\n' * 99, mtime=0)[:-12]


@pytest.mark.parametrize(
    ("name", "raw", "origin", "message"),
    [
        ("a.parquet", None, {"text_field": "body"}, r"a.parquet \(text, number\), got body"),
        ("a.parquet", None, {"text_field": "number"}, "must contain text in a.parquet, got int64"),
        ("a.parquet", None, {"subset": "x"}, "subset must be left out for a single file, got x"),
        ("a.parquet", b"PAR1" + 2000 * b"x", {}, r"a.parquet\. ArrowInvalid: Parquet mag"),
        ("a.docx", b"PK", {}, "source must be text, JSON or Parquet, with names that end in"),
        ("a.jsonl", b"[1, 2]", {}, r"a.jsonl\. Row 1 is no object"),
        ("a.jsonl", b'{"text": 3}', {}, "text_field must contain text in a.jsonl, got int"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cut', {}, r"a.jsonl\. Row 2 is not JSON: Un"),
        ("a.jsonl", b"[" * 100_000, {}, r"a.jsonl\. RecursionError: "),
        ("a.jsonl.gz", CUT, {}, r"a.jsonl.gz\. EOFError: Compressed file"),
        ("a.txt", b"\xff\xfe", {}, r"a.txt\. It has bytes that are not UTF-8 at offset 0"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, raw, origin, message, tmp_path):
    if raw is None:
        write_parquet(tmp_path / name, TEXTS[:5])
    else:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name, **origin)


def test_a_damaged_file_among_others_is_named(tmp_path):
    source = write_folder(tmp_path / "set", "parquet", make_texts(600), files=3)
    path = source / "part-00001.parquet"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 200] = bytes(200)
    path.write_bytes(bytes(raw))
    message = r"contain documents .*, got .*part-00001.parquet.*\. [A-Z]"
    for folder in (source, as_clone(source)):
        with pytest.raises(UserError, match=message):
            read(folder)
    with pytest.raises(ValueError, match="time_limit_s must be positive, got 0"):
        read_documents(Origin("own/set"), time_limit_s=0)


@pytest.mark.parametrize("source", ["texts/nothing.jsonl", "a/b/c", "/no/such/folder", "no/../x"])
def test_a_mistyped_path_is_refused_before_the_hub_is_asked(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nsa.train.data.reader._reading_process", None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "prepare", source, "--out", "out", "--tokenizer", "byte"]) == 2
    assert f"source must exist, got {source}. It is no name on the hub" in capsys.readouterr().err
    assert not Path("out").exists()
    with pytest.raises(DataUnavailableError):
        read(source)


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
    for name in (str(path), "-"):
        assert read_text(run, name).tokens.tobytes() == raw + b"\0"
    given.buffer.seek(0)
    assert [prompt.encode() for prompt in _given(["-"])] == [raw]
    path.write_text("\ufeffone\r\ntwo\n", encoding="utf-8", newline="")
    assert _from_file(path) == ["\ufeffone", "two"]


def test_one_text_sets_its_tail_aside_as_a_folder_does(tmp_path):
    """The vocabulary of bpe comes from its training part alone."""
    (tmp_path / "a.md").write_text("\n".join(TEXTS[:40]))
    given = {"tokenizer": "bpe", "bpe_vocab_size": 300, "test_fraction": 0.1}
    prepared = shards_of(tmp_path / "a.md", tmp_path / "out", max_tokens=10**9, **given)
    opened = folder_of(tmp_path / "a.md", **given)
    assert prepared.description["split_rule"] == opened.description["split_rule"] == "tail"
    for side in ("train", "validation", "test"):
        first, second = (getattr(data, side).read(0, 10**9) for data in (prepared, opened))
        assert np.array_equal(first, second)
        size = f"{side}_bytes"
        assert prepared.description[size] == opened.description[size]


# --- source folder, and commands ------------------------------------------------------------------
def test_rows_beside_text_are_named_and_rows_alone_refused(tmp_path, caplog):
    names = "a.jsonl b.json c.parquet d.jsonl.gz"
    write(tmp_path, names)
    for path, found in ((tmp_path, "a.jsonl, b.json"), (tmp_path / "c.parquet", "c.parquet")):
        message = rf"data\.path must contain text; `nsa data prepare` reads .*, got {found}"
        with pytest.raises(UserError, match=message):
            folder_of(path)
    write(tmp_path, " ".join(f"{number}.txt" for number in range(20)))
    data = folder_of(tmp_path)
    assert data.description["files_left_out"] == 4
    assert f"skipped files: 4 ({', '.join(names.split())}): `nsa data prepare`" in caplog.text
    assert b"jsonl" not in text_of(data, "train", "validation")


def test_the_command_names_what_it_skips(tmp_path, caplog):
    write(tmp_path / "set", " ".join(f"{number}.txt" for number in range(40)) + " a.pdf b.py")
    words = ["data", "prepare", str(tmp_path / "set"), "--tokenizer", "byte"]
    words += ["--validation-fraction", "0.3", "--out"]
    assert cli.main([*words, str(tmp_path / "out")]) == 0
    assert caplog.messages == ["skipped files: 2 (a.pdf, b.py)"]
    assert open_shards(tmp_path / "out").index["source"]["num_skipped"] == 2
    assert cli.main([*words, str(tmp_path / "other"), "--pattern", "*"]) == 0
    assert len(caplog.messages) == 1


# --- the hub, and local copies of it --------------------------------------------------------------
def test_a_clone_has_the_fingerprint_of_the_folder(tmp_path):
    """So a preparation or a run goes on with either."""
    source = as_clone(write_folder(tmp_path / "set", "jsonl", TEXTS[:40]))
    found, _ = batches_of(source)
    (source / "README.md").unlink()
    assert find_files(Origin(str(source))) == found


def test_a_clone_has_its_subsets(tmp_path):
    source = write_folder(tmp_path / "clone" / "data", "parquet", TEXTS).parent
    small, whole = (f"data_files: data/{name}.parquet" for name in ("part-00000", "*"))
    subsets = f"- config_name: small\n  {small}\n- config_name: all\n  {whole}\n"
    (source / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    assert read(source, subset="all") == RAW
    assert read(source, subset="all", start=(1, 60)) == RAW[127:]
    assert read(source, subset="small") == RAW[:67]
    for origin, message in (
        ({}, r"\['small', 'all'\]"),
        ({"subset": "huge"}, "BuilderConfig 'huge' not found"),
        ({"subset": "all", "split": "test"}, "split must be one of train, got test"),
        ({"subset": "all", "text_field": "body"}, "columns of data/part-00000.parquet"),
        ({"subset": "all", "pattern": "*"}, "pattern must be left out for a data set of the hub"),
    ):
        with pytest.raises(UserError, match=message):
            read(source, **origin)


HUB_PROGRAM = """
import json, sys, time
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from nsa.errors import UserError
from nsa.train.data import Origin
from nsa.train.data.reader import read_documents

def attempt(name, limit, **origin):
    begin, found, texts, error = time.monotonic(), None, [], None
    try:
        source, batches = read_documents(Origin(name, **origin), time_limit_s=limit)
        found = [source.revision, source.licence, source.format, list(source.files)]
        with closing(batches):
            for batch in batches:
                texts += [text.decode() for text in batch.texts]
    except UserError as caught:
        error = [type(caught).__name__, str(caught)]
    return dict(seconds=time.monotonic() - begin, found=found, texts=texts, error=error)

if __name__ == "__main__":
    # Starts the process that the others are forked from, which takes long on a busy machine.
    attempt("own/nothing", 60)
    attempts = json.loads(sys.argv[1])
    print(json.dumps([attempt(name, limit, **origin) for name, limit, origin in attempts]))
"""


def on_hub(
    address: str,
    home: Path,
    *attempts: tuple[str, float, dict[str, str]],
) -> list[dict[str, Any]]:
    """Attempts to read from the hub at an address, which libraries read on import."""
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **settings}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", HUB_PROGRAM, json.dumps(attempts)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_hub(tmp_path):
    """The code that reads local copies reads the hub: at a commit, and in spite of faults."""
    readme = b"---\nconfigs:\n- config_name: small\n  data_files: data/*.parquet\n---\n"
    source = write_folder(tmp_path / "set", "parquet", TEXTS)
    data = {f"data/{path.name}": path.read_bytes() for path in sorted(source.iterdir())}
    names = ("own/good", "own/flaky", "own/slow", "own/dead", "own/stuck")
    faults = {"own/flaky": hang_up(2, 1), "own/slow": stall(2, 1), "own/dead": stall(2, 10**9)}
    files = {"README.md": readme, **data}
    texts = {"a.txt": b"\xef\xbb\xbfone\r\ntwo\r", "b.txt": b"\r\n"}
    stop = threading.Event()

    def stall_in_the_second_file(handler, body):
        return "part-00001" in handler.path and stop.wait(120)

    faults["own/stuck"] = stall_in_the_second_file
    with hub({**dict.fromkeys(names, files), "own/texts": texts}, faults) as address:
        good, flaky, slow, dead, stuck, missing, subset, revision, unchanged = on_hub(
            address,
            tmp_path / "home",
            ("own/good", 30, {"subset": "small"}),
            ("own/flaky", 30, {}),
            ("own/slow", 8, {}),
            ("own/dead", 4, {}),
            ("own/stuck", 12, {}),
            ("own/missing", 30, {}),
            ("own/good", 30, {"subset": "huge"}),
            ("own/good", 30, {"revision": "v9"}),
            ("own/texts", 30, {}),
        )
        stop.set()
    assert [text.encode() for text in unchanged["texts"]] == [*texts.values()]
    assert good["error"] is None
    assert good["found"] == [COMMIT, "odc-by", "parquet", list(data)]
    assert good["texts"] == flaky["texts"] == slow["texts"] == TEXTS
    assert slow["seconds"] > 2  # a quarter of its limit
    kind, message = dead["error"]
    assert kind == "DataUnavailableError"
    assert "send documents within the time limit of 4 s, got none from own/dead. Attem" in message
    assert "Silent for" in message
    assert 3 < dead["seconds"] < 12
    assert "send documents within the time limit of 12 s, got none" in stuck["error"][1]
    assert stuck["texts"] == TEXTS[:67]  # although each new process finds the files again
    where = "own/missing (nor is there such a file or folder here)"
    assert f"source must exist on the hub, got {where}" in missing["error"][1]
    assert "huge" in subset["error"][1]
    assert "revision must exist on the hub, got v9" in revision["error"][1]


def test_without_network_the_error_comes_in_seconds(tmp_path):
    (refused,) = on_hub("http://127.0.0.1:9", tmp_path, ("own/set", 300, {}))
    assert refused["error"][0] == "DataUnavailableError"
    where = "own/set (there is no such file or folder here)"
    assert f"source must be reachable, got {where}" in refused["error"][1]
    assert "Check the network, or give a copy on this machine." in refused["error"][1]
    assert refused["seconds"] < 15  # of 300
