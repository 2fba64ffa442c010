"""Documents of a data set, read through ``datasets`` by a process of its own.

The process makes a stalled server harmless: a read that hangs cannot be interrupted, a process can be ended and another one
started where the documents broke off. ``datasets`` is imported there alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import os
import re
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from nsa.errors import UserError, check, fail
from nsa.extras import install_command
from nsa.train.data.prefetch import Prefetcher
from nsa.train.data.processes import Child, ChildDiedError
from nsa.train.data.source import DataUnavailableError
from nsa.train.data.tokenise import Texts
from nsa.train.sources import COMPRESSED, FORMATS, is_mistyped_path

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH_BYTES = 4 << 20  # of text sent at a time
_BATCH_ROWS = 1000
_CONTACT_S = 10  # for one answer of a server that is asked whether it is there
_ATTEMPTS = 4  # a process that is silent for this part of the time limit is ended and replaced
_LONGEST_PAUSE_S = 30
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
_FORMAT_LIBRARIES = {"datasets", "pyarrow", "zstandard"}
_BUSY = (408, 425, 429)  # answers of a server that may say something else a little later
_NO_CONNECTION = {"ConnectError", "ConnectTimeout", "ConnectionError"}
_NETWORK_LIBRARIES = {"fsspec", "httpcore", "httpx", "httpx2", "huggingface_hub"}


class Place(NamedTuple):
    """The next document to read: the number of its file in the data set, and of its row in the file."""

    file: int = 0
    row: int = 0


@dataclass(frozen=True)
class Origin:
    """What to read.

    Attributes:
        source: a local file or folder, or a data set on the Hugging Face hub (``owner/name``).
        subset: the data set's configuration, for example ``sample-10BT``.
        split: its split.
        revision: commit, branch or tag on the hub.
        text_field: column that holds the text.
    """

    source: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"


@dataclass(frozen=True)
class Found:
    """What the source turned out to be.

    Attributes:
        format: reader of ``datasets``: ``parquet``, ``json``, ``text`` or another.
        files: names of its files, in the order in which they are read.
        fingerprint: SHA-256 over names and versions of the files (commit on the hub, time of change on a disk).
        revision: commit on the hub; None elsewhere.
        licence: as the hub states it; None elsewhere.
    """

    format: str
    files: tuple[str, ...]
    fingerprint: str
    revision: str | None
    licence: str | None


@dataclass(frozen=True)
class Batch(Generic[T]):
    """Consecutive documents.

    Attributes:
        runs: place of the first row and number of rows, for each stretch that lies in one file.
        payload: what the reader's ``transform`` made of the texts.
    """

    runs: tuple[tuple[Place, int], ...]
    payload: T

    @property
    def end(self) -> Place:
        """The place after the last row."""
        place, rows = self.runs[-1]
        return place._replace(row=place.row + rows)

    def place_of(self, row: int) -> Place:
        """Place of a row of this batch."""
        for place, rows in self.runs:
            if row < rows:
                return place._replace(row=place.row + row)
            row -= rows
        raise IndexError("row outside the batch")


@dataclass(frozen=True)
class _Failure:
    """Why the reading process ended; sent to the process that started it."""

    text: str
    error: UserError | None = None  # nothing to try again
    is_unreachable: bool = False  # there is no connection at all
    trace: str = ""  # of a bug


class _Alive:
    """Sent while the reading process finds its way back to where it broke off."""


class DocumentReader(Generic[T]):
    """Batches of documents in the data set's own order, as an iterator to be closed after use.

    A read that fails because of the network, or is silent for a quarter of the time limit, is made again from the same place
    after a pause of 1, 2, 4, .. seconds. When no document has come for the whole time limit, or there is no connection in the
    first place, that is an error. Failures of local files are errors at once. Time between calls does not count.

    Attributes:
        found: what the source turned out to be.

    Args:
        origin: what to read.
        transform: applied to the texts of each batch inside the reading process.
        start: place to begin at.
        time_limit_s: seconds without a document after which reading is given up.

    Raises:
        DataUnavailableError: the source does not exist, cannot be reached, or stays silent.
        UserError: it cannot be read as documents.
    """

    def __init__(
        self,
        origin: Origin,
        transform: Callable[[Texts], T],
        *,
        start: Place = Place(),  # noqa: B008 a named tuple does not change
        time_limit_s: float,
    ) -> None:
        check(time_limit_s > 0, "DocumentReader", "time_limit_s", "be positive", time_limit_s)
        rule = "be shards prepared elsewhere, where the package datasets is not installed"
        hint = f"Install with: {install_command('data')}"
        check(find_spec("datasets") is not None, "DocumentReader", "source", rule, origin.source, hint)
        if is_mistyped_path(origin.source):
            hint = "It is no name on the hub."
            raise DataUnavailableError("DocumentReader", "source", "exist", origin.source, hint)
        self._origin, self._transform, self._place = origin, transform, start
        self._time_limit_s = time_limit_s
        self._child: Child | None = None
        self._reached = False
        found = self._next_message()
        assert isinstance(found, Found)
        self.found = found
        self._origin = replace(origin, revision=found.revision)  # a second attempt reads the same commit

    def __iter__(self) -> Iterator[Batch[T]]:
        while (message := self._next_message()) is not None:
            if isinstance(message, Found):  # of a process that took over
                if message.fingerprint != self.found.fingerprint:
                    fail("DocumentReader", "source", "stay the same while it is read", f"other files in {self._origin.source}")
                continue
            self._place = message.end
            yield message

    def __enter__(self) -> DocumentReader[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the reading process."""
        if self._child is not None:
            self._child.close()
        self._child = None

    def _next_message(self) -> Any:
        """A message of the reading process, which is started, and replaced after a failure, as need be."""
        begin, attempt = time.monotonic(), 0
        while True:
            failure = self._receive(min(self._time_limit_s / _ATTEMPTS, begin + self._time_limit_s - time.monotonic()))
            if isinstance(failure, _Alive):
                begin = time.monotonic()
                continue
            if not isinstance(failure, _Failure):
                self._reached = True
                return failure
            self.close()
            if failure.error is not None:
                raise failure.error
            if failure.trace:
                raise RuntimeError(f"the process that reads documents ended with an error:\n{failure.trace}")
            source, pause = self._origin.source, min(2.0**attempt, _LONGEST_PAUSE_S)
            attempt += 1
            if failure.is_unreachable and not self._reached:
                where = f"{source} (there is no such file or folder here)"
                hint = f"{failure.text} Check the network, or give a copy on this machine."
                raise DataUnavailableError("DocumentReader", "source", "be reachable", where, hint)
            if time.monotonic() + pause > begin + self._time_limit_s:
                rule = f"send documents within the time limit of {self._time_limit_s:g} s"
                hint = f"Attempts: {attempt}, the last one: {failure.text}"
                raise DataUnavailableError("DocumentReader", "source", rule, f"none from {source}", hint)
            logger.warning("reading %s again in %.0f s: %s", source, pause, failure.text)
            time.sleep(pause)

    def _receive(self, patience_s: float) -> Any:
        if self._child is None:
            self._child = Child("nsa-documents", _serve, self._origin, self._place, self._transform)
        if not self._child.has_sent(max(patience_s, 0)):
            return _Failure(f"Silent for {patience_s:.1f} s.")
        try:
            return self._child.receive()
        except ChildDiedError:
            return _Failure("The reading process died.")


# --- in the reading process -----------------------------------------------------------------------------------------------
class _Reports:
    """Context that sends whatever ends the reading to the parent, which raises it or tries again.

    Attributes:
        file: name of the file that is being read.
    """

    def __init__(self, connection: Connection, origin: Origin) -> None:
        self._connection, self._origin = connection, origin
        self._told = time.monotonic()
        self.file: str | None = None

    def __enter__(self) -> _Reports:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None and not isinstance(error, BrokenPipeError):  # which says that the parent has gone
            self._connection.send(self._describe(error))
        return True

    def is_alive(self) -> None:
        """Tell the parent, at most once a second, that nothing hangs."""
        if time.monotonic() - self._told > 1:
            self._connection.send(_Alive())
            self._told = time.monotonic()

    def _describe(self, error: BaseException) -> _Failure:
        library = type(error).__module__.partition(".")[0]
        text = _sentence(f"{type(error).__name__}: {error}")
        if isinstance(error, UserError):
            return _Failure(text, error=error)
        source = Path(self._origin.source)
        is_local = source.exists()
        status = getattr(getattr(error, "response", None), "status_code", None)
        is_refusal = status is not None and 400 <= status < 500 and status not in _BUSY
        if not is_local and not is_refusal and (isinstance(error, _READ_ERRORS) or library in _NETWORK_LIBRARIES):
            names = {cls.__name__ for cls in type(error).__mro__}
            return _Failure(text, is_unreachable=bool(names & _NO_CONNECTION))
        if is_refusal or isinstance(error, (*_READ_ERRORS, ValueError)) or library in _FORMAT_LIBRARIES:
            what = f"{self.file} of {source}" if self.file and not source.is_file() else self._origin.source
            return _Failure(text, error=UserError("DocumentReader", "source", "hold documents that can be read", what, text))
        return _Failure(text, trace="".join(traceback.format_exception(error)))


def _sentence(text: str) -> str:
    line = " ".join(text.split())
    line = line if len(line) <= 300 else line[:297] + "..."
    return line[:1].upper() + line[1:] + ("" if line.endswith(".") else ".")


def _serve(connection: Connection, origin: Origin, start: Place, transform: Callable[[Texts], object]) -> None:
    with _Reports(connection, origin) as reports:
        import datasets

        datasets.disable_progress_bars()
        datasets.utils.tqdm.set_lock(threading.RLock())  # its own, between processes, would outlive a process that is killed
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is an exception too
        documents, found = open_documents(origin)
        connection.send(found)
        tables = _tables(documents, origin, found, start, reports)
        with closing(Prefetcher(lambda: next(tables, None))) as ahead:  # decoding goes on while texts are sent
            for runs, texts in _batches(iter(lambda: ahead.get(0), None)):
                connection.send(Batch(runs, transform(texts)))
        connection.send(None)


def open_documents(origin: Origin) -> tuple[datasets.IterableDataset, Found]:
    """Find the files of a data set, on this machine or elsewhere, by the same code.

    Raises:
        DataUnavailableError: it does not exist.
        UserError: the subset or split does not, or ``datasets`` finds no data in it.
    """
    from datasets import exceptions

    path = Path(origin.source)
    revision = licence = None
    if not path.exists():
        origin, licence = _ask_hub(origin)
        revision = origin.revision
    try:
        builder = _builder(origin, path)
    except UserError:
        raise
    except (exceptions.DatasetsError, ValueError) as error:
        fail("DocumentReader", "source", "be a data set that datasets can read", origin.source, _sentence(str(error)))
    files = builder.config.data_files or {}
    if origin.split not in files:
        fail("DocumentReader", "split", f"be one of {', '.join(map(str, files)) or 'none'}", origin.split)
    names, versions = list(files[origin.split]), files[origin.split].origin_metadata
    names = [re.sub(r"^hf://datasets/[^@]+@[^/]+/", "", name) for name in names]
    if path.exists():
        names = [os.path.relpath(name, path if path.is_dir() else path.parent) for name in names]
    digest = hashlib.sha256(json.dumps([names, versions]).encode()).hexdigest()
    try:
        documents = builder.as_streaming_dataset(split=origin.split)
    except StopIteration:  # of the JSON reader, which looks at the first rows for the columns
        fail("DocumentReader", "source", "begin with a file that holds documents", f"the empty {names[0]}")
    return documents, Found(builder.name, tuple(names), digest, revision, licence)


def _builder(origin: Origin, path: Path) -> datasets.DatasetBuilder:
    from datasets import load_dataset_builder

    if path.is_file():
        format_name = _format_of(origin.source)
        check(origin.subset is None, "DocumentReader", "subset", "be left out for a single file", origin.subset)
        how: dict[str, Any] = {"path": format_name, "data_files": {origin.split: [origin.source]}}
    else:
        source = str(path.resolve()) if path.exists() else origin.source
        how = {"path": source, "name": origin.subset, "revision": origin.revision}
    builder = load_dataset_builder(**how)
    # A text file is one document, not one a line. Parquet is decoded in pieces, not by row groups, which may be large.
    options: dict[str, dict[str, Any]] = {"text": {"sample_by": "document"}, "parquet": {"batch_size": _BATCH_ROWS}}
    return load_dataset_builder(**how, **options[builder.name]) if builder.name in options else builder


def _format_of(source: str) -> str:
    suffixes = Path(source).suffixes
    while suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else "none"
    if suffix not in FORMATS:
        fail("DocumentReader", "source", f"have a name that ends in {', '.join(FORMATS)}, maybe compressed", source)
    return FORMATS[suffix]


def _ask_hub(origin: Origin) -> tuple[Origin, str | None]:
    """The commit that a data set's revision means now, and its licence: a quick question before ``datasets`` asks many."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().dataset_info(origin.source, revision=origin.revision, timeout=_CONTACT_S)
    except HFValidationError:
        hint = "It is no name on the hub."
        raise DataUnavailableError("DocumentReader", "source", "exist", origin.source, hint) from None
    except GatedRepoError:
        hint = "Accept its terms on the hub and log in there."
        raise DataUnavailableError("DocumentReader", "source", "be open to you", origin.source, hint) from None
    except RevisionNotFoundError:
        raise DataUnavailableError("DocumentReader", "revision", "exist on the hub", origin.revision) from None
    except RepositoryNotFoundError:
        where = f"{origin.source} (nor is there such a file or folder here)"
        raise DataUnavailableError("DocumentReader", "source", "exist on the hub", where) from None
    return replace(origin, revision=info.sha), None if info.card_data is None else info.card_data.get("license")


def _batches(tables: Iterator[tuple[Place, Any]]) -> Iterator[tuple[tuple[tuple[Place, int], ...], Texts]]:
    """Rows in order; a batch ends with the row that brings it to 4 MiB of text or 1,000 rows."""
    runs: list[tuple[Place, int]] = []
    parts: list[bytes] = []
    lengths: list[NDArray[np.int64]] = []
    size = rows = 0
    for place, column in tables:
        for chunk in column.chunks:
            of_chunk = np.diff(_offsets(chunk))
            ends = np.cumsum(of_chunk)
            first = 0
            while first < len(of_chunk):
                full = int(ends[first] - of_chunk[first]) + _BATCH_BYTES - size
                stop = min(int(np.searchsorted(ends, full)) + 1, first + _BATCH_ROWS - rows, len(of_chunk))
                runs.append((place, stop - first))
                parts.append(_buffer(chunk.slice(first, stop - first)))
                lengths.append(of_chunk[first:stop])
                size, rows = size + len(parts[-1]), rows + stop - first
                place = place._replace(row=place.row + stop - first)
                if size >= _BATCH_BYTES or rows >= _BATCH_ROWS:
                    yield tuple(runs), Texts(b"".join(parts), np.concatenate(lengths))
                    runs, parts, lengths, size, rows = [], [], [], 0, 0
                first = stop
    if runs:
        yield tuple(runs), Texts(b"".join(parts), np.concatenate(lengths))


def _offsets(array: Any) -> NDArray[np.int64]:
    """Where each text of an Arrow array of type large_binary begins in the array's buffer, and where the last one ends."""
    return np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]


def _buffer(array: Any) -> bytes:
    offsets, buffer = _offsets(array), array.buffers()[2]
    return b"" if buffer is None else bytes(memoryview(buffer)[offsets[0] : offsets[-1]])


def _tables(
    documents: datasets.IterableDataset, origin: Origin, found: Found, start: Place, reports: _Reports
) -> Iterator[tuple[Place, Any]]:
    """Texts with the place of the first row, one file after the other."""
    for file, rows in enumerate(_files(documents, start.file), start=start.file):
        reports.file = found.files[file]
        skip = start.row if file == start.file else 0
        row = 0
        for table in rows.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            begin = max(skip - row, 0)
            if begin < table.num_rows:
                yield Place(file, row + begin), _text_column(table, origin, reports.file).slice(begin)
            else:
                reports.is_alive()
            row += table.num_rows


def _files(documents: datasets.IterableDataset, first: int) -> Iterator[datasets.IterableDataset]:
    """The files of a data set from number ``first`` on, each as a data set.

    Halving costs n log n in all; asking for each by its number would cost n squared.
    """
    if documents.num_shards == 1:
        yield documents
        return
    for half in (documents.shard(2, 0, contiguous=True), documents.shard(2, 1, contiguous=True)):
        if first < half.num_shards:
            yield from _files(half, max(first, 0))
        first -= half.num_shards


def _text_column(table: Any, origin: Origin, file: str) -> Any:
    """The texts as bytes, empty ones where there is none."""
    if origin.text_field not in table.column_names:
        rule = f"be one of the columns of {file} ({', '.join(table.column_names)})"
        fail("DocumentReader", "text_field", rule, origin.text_field)
    column = table.column(origin.text_field)
    kind = str(column.type)
    check(kind in ("string", "large_string", "string_view"), "DocumentReader", "text_field", f"hold text in {file}", kind)
    return column.cast("large_binary").fill_null(b"")
