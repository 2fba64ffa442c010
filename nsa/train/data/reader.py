"""Documents of a data set: files on this machine, or through ``datasets`` those of the hub.

The hub, and a folder that came from it with a card that lists subsets, is read and tokenised by a
process of its own, which makes a stalled server harmless: a read that hangs cannot be interrupted,
a process can be ended and another one started where the documents broke off. ``datasets`` is
imported there and nowhere else.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from nsa.errors import UserError, check, fail
from nsa.extras import install_command
from nsa.train.data.local import (
    READ_ERRORS,
    column_texts,
    find_files,
    is_local,
    read_files,
    sentence,
)
from nsa.train.data.origin import DocumentBatch, Found, Origin, Pace, Place
from nsa.train.data.source import DataUnavailableError
from nsa.train.data.tokenizer import MAX_TEXTS, batches_of_texts
from nsa.train.distributed.launch import one_thread_for_tokenizers
from nsa.train.sources import is_mistyped_path

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONTACT_S = 10  # for one answer of a server that is asked whether it is there
_ATTEMPTS = 4  # a process that is silent for this part of the time limit is ended and replaced
_LONGEST_PAUSE_S = 30
_CLOSING_S = 2.0
_FORMAT_LIBRARIES = {"datasets", "pyarrow", "zstandard"}
_BUSY = (408, 425, 429)  # answers of a server that may say something else a little later
_READER_SETTINGS: dict[str, dict[str, Any]] = {
    "text": {"sample_by": "document"},  # a file is one document, not one a line
    # Decoded in pieces, not by row groups, which may be large.
    "parquet": {"batch_size": MAX_TEXTS},
}
_NO_CONNECTION = {"ConnectError", "ConnectTimeout", "ConnectionError"}
_NETWORK_LIBRARIES = {"fsspec", "httpcore", "httpx", "httpx2", "huggingface_hub"}


# Sent by a reading process while it tokenises: nothing hangs.
_ALIVE = "alive"


def read_documents(
    origin: Origin,
    transform: Callable[[list[bytes]], T],
    *,
    start: Place = Place(),  # noqa: B008 a named tuple does not change
    time_limit_s: float,
    threads: int = 1,
) -> tuple[Found, Generator[DocumentBatch[T], None, None]]:
    """Read documents in the data set's own order.

    Files on this machine are read by this process, and their failures are errors at once. For the
    hub, a read that fails because of the network, or is silent for a quarter of the time limit, is
    repeated from the same place after a pause of 1, 2, 4, .. seconds. When no document has come for
    the whole time limit, or there is no connection in the first place, that is an error. Time that
    the caller takes does not count.

    Args:
        origin: what to read.
        transform: applied to the texts of each batch, for the hub inside the reading process; an
            empty text stands for a row without one.
        start: place to begin at.
        time_limit_s: seconds without a document after which reading is given up.
        threads: batches that are transformed at the same time.

    Returns:
        What the source turned out to be, and the documents; closing these ends the process.

    Raises:
        DataUnavailableError: the source does not exist, cannot be reached, or stays silent.
        UserError: it cannot be read as documents.
    """
    check(time_limit_s > 0, "read_documents", "time_limit_s", "be positive", time_limit_s)
    if is_mistyped_path(origin.source):
        _unavailable("exist", origin.source, "It is no name on the hub.")
    if is_local(origin):
        found = find_files(origin)
        return found, read_files(origin, found, transform, start, threads)
    rule = "be text or JSON lines on this machine, where the package datasets is not installed"
    hint = f"Install with: {install_command('data')}"
    has_datasets = find_spec("datasets") is not None
    check(has_datasets, "read_documents", "source", rule, origin.source, hint)
    rule = "be left out for a data set of the hub"
    check(origin.pattern is None, "read_documents", "pattern", rule, origin.pattern)
    messages = _messages(origin, start, transform, threads, time_limit_s)
    return next(messages), messages


def _messages(
    origin: Origin,
    start: Place,
    transform: Callable[..., T],
    threads: int,
    time_limit_s: float,
) -> Generator[Any, None, None]:
    """What the source is, then its documents, from as many processes as it takes."""
    found: Found | None = None
    attempt, left_s, pace = 0, time_limit_s, Pace()
    while True:
        with _reading_process(origin, start, transform, threads) as connection:
            while True:
                begin = time.monotonic()
                match _receive(connection, min(time_limit_s / _ATTEMPTS, left_s)):
                    case None:
                        return
                    case DocumentBatch() as batch:
                        attempt, left_s, start = 0, time_limit_s, batch.end
                        yield batch
                    case Place() as at if at.row and pace.is_due():
                        where = f"file {at.file + 1} of {origin.source}"
                        logger.info("%s: %d of %d rows skipped", where, at.row, start.row)
                    case Found() as again:
                        if found is None:
                            found, origin = again, replace(origin, revision=again.revision)
                            yield found
                        rule, what = "stay the same while it is read", "other files in "
                        what += origin.source
                        check(again == found, "read_documents", "source", rule, what)
                    case OSError() as failure:
                        break
                    case Exception() as error:
                        raise error
        if isinstance(failure, ConnectionError) and found is None:
            where = f"{origin.source} (there is no such file or folder here)"
            hint = f"{failure} Check the network, or give a copy on this machine."
            _unavailable("be reachable", where, hint)
        pause = min(2.0**attempt, _LONGEST_PAUSE_S)
        attempt += 1
        left_s -= time.monotonic() - begin + pause
        if left_s < 0:
            rule = f"send documents within the time limit of {time_limit_s:g} s"
            hint = f"Attempts: {attempt}, the last one: {failure}"
            _unavailable(rule, f"none from {origin.source}", hint)
        logger.warning("reading %s again in %.0f s: %s", origin.source, pause, failure)
        time.sleep(pause)


@contextmanager
def _reading_process(*arguments: Any) -> Iterator[Connection]:
    """The pipe to a new process, which ends with this context or with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nsa.train.data", "datasets"])  # imported once, not by each
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve,
        args=(theirs, *arguments),
        daemon=True,
        name="nsa-documents",
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()  # it only reads
        process.join(timeout=_CLOSING_S)
        ours.close()


def _receive(connection: Connection, patience_s: float) -> Any:
    try:
        if connection.poll(max(patience_s, 0)):
            return connection.recv()
    except (EOFError, OSError):  # also in the middle of a message
        return OSError("The reading process died; memory may have run out.")
    return OSError(f"Silent for {patience_s:.1f} s.")


def _unavailable(rule: str, value: Any, hint: str = "", argument: str = "source") -> NoReturn:
    raise DataUnavailableError("read_documents", argument, rule, value, hint) from None


# --- in the reading process -----------------------------------------------------------------------
def _serve(
    connection: Connection,
    origin: Origin,
    start: Place,
    transform: Callable[[list[bytes]], T],
    threads: int,
) -> None:
    """Send what was found, batches, and at the end None, or the error that ended the reading."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    one_thread_for_tokenizers()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    file, tasks = "", Queue[Future[Any]](threads)

    def read() -> None:
        nonlocal file
        documents, found = open_documents(origin)
        tasks.put(pool.submit(lambda: found))
        for name, place, texts in _texts(documents, found, origin, start):
            file = name
            tasks.put(pool.submit(_make_batch, transform, place, texts))

    with suppress(BrokenPipeError), ThreadPoolExecutor(threads + 1) as pool:
        reading = pool.submit(read)
        reading.add_done_callback(tasks.put)  # the last one: None, or what ended the reading
        message: Any = _ALIVE
        while not (message is None or isinstance(message, Exception)):
            task = tasks.get()  # a read that hangs holds back nothing that has been read before
            while not wait([task], timeout=1).done:
                connection.send(_ALIVE)
            error = task.exception()
            message = task.result() if error is None else _failure(error, origin, file)
            connection.send(message)


def _make_batch(
    transform: Callable[[list[bytes]], T],
    place: Place,
    texts: list[bytes],
) -> DocumentBatch[T] | Place:
    if not texts:
        return place
    return DocumentBatch(place, place._replace(row=place.row + len(texts)), transform(texts))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a child process"
    parent.join()
    os._exit(1)


def _failure(error: BaseException, origin: Origin, file: str) -> Exception:
    """What the parent raises; an ``OSError`` if it is to try again."""
    if isinstance(error, UserError):
        return error
    source, library = Path(origin.source), type(error).__module__.partition(".")[0]
    text = sentence(f"{type(error).__name__}: {error}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    is_refusal = status is not None and 400 <= status < 500 and status not in _BUSY
    is_network = isinstance(error, READ_ERRORS) or library in _NETWORK_LIBRARIES
    if is_network and not source.exists() and not is_refusal:
        names = {cls.__name__ for cls in type(error).__mro__}
        return ConnectionError(text) if names & _NO_CONNECTION else OSError(text)
    is_format = isinstance(error, (*READ_ERRORS, ValueError)) or library in _FORMAT_LIBRARIES
    if is_refusal or is_format:
        what = f"{file} of {source}" if file else str(source)
        return UserError("read_documents", "source", "hold documents that can be read", what, text)
    bug = "".join(traceback.format_exception(error))
    return RuntimeError(f"the process that reads documents ended with an error:\n{bug}")


def open_documents(origin: Origin) -> tuple[datasets.IterableDataset, Found]:
    """Find the files of a data set on the hub, or of a folder that came from there.

    Raises:
        DataUnavailableError: it does not exist.
        UserError: the subset or split does not, or ``datasets`` finds no data in it.
    """
    import datasets

    datasets.disable_progress_bars()
    # The lock of its own, between processes, would outlive a process that is killed.
    datasets.utils.tqdm.set_lock(threading.RLock())
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an exception says the same
    path, split = Path(origin.source), origin.split
    revision = licence = None
    how: dict[str, Any] = {"path": origin.source, "name": origin.subset}
    if path.exists():
        how["path"] = str(path.resolve())
    else:
        revision, licence = _ask_hub(origin)
        how["revision"] = revision
    try:
        builder = datasets.load_dataset_builder(**how)
        if builder.name in _READER_SETTINGS:
            builder = datasets.load_dataset_builder(**how, **_READER_SETTINGS[builder.name])
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        rule, hint = "be a data set that datasets can read", sentence(str(error))
        fail("read_documents", "source", rule, origin.source, hint)
    files = builder.config.data_files or {}
    rule = f"be one of {', '.join(map(str, files)) or 'none'}"
    check(split in files, "read_documents", "split", rule, split)
    names = [re.sub(r"^hf://datasets/[^@]+@[^/]+/", "", name) for name in files[split]]
    if path.exists():
        names = [os.path.relpath(name, path) for name in names]
    versions = json.dumps([names, files[split].origin_metadata])
    digest = hashlib.sha256(versions.encode()).hexdigest()
    try:
        documents = builder.as_streaming_dataset(split=split)
    except StopIteration:  # of the JSON reader, which looks at the first rows for the columns
        rule, found = "begin with a file that holds documents", f"the empty {names[0]}"
        fail("read_documents", "source", rule, found)
    if builder.name == "text":  # its reader would turn every end of line into a newline
        reader = sys.modules[type(builder).__module__]
        vars(reader)["open"] = partial(_open_text, vars(reader).get("open", open))
    return documents, Found(builder.name, tuple(names), digest, revision, licence)


def _open_text(opener: Callable[..., Any], path: str, **how: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(opener(path, "rb"), newline="", **how)


def _ask_hub(origin: Origin) -> tuple[str | None, str | None]:
    """The commit that a data set's revision means now, and its licence.

    That is a quick question before ``datasets`` asks many.
    """
    from huggingface_hub import HfApi, errors

    source, revision = origin.source, origin.revision
    try:
        info = HfApi().dataset_info(source, revision=revision, timeout=_CONTACT_S)
    except errors.GatedRepoError:
        _unavailable("be open to you", source, "Accept its terms on the hub and log in there.")
    except errors.RevisionNotFoundError:
        _unavailable("exist on the hub", revision, argument="revision")
    except errors.RepositoryNotFoundError:
        where = f"{source} (nor is there such a file or folder here)"
        _unavailable("exist on the hub", where)
    return info.sha, None if info.card_data is None else info.card_data.get("license")


def _texts(
    documents: datasets.IterableDataset,
    found: Found,
    origin: Origin,
    start: Place,
) -> Iterator[tuple[str, Place, list[bytes]]]:
    """Consecutive texts with their file and the place of the first.

    A file begins with a list of none, as does what is skipped to get to the place to start at.
    """
    for file, rows in enumerate(_files(documents, start.file), start=start.file):
        name, place = found.files[file], Place(file)
        yield name, place, []
        skip = start.row if file == start.file else 0
        for table in rows.with_format("arrow").iter(batch_size=MAX_TEXTS):
            column = column_texts(table, origin.text_field, name)
            texts = column[max(skip - place.row, 0) :].to_pylist()
            place = place._replace(row=place.row + table.num_rows - len(texts))
            for batch in batches_of_texts(texts) if texts else [[]]:
                yield name, place, batch
                place = place._replace(row=place.row + len(batch))


def _files(documents: datasets.IterableDataset, first: int) -> Iterator[datasets.IterableDataset]:
    """The files of a data set from number ``first`` on, each as a data set.

    Halving costs n log n in all; asking for each by its number would cost n squared.
    """
    if documents.num_shards == 1:
        yield documents
        return
    for number in range(2):
        half = documents.shard(2, number, contiguous=True)
        if first < half.num_shards:
            yield from _files(half, max(first, 0))
        first -= half.num_shards
