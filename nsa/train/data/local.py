"""Data sets, and the files of those on this machine: text, JSON lines and Parquet."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import logging
import lzma
import re
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from nsa.errors import check
from nsa.extras import install_command
from nsa.train.data.documents import FORMATS, fault_of_text, format_of, list_files
from nsa.train.data.shards import INDEX, PROGRESS, STAMP, TOKENIZER
from nsa.train.data.tokenizer import MAX_TEXTS, batches_of_texts, fingerprint_of

logger = logging.getLogger(__name__)

READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
_WHERE = "source"
_CARD = "README.md"
_SHOWN = 10
# Files about a data set, also those of shards that were written into the folder of their text.
_NOTES = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
_NOTES |= {INDEX, PROGRESS, STAMP, TOKENIZER}
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}
_SPLIT_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(_SPLIT_OF)})(?![^\W\d_])")
_OPENERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class Place(NamedTuple):
    """Place of a document: the index of its file in the data set and of its row in the file."""

    file: int = 0
    row: int = 0


class Documents(NamedTuple):
    """Consecutive documents of one file.

    Attributes:
        end: position after the last one.
        texts: the texts, empty for a row without one; no texts if the rows were skipped.
    """

    end: Place
    texts: list[bytes]


@dataclass(frozen=True)
class Origin:
    """Data set to read.

    Attributes:
        source: a local file or folder, or a data set on the Hugging Face hub (``owner/name``).
        subset: the data set's configuration, for example ``sample-10BT``.
        split: its split.
        revision: commit, branch or tag on the hub.
        text_field: column that contains the text.
        pattern: glob of the files of a local folder, matched at every depth; None reads files with
            the names of :data:`nsa.train.data.documents.FORMATS`.
    """

    source: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"
    pattern: str | None = None


@dataclass(frozen=True)
class Found:
    """Files of a data set.

    Attributes:
        format: ``parquet``, ``json`` or ``text``.
        files: names of its files, in the order in which they are read.
        fingerprint: SHA-256 over names and versions of the files (commit on the hub, time of change
            on a disk).
        revision: commit on the hub; None for local files.
        licence: licence that the hub states; None for local files.
        skipped: names of files of a local folder that are not read.
    """

    format: str
    files: tuple[str, ...]
    fingerprint: str
    revision: str | None = None
    licence: str | None = None
    skipped: tuple[str, ...] = ()


def warn_of_skipped(names: Sequence[str], advice: str = "") -> None:
    """Log the number and first names of files that are not read."""
    if names:
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        shown = ", ".join(names[:_SHOWN])
        logger.warning("skipped files: %s (%s%s)%s", f"{len(names):,}", shown, more, advice)


def is_local(origin: Origin) -> bool:
    """Whether files on this machine are read without ``datasets``.

    ``datasets`` reads the hub and local copies of it whose card lists subsets.
    """
    path = Path(origin.source)
    card = path / _CARD
    front = card.read_bytes().split(b"\n---", 1)[0] if card.is_file() else b""
    has_subsets = re.match(rb"---.*\nconfigs:", front, re.DOTALL)
    return path.is_file() or (path.exists() and origin.subset is None and not has_subsets)


def find_files(origin: Origin) -> Found:
    """Find the files of a local data set, sorted by name, and those that are skipped.

    Raises:
        UserError: there is nothing to read, files have several formats, or the split is missing.
    """
    path = Path(origin.source)
    is_file = path.is_file()
    rule = "be left out for a single file"
    check(not (is_file and origin.subset), "subset", rule, origin.subset)
    every = [path.name] if is_file else list_files(path, "*", "pattern")
    formats = _formats(origin, every)
    found = path if is_file else f"{', '.join(every[:3]) or 'none'} in {path}"
    rule = f"be text, JSON or Parquet, with names that end in {', '.join(FORMATS)}"
    hint = "Other files are read as text if --pattern (data.pattern) matches them."
    check(bool(formats), "source", rule, found, hint)
    first = {kind: name for name, kind in reversed(formats.items())}
    found = f"{' beside '.join(sorted(first.values()))} in {path}"
    hint = "Choose with --pattern (data.pattern), for example '*.txt'."
    check(len(first) == 1, "source", "contain files of one format", found, hint)
    (kind,) = first
    names = _of_split(list(formats), kind, origin.split)
    root = path.parent if is_file else path
    fingerprint = fingerprint_of([names, [[str((root / n).lstat().st_mtime)] for n in names]])
    return Found(kind, tuple(names), fingerprint, skipped=tuple(sorted({*every} - {*names})))


def _formats(origin: Origin, every: list[str]) -> dict[str, str]:
    """Format of each file that is to be read."""
    is_file, names, other = Path(origin.source).is_file(), every, None
    if origin.pattern is not None:
        other = "text"
        names = every if is_file else list_files(Path(origin.source), origin.pattern, "pattern")
    formats = {name: kind for name in names if (kind := format_of(name) or other)}
    if origin.pattern is not None or is_file:
        return formats
    notes = _NOTES if {*formats.values()} == {"text"} else {*_NOTES, _CARD}
    return {name: kind for name, kind in formats.items() if PurePath(name).name not in notes}


def _of_split(names: list[str], kind: str, split: str) -> list[str]:
    """Files of a split, if the names of all files with rows identify their split.

    All files are training files unless each one names a split and some name ``train``.
    """
    found = {name: None if kind == "text" else _split_of(name) for name in names}
    of_split = [name for name in names if found[name] == split]
    if split == "train" and (None in found.values() or not of_split):
        return names
    known = ", ".join(sorted({"train", *filter(None, found.values())}))
    check(bool(of_split), "split", f"be one of {known}", split)
    return of_split


def _split_of(name: str) -> str | None:
    words = (_SPLIT_WORD.search(part.lower()) for part in reversed(PurePath(name).parts))
    return next((_SPLIT_OF[word[1]] for word in words if word), None)


# --- texts ----------------------------------------------------------------------------------------
def texts_of_files(
    origin: Origin,
    found: Found,
    start: Place,
    open_file: Callable[[int], AbstractContextManager[Any]],
) -> Iterator[Documents]:
    """Texts of files, from a position on.

    Args:
        origin: the data set.
        found: its files.
        start: position to begin at.
        open_file: opens a file, given by its index, for reading bytes.

    Yields:
        For each file nothing at first, so that errors can name it, and then its texts in batches.
    """
    read = {"text": _whole_text, "json": _json_texts, "parquet": _parquet_texts}
    rule = "be text, JSON or Parquet"
    check(found.format in read, _WHERE, rule, f"{found.format} in {origin.source}")
    for number in range(start.file, len(found.files)):
        yield Documents(Place(number), [])
        row, first = 0, start.row if number == start.file else 0
        with open_file(number) as file:
            texts = read[found.format](file, found.files[number], origin.text_field)
            for batch in batches_of_texts(texts):
                kept = batch[max(first - row, 0) :]
                row += len(batch)
                yield Documents(Place(number, row), kept)


def sentence(error: BaseException) -> str:
    """Error as one line of at most 300 characters that begins and ends as a sentence does."""
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    line = textwrap.shorten(text, 300, placeholder="...").removesuffix(".")
    return line[:1].upper() + line[1:] + "."


def _decompressed(file: Any, name: str) -> Any:
    """The file, or one for its content if the name ends as that of a compressed one."""
    suffix = PurePath(name).suffix.lower()
    if suffix == ".zst":
        return io.BufferedReader(_arrow(name).CompressedInputStream(file, "zstd"))
    return _OPENERS[suffix](file) if suffix in _OPENERS else file


def _arrow(name: str) -> Any:
    """The module ``pyarrow``, a dependency of ``datasets``."""
    rule, hint = "be text or JSON lines without the package pyarrow", install_command("data")
    check(find_spec("pyarrow") is not None, _WHERE, rule, name, f"Install with: {hint}")
    import pyarrow.parquet

    return pyarrow


def _whole_text(file: Any, name: str, _: str) -> Iterator[bytes]:
    """The one document of a text file, byte for byte."""
    text = _decompressed(file, name).read()
    if fault := fault_of_text(text):
        raise ValueError(f"It has {fault}")
    yield text


def _json_texts(file: Any, name: str, field: str) -> Iterator[bytes]:
    """Texts of JSON lines, or of a list of objects or texts; empty for a row without one.

    Bytes that are not UTF-8 stay in the text, which is then counted as unreadable.
    """
    is_known, row, where = False, dict[str, Any](), "text_field"
    content = _decompressed(file, name)
    with io.TextIOWrapper(content, "utf-8", "surrogateescape", newline="\n") as lines:
        for number, row in enumerate(_json_rows(lines)):
            row = {field: row} if isinstance(row, str) else row
            if not isinstance(row, dict):
                raise ValueError(f"Row {number + 1} is no object")
            is_known = is_known or field in row
            if not is_known and number == MAX_TEXTS:
                break
            text = row.get(field) or ""
            is_text = isinstance(text, str)
            check(is_text, where, f"contain text in {name}", type(text).__name__)
            yield text.encode("utf-8", "surrogatepass")
    check(is_known or not row, where, f"be one of the columns of {name} ({', '.join(row)})", field)


def _json_rows(file: io.TextIOWrapper) -> Iterator[Any]:
    lines = (line for line in file if not line.isspace())
    first = next(lines, "").removeprefix("\ufeff")  # part of the file, not of a text
    if first.lstrip().startswith("["):
        yield from json.loads(first + file.read())
    elif first:
        for number, line in enumerate(chain([first], lines), start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"Row {number} is not JSON: {error}") from None
            yield row


def _parquet_texts(file: Any, name: str, field: str) -> Iterator[bytes]:
    where = "text_field"
    with _arrow(name).parquet.ParquetFile(file) as rows:
        columns = rows.schema_arrow.names
        rule = f"be one of the columns of {name} ({', '.join(columns)})"
        check(field in columns, where, rule, field)
        kind = rows.schema_arrow.field(field).type
        is_text = str(kind) in ("string", "large_string", "string_view")
        check(is_text, where, f"contain text in {name}", kind)
        for batch in rows.iter_batches(MAX_TEXTS, columns=[field]):
            yield from batch.column(0).cast("large_binary").fill_null(b"").to_pylist()
