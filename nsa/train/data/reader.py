"""Documents of a data set: local files, or through ``datasets`` those of the hub.

A process of its own reads the hub, and local copies whose card lists subsets. A read that hangs in
a library cannot be interrupted; a process can be ended, and the next one starts where the documents
broke off. ``datasets`` is imported in that process only.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nsa.errors import UserError, check, fail
from nsa.extras import install_command
from nsa.train.data.batch import DataUnavailableError
from nsa.train.data.documents import COMPRESSED, FORMATS
from nsa.train.data.local import (
    READ_ERRORS,
    Documents,
    Found,
    Origin,
    Place,
    column_texts,
    find_files,
    is_local,
    local_texts,
    sentence,
    texts_from,
    unreadable,
)
from nsa.train.data.tokenizer import MAX_TEXTS, fingerprint_of

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")  # a name, or an owner and a name
_CONTACT_S = 10  # for the answer of a server that is asked whether it has a data set
_ATTEMPTS = 4  # a process that is silent for this part of the time limit is ended and replaced
_LONGEST_PAUSE_S = 30
_CLOSING_S = 2.0
_BUSY = (408, 425, 429)  # status codes of a server that may answer differently a little later
_NETWORK_LIBRARIES = {"fsspec", "httpcore", "httpx", "httpx2", "huggingface_hub"}


class Pace:
    """Limit for log lines: one in ten seconds."""

    PERIOD_S = 10.0

    def __init__(self) -> None:
        self._next = time.monotonic() + self.PERIOD_S

    def is_due(self) -> bool:
        """Return whether the next line may be written; it then counts as written."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self.PERIOD_S
        return True


def read_documents(
    origin: Origin, *, start: Place | None = None, time_limit_s: float
) -> tuple[Found, Generator[Documents, None, None]]:
    """Read documents in the data set's own order.

    Errors in reading local files are raised at once. A read of the hub that fails because of the
    network, or is silent for a quarter of the time limit, is repeated from the same place after a
    pause of 1, 2, 4, .. 30 seconds. If no document has come for the whole time limit, or there is
    no connection in the first place, that is an error. Time that the caller takes does not count.

    Args:
        origin: data set to read.
        start: position to begin at; None begins at the first document.
        time_limit_s: seconds without a document after which reading is given up.

    Returns:
        The files that were found, and the documents; closing the generator ends the process.

    Raises:
        DataUnavailableError: the source does not exist, cannot be reached, or stays silent.
        UserError: it cannot be read as documents.
    """
    check(time_limit_s > 0, "read_documents", "time_limit_s", "be positive", time_limit_s)
    path, start = Path(origin.source), start or Place()
    is_file_name = path.suffix in (*FORMATS, *COMPRESSED)
    if not path.exists() and (is_file_name or not _HUB_NAME.fullmatch(origin.source)):
        _unavailable("exist", origin.source, "It is no name on the hub.")
    if is_local(origin):
        found = find_files(origin)
        texts = local_texts(origin, found, start)
    else:
        rule = "be text or JSON lines on this machine, where the package datasets is not installed"
        hint = f"Install with: {install_command('data')}"
        has_datasets = find_spec("datasets") is not None
        check(has_datasets, "read_documents", "source", rule, origin.source, hint)
        rule = "be left out for a data set of the hub"
        check(origin.pattern is None, "read_documents", "pattern", rule, origin.pattern)
        messages = _from_process(origin, start, time_limit_s)
        found, texts = next(messages), messages
    return found, _after(texts, start.row, origin.source)


def _after(
    texts: Iterator[Documents], skipped: int, source: str
) -> Generator[Documents, None, None]:
    """Documents without the empty batches of skipped rows, whose number is logged."""
    pace = Pace()
    for batch in texts:
        if batch.texts:
            yield batch
        elif batch.end.row and pace.is_due():
            what = "file %d of %s: %d of %d rows skipped"
            logger.info(what, batch.end.file + 1, source, batch.end.row, skipped)


def _from_process(origin: Origin, start: Place, time_limit_s: float) -> Generator[Any, None, None]:
    """The files that were found, then texts; a process that fails is replaced by another one."""
    is_known, attempt, left_s = False, 0, time_limit_s
    while True:
        with _reading_process(origin, start) as connection:
            while True:
                begin, patience_s = time.monotonic(), max(min(time_limit_s / _ATTEMPTS, left_s), 0)
                message: Any = OSError(f"Silent for {patience_s:.1f} s.")
                try:
                    if connection.poll(patience_s):
                        message = connection.recv()
                except (EOFError, OSError):  # also in the middle of a message
                    message = OSError("The reading process died; memory may have run out.")
                if isinstance(message, OSError):
                    break
                if isinstance(message, Exception):
                    raise message
                if message is None:
                    return
                if isinstance(message, Documents):
                    if message.texts:
                        attempt, left_s, start = 0, time_limit_s, message.end
                    yield message
                elif not is_known:
                    is_known, origin = True, replace(origin, revision=message.revision)
                    yield message
        if isinstance(message, ConnectionError) and not is_known:
            where = f"{origin.source} (there is no such file or folder here)"
            hint = f"{message} Check the network, or give a copy on this machine."
            _unavailable("be reachable", where, hint)
        pause = min(2.0**attempt, _LONGEST_PAUSE_S)
        attempt += 1
        left_s -= time.monotonic() - begin + pause
        if left_s < 0:
            rule = f"send documents within the time limit of {time_limit_s:g} s"
            hint = f"Attempts: {attempt}, the last one: {message}"
            _unavailable(rule, f"none from {origin.source}", hint)
        logger.warning("reading %s again in %.0f s: %s", origin.source, pause, message)
        time.sleep(pause)


@contextmanager
def _reading_process(origin: Origin, start: Place) -> Iterator[Connection]:
    """Context manager: a pipe to a new process, which ends with the context or this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nsa.train.data", "datasets"])  # imported once, not by each
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, origin, start), daemon=True, name="nsa-documents"
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()  # it only reads
        process.join(timeout=_CLOSING_S)
        ours.close()


def _unavailable(rule: str, value: Any, hint: str = "", argument: str = "source") -> NoReturn:
    raise DataUnavailableError("read_documents", argument, rule, value, hint) from None


# --- in the reading process -----------------------------------------------------------------------
def _serve(connection: Connection, origin: Origin, start: Place) -> None:
    """Send what was found, texts, and at the end None or the error that ended the reading."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    where = origin.source

    def read() -> None:
        nonlocal where
        files: tuple[str, ...] = ()
        for message in _read_hub(origin, start):
            if isinstance(message, Found):
                files = message.files
            else:
                where = f"{files[message.end.file]} of {origin.source}"
            connection.send(message)

    with suppress(BrokenPipeError), ThreadPoolExecutor(1) as pool:
        error = pool.submit(read).exception()
        connection.send(None if error is None else _failure(error, origin.source, where))


def _failure(error: BaseException, source: str, where: str) -> Exception:
    """Error for the parent: an ``OSError`` if it is to try again, otherwise a UserError."""
    if isinstance(error, UserError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", 500)
    is_refusal = 400 <= status < 500 and status not in _BUSY
    library = type(error).__module__.partition(".")[0]
    is_network = isinstance(error, READ_ERRORS) or library in _NETWORK_LIBRARIES
    if not is_network or is_refusal or Path(source).exists():
        return unreadable(where, error)
    kind = ConnectionError if "Connect" in type(error).__name__ else OSError
    return kind(sentence(error))


def _read_hub(origin: Origin, start: Place) -> Iterator[Found | Documents]:
    """Files of a data set of the hub, or of a local copy, and then their texts."""
    import datasets

    datasets.disable_progress_bars()
    # The lock of its own, between processes, would outlive a process that is killed.
    datasets.utils.tqdm.set_lock(threading.RLock())
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an exception reports the same
    builder, found = _open_hub(origin)
    yield found
    config, split = builder.config, origin.split
    files = config.data_files[split]
    for number in range(start.file, len(files)):
        yield Documents(Place(number), [])  # names the file of later errors
        config.data_files = {split: files[number : number + 1]}
        try:
            rows = builder.as_streaming_dataset(split=split).with_format("arrow")
        except StopIteration:  # of the JSON reader, for an empty file
            continue
        tables = (
            column_texts(table, origin.text_field, found.files[number])
            for table in rows.iter(batch_size=MAX_TEXTS)
        )
        yield from texts_from(start, number, chain.from_iterable(tables))


def _open_hub(origin: Origin) -> tuple[datasets.DatasetBuilder, Found]:
    """Find the files of a data set of the hub, or of a local copy.

    Raises:
        DataUnavailableError: it does not exist.
        UserError: the subset or split does not, or ``datasets`` finds no data in it.
    """
    import datasets

    path, revision, licence = Path(origin.source), None, None
    source = str(path.resolve()) if path.exists() else origin.source
    if not path.exists():
        revision, licence = _ask_hub(origin)
    try:
        builder = datasets.load_dataset_builder(source, origin.subset, revision=revision)
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        rule, hint = "be a data set that datasets can read", sentence(ValueError(str(error)))
        fail("read_documents", "source", rule, origin.source, hint)
    files = builder.config.data_files or {}
    rule = f"be one of {', '.join(map(str, files)) or 'none'}"
    check(origin.split in files, "read_documents", "split", rule, origin.split)
    if builder.name == "parquet":  # decoded in pieces, not by row groups, which may be large
        builder.config.batch_size = MAX_TEXTS
    if builder.name == "text":  # a file is one document, not one a line
        builder.config.sample_by = "document"
        # The reader would turn every end of line into a newline.
        reader = vars(sys.modules[type(builder).__module__])
        reader["open"] = partial(_open_text, reader.get("open", open))
    names = [re.sub(r"^hf://datasets/[^@]+@[^/]+/", "", name) for name in files[origin.split]]
    if path.exists():
        names = [os.path.relpath(name, path) for name in names]
    fingerprint = fingerprint_of([names, files[origin.split].origin_metadata])
    return builder, Found(builder.name, tuple(names), fingerprint, revision, licence)


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
