"""Documents of a data set: local files, or through ``datasets`` those of the hub.

A process of its own reads the hub, and local copies whose card lists subsets. A read that hangs in
a library cannot be interrupted; a process can be ended, and the next one starts where the documents
broke off. ``datasets`` is imported in that process only.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

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
    find_files,
    is_local,
    sentence,
    texts_of_files,
)
from nsa.train.data.tokenizer import fingerprint_of

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
    check(time_limit_s > 0, "time_limit_s", "be positive", time_limit_s)
    path, start = Path(origin.source), start or Place()
    is_file_name = path.suffix in (*FORMATS, *COMPRESSED)
    if not path.exists() and (is_file_name or not _HUB_NAME.fullmatch(origin.source)):
        _unavailable("exist", origin.source, "It is no name on the hub.")
    if is_local(origin):
        found = find_files(origin)
        root = path.parent if path.is_file() else path
        texts = texts_of_files(
            origin, found, start, lambda number: (root / found.files[number]).open("rb")
        )
    else:
        rule = "be text or JSON lines on this machine, where the package datasets is not installed"
        hint = f"Install with: {install_command('data')}"
        has_datasets = find_spec("datasets") is not None
        check(has_datasets, "source", rule, origin.source, hint)
        rule = "be left out for a data set of the hub"
        check(origin.pattern is None, "pattern", rule, origin.pattern)
        messages = _from_process(origin, start, time_limit_s)
        found, texts = next(messages), messages
    return found, _after(texts, found, origin.source, start.row)


def _after(
    batches: Iterator[Documents], found: Found, source: str, skipped: int
) -> Generator[Documents, None, None]:
    """Batches with texts; logs how many rows were skipped, and names the file of an error."""
    pace, file = Pace(), 0
    try:
        for batch in batches:
            file = batch.end.file
            if batch.texts:
                yield batch
            elif batch.end.row and pace.is_due():
                what = "file %d of %s: %d of %d rows skipped"
                logger.info(what, file + 1, source, batch.end.row, skipped)
    except UserError:
        raise
    except (*READ_ERRORS, ValueError, RecursionError, NotImplementedError) as error:
        name, rule = found.files[file], "contain documents that can be read"
        where = source if Path(source).is_file() else f"{name} of {source}"
        raise UserError("source", rule, where, sentence(error)) from None


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
    raise DataUnavailableError(argument, rule, value, hint) from None


# --- in the reading process -----------------------------------------------------------------------
def _serve(connection: Connection, origin: Origin, start: Place) -> None:
    """Send what was found, texts, and at the end None or the error that ended the reading."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle

    def read() -> None:
        for message in _read_hub(origin, start):
            connection.send(message)

    with suppress(BrokenPipeError), ThreadPoolExecutor(1) as pool:
        error = pool.submit(read).exception()
        connection.send(None if error is None else _failure(error, origin.source))


def _failure(error: BaseException, source: str) -> Exception:
    """Error for the parent: an ``OSError`` if it is to try again, a ValueError for bad content."""
    if isinstance(error, UserError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", 500)
    is_refusal = 400 <= status < 500 and status not in _BUSY
    library = type(error).__module__.partition(".")[0]
    is_network = isinstance(error, READ_ERRORS) or library in _NETWORK_LIBRARIES
    if not is_network or is_refusal or Path(source).exists():
        return ValueError(sentence(error))
    kind = ConnectionError if "Connect" in type(error).__name__ else OSError
    return kind(sentence(error))


def _read_hub(origin: Origin, start: Place) -> Iterator[Found | Documents]:
    """Files of a data set of the hub, or of a local copy, and then their texts."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    # Its lock between processes would outlive a process that is killed.
    datasets.utils.tqdm.set_lock(threading.RLock())
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an exception reports the same
    found, urls = _find_hub(origin)
    yield found
    opener = open if Path(origin.source).exists() else huggingface_hub.HfFileSystem().open
    yield from texts_of_files(origin, found, start, lambda number: opener(urls[number], "rb"))


def _find_hub(origin: Origin) -> tuple[Found, list[str]]:
    """Files of a data set of the hub, or of a local copy, and their addresses.

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
        fail("source", rule, origin.source, hint)
    files = builder.config.data_files or {}
    rule = f"be one of {', '.join(map(str, files)) or 'none'}"
    check(origin.split in files, "split", rule, origin.split)
    urls = files[origin.split]
    names = [re.sub(r"^hf://datasets/[^@]+@[^/]+/", "", url) for url in urls]
    if path.exists():
        names = [os.path.relpath(name, path) for name in names]
    fingerprint = fingerprint_of([names, urls.origin_metadata])
    return Found(builder.name, tuple(names), fingerprint, revision, licence), urls


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
