"""Documents of files on this machine: text, JSON lines and Parquet, read one after another."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import logging
import lzma
import re
import textwrap
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NoReturn, TypeVar

from nsa.errors import UserError, check, fail
from nsa.extras import install_command
from nsa.train.data.documents import fault_of_text, list_files
from nsa.train.data.origin import DocumentBatch, Found, Origin, Pace, Place
from nsa.train.data.shards import INDEX, PROGRESS, STAMP, TOKENIZER
from nsa.train.data.tokenizer import MAX_TEXTS, batches_of_texts
from nsa.train.sources import FORMATS, format_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
_BOM = b"\xef\xbb\xbf"
_CARD = "README.md"
# Files about a data set, also about shards that lie in the folder they were made of.
_NOTES = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
_NOTES |= {INDEX, PROGRESS, STAMP, TOKENIZER}
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}
_SPLIT_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(_SPLIT_OF)})(?![^\W\d_])")


def is_local(origin: Origin) -> bool:
    """Whether files on this machine are meant, and not by a data set's card that lists subsets."""
    path = Path(origin.source)
    if not path.is_dir():
        return path.exists()
    card = path / _CARD
    front = card.read_bytes().split(b"\n---", 1)[0] if card.is_file() else b""
    has_subsets = front.startswith(b"---") and re.search(rb"^configs:", front, re.MULTILINE)
    return origin.subset is None and not has_subsets


def find_files(origin: Origin) -> Found:
    """Files of a local source, sorted by name, and those that are skipped.

    Raises:
        UserError: there is nothing to read, or files of several formats, or not the split.
    """
    path, is_file = Path(origin.source), Path(origin.source).is_file()
    fits = origin.subset is None or not is_file
    rule = "be left out for a single file"
    check(fits, "read_documents", "subset", rule, origin.subset)
    every = [path.name] if is_file else list_files(path, "*", "pattern")
    formats = _formats(origin, every)
    what = "have a name that ends" if is_file else "hold files whose names end"
    rule = f"{what} in {', '.join(FORMATS)}, maybe compressed"
    value = path if is_file else f"{', '.join(every[:3]) or 'none'} in {path}"
    hint = "Other files are read as text if --pattern (data.pattern) matches them."
    check(bool(formats), "read_documents", "source", rule, value, hint)
    first = {kind: name for name, kind in reversed(formats.items())}
    value = f"{' beside '.join(sorted(first.values()))} in {path}"
    hint = "Choose with --pattern (data.pattern), for example '*.txt'."
    check(len(first) == 1, "read_documents", "source", "hold files of one format", value, hint)
    (kind,) = first
    names = _of_split(list(formats), kind, origin.split)
    root = path.parent if is_file else path
    versions = [names, [[str((root / name).lstat().st_mtime)] for name in names]]
    fingerprint = hashlib.sha256(json.dumps(versions).encode()).hexdigest()
    skipped = sorted({*every} - {*names})
    return Found(kind, tuple(names), fingerprint, skipped=tuple(skipped))


def _formats(origin: Origin, every: list[str]) -> dict[str, str]:
    """Format of each file that is to be read."""
    names, path, other = every, Path(origin.source), None
    if origin.pattern is not None:
        other = "text"
        names = every if path.is_file() else list_files(path, origin.pattern, "pattern")
    found = {name: format_of(name) or other for name in names}
    formats = {name: kind for name, kind in found.items() if kind is not None}
    if origin.pattern is not None or path.is_file():
        return formats
    has_rows = {*formats.values()} != {"text"}
    left_out = {*_NOTES, _CARD} if has_rows else _NOTES
    return {name: kind for name, kind in formats.items() if PurePath(name).name not in left_out}


def _of_split(names: list[str], kind: str, split: str) -> list[str]:
    """Files of a split, if names of files with rows say which they belong to.

    All files are training files unless each one names a split and some name ``train``.
    """
    found = {name: None if kind == "text" else _split_of(name) for name in names}
    of_split = [name for name in names if found[name] == split]
    if split == "train" and (None in found.values() or not of_split):
        return names
    known = ", ".join(sorted({"train", *filter(None, found.values())}))
    check(bool(of_split), "read_documents", "split", f"be one of {known}", split)
    return of_split


def _split_of(name: str) -> str | None:
    words = (_SPLIT_WORD.search(part.lower()) for part in reversed(PurePath(name).parts))
    return next((_SPLIT_OF[word[1]] for word in words if word), None)


def read_files(
    origin: Origin,
    found: Found,
    transform: Callable[[list[bytes]], T],
    start: Place,
    threads: int,
) -> Generator[DocumentBatch[T], None, None]:
    """Batches of documents in order; the arguments are those of ``read_documents``."""

    def make(place: Place, texts: list[bytes]) -> DocumentBatch[T]:
        return DocumentBatch(place, place._replace(row=place.row + len(texts)), transform(texts))

    waiting = deque[Future[DocumentBatch[T]]]()
    pool = ThreadPoolExecutor(threads)
    try:
        for place, texts in _texts(origin, found, start):
            waiting.append(pool.submit(make, place, texts))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Without waiting: garbage collection may close the generator in a thread of the pool.
        pool.shutdown(wait=False, cancel_futures=True)


def _texts(origin: Origin, found: Found, start: Place) -> Iterator[tuple[Place, list[bytes]]]:
    """Consecutive texts of a file, with the place of the first."""
    path = Path(origin.source)
    root = path.parent if path.is_file() else path
    for number, name in list(enumerate(found.files))[start.file :]:
        place = Place(number, start.row if number == start.file else 0)
        with _faults_of(root / name):
            rows = _ROWS[found.format](root / name, origin.text_field, place.row)
            for texts in batches_of_texts(rows):
                yield place, texts
                place = place._replace(row=place.row + len(texts))


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (*READ_ERRORS, ValueError, RecursionError) as error:
        _damaged(path, f"{type(error).__name__}: {error}")


def _damaged(path: Path, text: str) -> NoReturn:
    rule = "hold documents that can be read"
    raise UserError("read_documents", "source", rule, path, sentence(text)) from None


def sentence(text: str) -> str:
    """One line of at most 300 characters that begins and ends as a sentence does."""
    line = textwrap.shorten(text, 300, placeholder="...").removesuffix(".")
    return line[:1].upper() + line[1:] + "."


def _open(path: Path) -> io.BufferedIOBase:
    """A file to be read in bytes, decompressed if its name says so."""
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path)
        case ".bz2":
            return bz2.open(path)
        case ".xz":
            return lzma.open(path)
        case ".zst":
            arrow = _arrow(path)
            return io.BufferedReader(arrow.CompressedInputStream(str(path), "zstd"))
    return path.open("rb")


def _arrow(path: Path) -> Any:
    """The module ``pyarrow``, which comes with ``datasets``."""
    rule, hint = "be text or JSON lines without the package pyarrow", install_command("data")
    is_there = find_spec("pyarrow") is not None
    check(is_there, "read_documents", "source", rule, path, f"Install with: {hint}")
    import pyarrow

    return pyarrow


def _rows_of_text(path: Path, _: str, skip: int) -> Iterator[bytes]:
    """The one document of a text file, byte for byte."""
    if skip == 0:
        with _open(path) as file:
            text = file.read()
        fault = fault_of_text(text)
        if fault:
            _damaged(path, f"it has {fault}")
        yield text


def _rows_of_json(path: Path, field: str, skip: int) -> Iterator[bytes]:
    """Texts of JSON lines, or of a list of objects or texts; empty if there is none.

    Bytes that are not UTF-8 stay in the text, which is then counted as unreadable.
    """
    is_known, row = skip > 0, dict[str, Any]()
    with _open(path) as file:
        rows = enumerate(_after(_json_rows(file, path), skip, path.name), start=skip)
        for number, row in rows:
            row = {"text": row} if isinstance(row, str) else row
            if not isinstance(row, dict):
                _damaged(path, f"row {number + 1} is no object")
            is_known = is_known or field in row
            if not is_known and number == MAX_TEXTS:
                break
            text = row.get(field)
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                fail("read_documents", "text_field", f"hold text in {path.name}", kind)
            yield (text or "").encode("utf-8", "surrogatepass")
    if row and not is_known:
        _no_column(field, path.name, row)


def _json_rows(file: io.BufferedIOBase, path: Path) -> Iterator[Any]:
    first = file.readline().removeprefix(_BOM)  # the mark belongs to the file, not to a text
    while first.isspace():
        first = file.readline()
    if first.lstrip().startswith(b"["):
        yield from json.loads(_decoded(first + file.read()))
        return
    lines = (line for line in chain([first], file) if line and not line.isspace())
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(_decoded(line))
        except ValueError as error:
            _damaged(path, f"row {number} is not JSON: {error}")
        yield row


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "surrogateescape")


def _rows_of_parquet(path: Path, field: str, skip: int) -> Iterator[bytes]:
    """Texts of a Parquet file; groups of rows before ``skip`` are not read."""
    arrow = _arrow(path)
    import pyarrow.parquet

    is_packed = path.suffix.lower() != ".parquet"
    try:
        source = io.BytesIO(_open(path).read()) if is_packed else path
        with pyarrow.parquet.ParquetFile(source) as file:
            if field not in file.schema_arrow.names:
                _no_column(field, path.name, file.schema_arrow.names)
            first, groups = 0, range(file.num_row_groups)
            sizes = [file.metadata.row_group(number).num_rows for number in groups]
            while first < len(sizes) and skip >= sizes[first]:
                skip, first = skip - sizes[first], first + 1
            for rows in file.iter_batches(MAX_TEXTS, row_groups=groups[first:], columns=[field]):
                yield from column_texts(rows, field, path.name)[skip:].to_pylist()
                skip = max(skip - rows.num_rows, 0)
    except arrow.ArrowException as error:
        _damaged(path, f"{type(error).__name__}: {error}")


def _no_column(field: str, name: str, columns: Iterable[str]) -> NoReturn:
    rule = f"be one of the columns of {name} ({', '.join(columns)})"
    fail("read_documents", "text_field", rule, field)


def column_texts(table: Any, field: str, name: str) -> Any:
    """Column of a table as bytes, empty ones where there is no text."""
    if field not in table.column_names:
        _no_column(field, name, table.column_names)
    column = table.column(field)
    kind = str(column.type)
    is_text = kind in ("string", "large_string", "string_view")
    check(is_text, "read_documents", "text_field", f"hold text in {name}", kind)
    return column.cast("large_binary").fill_null(b"")


def _after(rows: Iterator[T], skip: int, name: str) -> Iterator[T]:
    """Rows from number ``skip`` on; those before it are read and dropped."""
    pace = Pace()
    for number, row in enumerate(rows):
        if number >= skip:
            yield row
        elif pace.is_due():
            logger.info("%s: %d of %d rows skipped", name, number, skip)


_ROWS: dict[str, Callable[[Path, str, int], Iterator[bytes]]] = {
    "text": _rows_of_text,
    "json": _rows_of_json,
    "parquet": _rows_of_parquet,
}
