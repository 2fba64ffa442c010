"""Files that are whole or absent after a crash, and lines of JSON."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from nsa.errors import fail

Record = TypeVar("Record")


class FileErrors:
    """Context manager: each system error becomes an OSError that names a file.

    Libraries in Rust raise errors of their own, and a write that fails names no file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = error.filename or str(self._path)
        elif found:
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(self._path)) from error


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Context manager: a temporary path for a new file, which replaces ``path`` at the end.

    A reader, or a crash, sees either the old file or the new one, and an error leaves no part.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with FileErrors(path):
            yield temporary
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context manager: a temporary folder that is renamed to ``path`` at the end.

    An error leaves no part of it.
    """
    temporary = path.with_name(f".unfinished-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with FileErrors(path):
            temporary.mkdir(parents=True)
            yield temporary
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_text(path: Path, text: str | bytes) -> None:
    """Write a file so that a reader, or a crash, sees either the old text or the new one."""
    with new_file(path) as temporary:
        write_flushed(temporary, text)


def write_flushed(path: Path, text: str | bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
        file.flush()
        os.fsync(file.fileno())


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the renames and new files in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendedFile:
    """File to which content is appended as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, content: bytes) -> None:
        """Append ``content``.

        Raises:
            OSError: it could not be written; the file is unchanged.
        """
        with self.path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            left = memoryview(content)
            try:
                while left:  # a nearly full disk may write only a part
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(size)
                raise


def read_lines(
    path: Path, what: str, as_record: Callable[[Any], Record | None]
) -> list[tuple[bytes, Record | None]]:
    """Lines of a JSONL file with their records, oldest first; empty if there is no file.

    Args:
        path: the file.
        what: name of a record in messages, for example "a row".
        as_record: the record of a JSON value, or None if the value is no record.

    Returns:
        Each line with its record. The record of a last line that a crash left broken is None.

    Raises:
        UserError: a line before the last is no record.
    """
    lines = io.BytesIO(path.read_bytes()).readlines() if path.exists() else []
    found = [(line, _record(line, as_record)) for line in lines]
    for number, (line, record) in enumerate(found[:-1], start=1):
        if record is None:
            shown, hint = repr(line[:80].decode(errors="replace")), "Remove it to go on without it."
            fail(f"{path}:{number}: line", f"be {what} in JSON", shown, hint)
    return found


def _record(line: bytes, as_record: Callable[[Any], Record | None]) -> Record | None:
    try:
        return as_record(json.loads(line)) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
