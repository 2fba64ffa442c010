"""Shards of FineWeb's form, from text that is on every machine, prepared as docs/data.md says."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from nsa.errors import check
from nsa.train.data.documents import corpus_files, stdlib_files
from tools.accept.case import NSA
from tools.accept.programs import last_lines, run

TRAIN_TOKENS = 6_000_000
VALIDATION_FRACTION = 0.03
# FineWeb's documents: some hundred tokens each, a few of them very long, some of one line.
MEDIAN_CHARACTERS, SPREAD = 2_000, 1.2
ROWS_PER_FILE = 5_000


def make_shards(out: Path, limit_s: float) -> Path:
    """Write documents and prepare them; what is there already stays.

    Args:
        out: gets ``fineweb/``, the documents, and ``shards/``, which is prepared from them.
        limit_s: most seconds for the preparation.

    Returns:
        The folder of the shards.

    Raises:
        UserError: the preparation failed, or ``datasets`` is not installed.
    """
    texts, shards, log = (out / name for name in ("fineweb", "shards", "shards.txt"))
    hint = "Make shards elsewhere (docs/acceptance.md) and give --shards FOLDER."
    found = find_spec("datasets") is not None
    check(found, "shards", "the package datasets", "be installed", "none", hint)
    if not texts.is_dir():
        write_documents(texts)
    words = [*NSA, "data", "prepare", str(texts), "--out", str(shards)]
    words += ["--max-tokens", str(TRAIN_TOKENS)]
    words += ["--validation-fraction", str(VALIDATION_FRACTION)]
    fault = run(words, log, limit_s, {})
    said = f"{fault}: {' '.join(last_lines(log, 1))}"
    check(not fault, "shards", "nsa data prepare", "succeed", said, f"All of it: {log}")
    return shards


def write_documents(folder: Path) -> None:
    """Write documents as JSON lines with FineWeb's columns.

    Args:
        folder: for the files; it appears when all of them are there.
    """
    making = folder.with_name(f"{folder.name}.making")
    making.mkdir(parents=True, exist_ok=True)
    rows, number = fineweb_rows(), 0
    while lines := [json.dumps(row) + "\n" for row in itertools.islice(rows, ROWS_PER_FILE)]:
        path = making / f"{number:03d}_00000.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        number += 1
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
