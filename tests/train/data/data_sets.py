"""Small data sets in every form that can be read, and a hub that hands them out, well or badly."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow
import pyarrow.parquet

WORDS = ["sea", "and", "stone", "were", "old", "when", "é ß", "漢字", "🙂", "name\n"]
WORDS += ["for", "either,", "of", "them.", "don't"]


def make_texts(number: int, seed: int = 0, longest: int = 120) -> list[str]:
    """Different documents of 1 to ``longest`` words."""
    rng = np.random.default_rng(seed)
    words = (rng.choice(WORDS, size=rng.integers(1, longest)) for _ in range(number))
    return [" ".join([str(i), *of_text]) for i, of_text in enumerate(words)]


def write_parquet(path: Path, texts: Sequence[str | None], *, rows: int = 7) -> Path:
    """A Parquet file of several row groups with the text and a column of numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(
        {"text": pyarrow.array(texts, pyarrow.string()), "number": range(len(texts))}
    )
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def write_jsonl(path: Path, texts: Sequence[str | None]) -> Path:
    """JSON lines, compressed if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"text": text, "number": i}) + "\n" for i, text in enumerate(texts)]
    raw = "".join(rows).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def write_folder(path: Path, kind: str, texts: Sequence[str], files: int = 3) -> Path:
    """The same documents in the same order as ``files`` files; of kind ``txt``, one file each."""
    if kind == "txt":
        path.mkdir(parents=True)
        for number, text in enumerate(texts):
            (path / f"{number:05d}.txt").write_text(text, encoding="utf-8", newline="")
        return path
    write = write_parquet if kind == "parquet" else write_jsonl
    for number, part in enumerate(np.array_split(np.arange(len(texts)), files)):
        write(path / f"part-{number:05d}.{kind}", [texts[i] for i in part])
    return path


def as_clone(folder: Path) -> Path:
    """The folder with a card as on the hub, so that a process of its own reads it."""
    card = "---\nconfigs:\n- config_name: default\n  data_files: part-*\n---\n"
    (folder / "README.md").write_text(card)
    return folder


COMMIT = "c0ffee" + 34 * "0"
Fault = Callable[[BaseHTTPRequestHandler, bytes], bool]


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as reading a data set takes."""

    protocol_version = "HTTP/1.1"
    data_sets: dict[str, dict[str, bytes]]
    faults: dict[str, Fault]

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        asked = re.fullmatch(r"(/api)?/datasets/([^/]+/[^/]+)(?:/(\w+)/([^/]+)/?(.*))?", path)
        if asked is None or asked[2] not in self.data_sets:
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
            return
        _, name, kind, revision, place = asked.groups()
        files = self.data_sets[name]
        if not asked[1]:
            self._send_file(files.get(place), self.faults.get(name))
        elif kind == "tree":
            self._send(json.dumps(_tree(files, place)).encode())
        elif revision not in (None, "main", COMMIT):
            self._send(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": file} for file in files]
            about = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": []}
            self._send(json.dumps(about | {"cardData": {"license": "odc-by"}}).encode())

    def _send_file(self, content: bytes | None, fault: Fault | None) -> None:
        if content is None:
            self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        headers = {"ETag": '"0"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            self._send(content, 200, headers)
            return
        start, stop = int(part[1]), min(int(part[2] or len(content) - 1) + 1, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._send(content[start:stop], 206, headers, fault)

    def _send(
        self,
        body: bytes,
        status: int = 200,
        headers: dict[str, str] | None = None,
        fault: Fault | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and not (fault is not None and fault(self, body)):
            self.wfile.write(body)


def _tree(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    """Entries of a folder, of the first level."""
    prefix, found = f"{folder}/" if folder else "", {}
    for name, content in files.items():
        if name.startswith(prefix):
            entry, slash, _ = name.removeprefix(prefix).partition("/")
            kind, size = ("directory", 0) if slash else ("file", len(content))
            oid = hashlib.sha1(content).hexdigest()
            found[entry] = {"path": prefix + entry, "oid": oid, "type": kind, "size": size}
    return list(found.values())


@contextmanager
def hub(data_sets: dict[str, dict[str, bytes]], faults: dict[str, Fault]) -> Iterator[str]:
    """A hub on this machine; yields its address.

    Args:
        data_sets: by name, the content of each file by path.
        faults: by the name of a data set, what is called before a part of a file is sent; True if
            it has dealt with it.
    """
    handler = type("Handler", (_Hub,), {"data_sets": data_sets, "faults": faults})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def stall(after: int, times: int, then_s: float = 120) -> Fault:
    """Half of what was asked for, then nothing: ``times`` times, after that many good answers."""
    answers = itertools.count()

    def send(handler: BaseHTTPRequestHandler, body: bytes) -> bool:
        if not after <= next(answers) < after + times:
            return False
        handler.wfile.write(body[: len(body) // 2])
        handler.wfile.flush()
        handler.close_connection = True
        time.sleep(then_s)
        return True

    return send


def hang_up(after: int, times: int) -> Fault:
    """As :func:`stall`, but the connection ends."""
    return stall(after, times, then_s=0)
