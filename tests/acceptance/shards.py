"""Shards in FineWeb's format from text of every Python installation, see docs/data.md.

``python -m tests.acceptance.shards FOLDER`` makes them for a machine without the package datasets.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from nsa.train.data.documents import corpus_files, stdlib_files
from tests.acceptance.programs import NSA, last_lines, start, wait

TRAIN_TOKENS, VALIDATION_FRACTION = 6_000_000, 0.03
# Document lengths as in FineWeb: mostly some hundred tokens, a few very long, some of one line.
MEDIAN_CHARACTERS, SPREAD = 2_000, 1.2
LIMIT_S = 600.0


def make_shards(out: Path) -> Path:
    """Write documents to ``out/fineweb`` and prepare them in ``out/shards``.

    Returns:
        Path of the shards.
    """
    if find_spec("datasets") is None:
        raise ModuleNotFoundError(
            "the package datasets must be installed. Make shards elsewhere with "
            "python -m tests.acceptance.shards FOLDER, and give --shards FOLDER/shards."
        )
    texts, shards, log = (out / name for name in ("fineweb", "shards", "shards.txt"))
    texts.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in fineweb_rows())
    (texts / "000_00000.jsonl").write_text(lines, encoding="utf-8")
    words = [*NSA, "data", "prepare", str(texts), "--out", str(shards)]
    words += ["--max-tokens", str(TRAIN_TOKENS)]
    words += ["--validation-fraction", str(VALIDATION_FRACTION)]
    with start(words, log, {}) as process:
        faults = wait(process, log, LIMIT_S)
    assert not faults, f"nsa data prepare: {faults[0]}: {last_lines(log, 1)}"
    return shards


def fineweb_rows() -> Iterator[dict[str, str | float]]:
    """Documents with FineWeb's columns: the package's plays and the standard library, in pieces.

    Installed packages are excluded, so that machines with the same Python make the same documents.
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


if __name__ == "__main__":
    print(make_shards(Path(sys.argv[1]).absolute()))
