from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from nsa.errors import UserError
from nsa.train.data import Origin
from nsa.train.data.origin import DocumentBatch, Found, Place
from nsa.train.data.reader import read_documents
from tests.train.data.data_sets import (
    COMMIT,
    as_clone,
    hang_up,
    hub,
    make_texts,
    stall,
    write_folder,
    write_jsonl,
    write_parquet,
)

ROOT = Path(__file__).resolve().parents[3]
TEXTS = make_texts(200)


def as_list(texts: list[bytes]) -> list[str]:
    return [text.decode() for text in texts]


def batches_of(
    source: Path | str,
    transform: Callable[[list[bytes]], Any] = as_list,
    start: Place = Place(),  # noqa: B008
    **origin: Any,
) -> tuple[Found, list[DocumentBatch[Any]]]:
    origin_of = Origin(str(source), **origin)
    found, batches = read_documents(origin_of, transform, start=start, time_limit_s=60, threads=2)
    with closing(batches):
        return found, list(batches)


def read(source: Path | str, **how: Any) -> list[str]:
    return [text for batch in batches_of(source, **how)[1] for text in batch.payload]


def refusal(source: Path | str, **origin: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(source, **origin)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "reader", "files"),
    [
        ("parquet", "parquet", 3),
        ("jsonl", "json", 3),
        ("jsonl.gz", "json", 3),
        ("txt", "text", 200),
    ],
)
def test_every_form_gives_the_same_documents_in_order(kind, reader, files, tmp_path):
    found, batches = batches_of(write_folder(tmp_path / "set", kind, TEXTS))
    assert [text for batch in batches for text in batch.payload] == TEXTS
    assert (found.format, found.revision, found.licence) == (reader, None, None)
    assert len(found.files) == files
    assert all(not Path(name).is_absolute() for name in found.files)


def test_single_file_and_other_column(tmp_path):
    assert read(write_parquet(tmp_path / "a.parquet", TEXTS)) == TEXTS
    path = tmp_path / "b.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    assert read(path, text_field="body") == TEXTS


@pytest.mark.parametrize(
    ("kind", "rows"), [("parquet", (6, 7, 19, 20, 39)), ("jsonl", (6, 20)), ("txt", (7, 39))]
)
def test_reading_goes_on_from_any_place(kind, rows, tmp_path):
    """Places in the middle of row groups, at their borders, and at those of files."""
    source = write_folder(tmp_path / "set", kind, TEXTS[:40], files=2)
    size = 1 if kind == "txt" else 20
    batches = batches_of(source)[1]
    places = [(batch.start, batch.end) for batch in batches]
    assert places == [((file, 0), (file, size)) for file in range(40 // size)]
    for row in rows:
        assert read(source, start=Place(row // size, row % size)) == TEXTS[row:40]
    assert read(source, start=batches[-1].end) == []


def test_rows_without_text_are_empty(tmp_path):
    for write, name in ((write_parquet, "a.parquet"), (write_jsonl, "b.jsonl")):
        assert read(write(tmp_path / name, ["a", None, "", "b"])) == ["a", "", "", "b"]


def test_batches_are_of_bounded_size(tmp_path):
    texts = ["x" * 100_000] * 200 + ["y"] * 3000
    batches = batches_of(write_parquet(tmp_path / "a.parquet", texts, rows=500), len_of)[1]
    rows, sizes = zip(*(batch.payload for batch in batches), strict=True)
    assert sum(rows) == 3200
    assert max(rows) == 1000
    assert (1 << 20) - 100_000 < max(sizes) <= 1 << 20


def len_of(texts: list[bytes]) -> tuple[int, int]:
    return len(texts), sum(map(len, texts))


@pytest.mark.parametrize(
    ("name", "origin", "message"),
    [
        (
            "a.parquet",
            {"text_field": "body"},
            "text_field must be one of the columns of a.parquet (text, number), got body",
        ),
        (
            "a.parquet",
            {"text_field": "number"},
            "text_field must hold text in a.parquet, got int64",
        ),
        (".", {"split": "test"}, "split must be one of train, got test"),
        ("a.parquet", {"subset": "x"}, "subset must be left out for a single file, got x"),
        ("a.docx", {}, "source must have a name that ends in .parquet, .jsonl"),
        ("empty", {}, "source must hold files whose names end in .parquet, .jsonl, .json"),
    ],
)
def test_mistakes_are_named(name, origin, message, tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS[:5])
    (tmp_path / "a.docx").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    assert message in refusal(tmp_path / name, **origin)


def test_impossible_time_limit():
    with pytest.raises(ValueError, match="time_limit_s must be positive, got 0"):
        read_documents(Origin("own/set"), as_list, time_limit_s=0)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.parquet", b"PAR1" + 2000 * b"x", "ArrowInvalid: Parquet magic bytes not found"),
        ("a.parquet", b"", "ArrowInvalid: Parquet file size is 0 bytes."),
        ("a.jsonl", b'{"text": "fine"}\n{"text": broken\n', "Row 2 is not JSON: Expecting value"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "fine"}\n' * 99, mtime=0)[:-12],
            "EOFError: Compressed file",
        ),
        ("a.txt", b"\xff\xfe", "It has bytes that are not UTF-8 at offset 0"),
        ("a.md", b"a\0b", "It has a NUL byte at offset 1"),
        ("a.jsonl", b"[" * 100_000, "RecursionError: "),
    ],
)
def test_damaged_files_are_named(name, raw, message, tmp_path):
    (tmp_path / name).write_bytes(raw)
    assert f"{name}. {message}" in refusal(tmp_path / name)


def test_a_damaged_file_among_others_is_named(tmp_path):
    source = write_folder(tmp_path / "set", "parquet", make_texts(600), files=3)
    raw = bytearray((source / "part-00001.parquet").read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 200] = bytes(200)
    (source / "part-00001.parquet").write_bytes(bytes(raw))
    where = source / "part-00001.parquet"
    assert f"source must hold documents that can be read, got {where}. " in refusal(source)


def test_a_clone_from_the_hub_has_its_subsets(tmp_path):
    source = write_folder(tmp_path / "clone" / "data", "parquet", TEXTS).parent
    small, whole = (f"data_files: data/{name}.parquet" for name in ("part-00000", "*"))
    subsets = f"- config_name: small\n  {small}\n- config_name: all\n  {whole}\n"
    (source / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    assert read(source, subset="all") == TEXTS
    assert read(source, subset="small") == TEXTS[:67]
    assert "['small', 'all']" in refusal(source)
    assert "BuilderConfig 'huge' not found" in refusal(source, subset="huge")


def test_a_bug_in_the_reading_process_keeps_its_traceback(tmp_path):
    source = as_clone(write_folder(tmp_path / "set", "jsonl", TEXTS[:5]))
    with pytest.raises(RuntimeError, match="KeyError: 'a bug'"):
        batches_of(source, bug)


def bug(texts: list[bytes]) -> None:
    raise KeyError("a bug")


HUB_PROGRAM = """
import json, sys, time
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from nsa.errors import UserError
from nsa.train.data import Origin
from nsa.train.data.reader import read_documents
from tests.train.data.test_reader import as_list

def attempt(name, limit, **origin):
    begin, found, texts, error = time.monotonic(), None, [], None
    try:
        source, batches = read_documents(Origin(name, **origin), as_list, time_limit_s=limit)
        found = [source.revision, source.licence, source.format, list(source.files)]
        with closing(batches):
            for batch in batches:
                texts += batch.payload
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
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_hub(tmp_path):
    """The code that reads local copies reads the hub: at a commit, and in spite of faults."""
    readme = b"---\nconfigs:\n- config_name: small\n  data_files: data/*.parquet\n---\n"
    source = write_folder(tmp_path / "set", "parquet", TEXTS)
    data = {f"data/{path.name}": path.read_bytes() for path in sorted(source.iterdir())}
    names = ("own/good", "own/flaky", "own/slow", "own/dead")
    faults = {"own/flaky": hang_up(2, 1), "own/slow": stall(2, 1), "own/dead": stall(2, 10**9)}
    files = {"README.md": readme, **data}
    texts = {"a.txt": b"\xef\xbb\xbfone\r\ntwo\r", "b.txt": b"\r\n"}
    with hub({**dict.fromkeys(names, files), "own/texts": texts}, faults) as address:
        good, flaky, slow, dead, missing, subset, revision, unchanged = on_hub(
            address,
            tmp_path / "home",
            ("own/good", 30, {"subset": "small"}),
            ("own/flaky", 30, {}),
            ("own/slow", 8, {}),
            ("own/dead", 4, {}),
            ("own/missing", 30, {}),
            ("own/good", 30, {"subset": "huge"}),
            ("own/good", 30, {"revision": "v9"}),
            ("own/texts", 30, {}),
        )
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
    where = "own/missing (nor is there such a file or folder here)"
    assert f"source must exist on the hub, got {where}" in missing["error"][1]
    assert "huge" in subset["error"][1]
    assert "revision must exist on the hub, got v9" in revision["error"][1]


@pytest.mark.faults
def test_a_server_that_stalls_at_one_place_is_given_up(tmp_path):
    """Although each new process reaches the server and finds the files again."""
    source = write_folder(tmp_path / "set", "parquet", TEXTS)
    files = {path.name: path.read_bytes() for path in sorted(source.iterdir())}
    stop = threading.Event()

    def stall_in_the_second_file(handler: BaseHTTPRequestHandler, body: bytes) -> bool:
        return "part-00001" in handler.path and stop.wait(120)

    with hub({"own/stuck": files}, {"own/stuck": stall_in_the_second_file}) as address:
        (stuck,) = on_hub(address, tmp_path / "home", ("own/stuck", 12, {}))
        stop.set()
    assert "send documents within the time limit of 12 s, got none" in stuck["error"][1]
    assert stuck["texts"] == TEXTS[:67]


def test_without_network_the_error_comes_in_seconds(tmp_path):
    (refused,) = on_hub("http://127.0.0.1:9", tmp_path, ("own/set", 300, {}))
    assert refused["error"][0] == "DataUnavailableError"
    where = "own/set (there is no such file or folder here)"
    assert f"source must be reachable, got {where}" in refused["error"][1]
    assert "Check the network, or give a copy on this machine." in refused["error"][1]
    assert refused["seconds"] < 15  # of 300
