"""Names for the documents of a data set: where they come from, and places in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Place(NamedTuple):
    """The next document to read: the number of its file in the data set, and of its row in it."""

    file: int = 0
    row: int = 0


@dataclass(frozen=True)
class Origin:
    """Data set to read.

    Attributes:
        source: a local file or folder, or a data set on the Hugging Face hub (``owner/name``).
        subset: the data set's configuration, for example ``sample-10BT``.
        split: its split.
        revision: commit, branch or tag on the hub.
        text_field: column that holds the text.
        pattern: glob of the files of a local folder, matched at every depth; None reads the
            formats of :data:`nsa.train.sources.FORMATS`.
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
        format: ``parquet``, ``json``, ``text``, or on the hub another reader of ``datasets``.
        files: names of its files, in the order in which they are read.
        fingerprint: SHA-256 over names and versions of the files (commit on the hub, time of change
            on a disk).
        revision: commit on the hub; None elsewhere.
        licence: as the hub states it; None elsewhere.
        skipped: names of files of a local folder that are not read.
    """

    format: str
    files: tuple[str, ...]
    fingerprint: str
    revision: str | None = None
    licence: str | None = None
    skipped: tuple[str, ...] = ()


class DocumentBatch(NamedTuple, Generic[T]):
    """Consecutive documents of one file.

    Attributes:
        start: place of the first.
        end: place after the last.
        payload: result of ``transform`` for their texts.
    """

    start: Place
    end: Place
    payload: T


def skipped_files(names: Sequence[str], shown: int = 10) -> str:
    """Number and first names of files that are not read."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return f"skipped files: {len(names):,} ({', '.join(names[:shown])}{more})"


class Pace:
    """Limit for log lines: one in ten seconds."""

    PERIOD_S = 10.0

    def __init__(self) -> None:
        self._next = time.monotonic() + self.PERIOD_S

    def is_due(self) -> bool:
        """Whether the next line may be written; it then counts as written."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self.PERIOD_S
        return True
