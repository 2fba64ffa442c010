"""Shards of FineWeb's form, from text that is on every machine, prepared as docs/data.md says."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nsa.train.data.documents import corpus_files, stdlib_files
from tools.accept.programs import Ended, last_lines
from tools.accept.setting import NSA, Setting

TRAIN_TOKENS = 6_000_000
VALIDATION_FRACTION = 0.03
LIMIT_S = 240.0
# FineWeb's documents: some hundred tokens each, a few of them very long, some of one line.
MEDIAN_CHARACTERS, SPREAD = 2_000, 1.2
ROWS_PER_FILE = 5_000

Run = Callable[[Sequence[str], Path, float], Ended]


@dataclass(frozen=True)
class Prepared:
    """Shards in a folder, or why there are none.

    Attributes:
        folder: of ``nsa data prepare``.
        log: its output.
        fault: what went wrong; empty otherwise.
    """

    folder: Path
    log: Path
    fault: str = ""


def find_shards(setting: Setting) -> Prepared:
    """The shards that were given, or those that are made here, once for all cases."""
    if setting.shards is not None:
        return Prepared(setting.shards, setting.shards)
    return make_shards(setting.out, setting.run)


def make_shards(out: Path, run: Run) -> Prepared:
    """Write documents and prepare them; what is there already stays.

    Args:
        out: gets ``fineweb/``, the documents, and ``shards/``, which is prepared from them.
        run: runs a command line, given its log and its limit in seconds.
    """
    texts, folder, log = (out / name for name in ("fineweb", "shards", "shards.txt"))
    if find_spec("datasets") is None:
        hint = "make shards elsewhere (docs/acceptance.md) and give --shards FOLDER"
        return Prepared(folder, log, f"the package datasets is not installed: {hint}")
    if not texts.is_dir():
        write_documents(texts)
    log.unlink(missing_ok=True)
    words = [*NSA, "data", "prepare", str(texts), "--out", str(folder)]
    words += ["--max-tokens", str(TRAIN_TOKENS)]
    words += ["--validation-fraction", str(VALIDATION_FRACTION)]
    ended = run(words, log, LIMIT_S)
    said = " ".join(last_lines(log, 1))
    return Prepared(folder, log, f"nsa data prepare: {ended.fault}: {said}" if ended.fault else "")


def write_documents(folder: Path) -> None:
    """Write documents as JSON lines with FineWeb's columns.

    Args:
        folder: for the files; it appears when all of them are there.
    """
    making = folder.with_name(f"{folder.name}.making")
    making.mkdir(parents=True, exist_ok=True)
    rows = fineweb_rows()
    for number in itertools.count():
        lines = [json.dumps(row) + "\n" for row in itertools.islice(rows, ROWS_PER_FILE)]
        if not lines:
            break
        path = making / f"{number:03d}_00000.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
    making.rename(folder)


def fineweb_rows() -> Iterator[dict[str, str | float]]:
    """The package's plays and the standard library of this Python, cut into documents.

    Installed packages are not among them: machines with the same Python have the same documents.
    """
    lengths = random.Random(0)
    for document in itertools.chain(corpus_files().documents, stdlib_files().documents):
        text, begin, number = document.text.decode(), 0, 0
        while begin < len(text):
            length = MEDIAN_CHARACTERS * math.exp(lengths.gauss(0.0, SPREAD))
            end = text.find("\n", begin + round(length)) + 1 or len(text)
            if piece := text[begin:end].strip():
                yield {
                    "text": piece,
                    "id": f"<urn:{document.name}:{number}>",
                    "dump": "local",
                    "url": f"file:{document.name}",
                    "language": "en",
                    "language_score": 1.0,
                }
            begin, number = end, number + 1
