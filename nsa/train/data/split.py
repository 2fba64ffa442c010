"""Training and validation text, disjoint by construction.

The text is divided before it is tokenised. So a tokenizer trained here sees training text alone, no token spans the border, and
each side becomes an array of its own: a window cannot reach from one into the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nsa.errors import check, fail
from nsa.train.data.documents import Document, identity_of

_ACCEPTED_SHARE = 0.8  # whole documents are held out if they reach this part of the share asked for
_LINE_SEARCH = 8  # a cut moves on to the next line if that is within this part (one eighth) of the tail


@dataclass(frozen=True)
class Piece:
    """A stretch of a document that goes to one side: all of it, except where a document is cut.

    Attributes:
        document: the whole document.
        start: first byte of the stretch.
        stop: byte after the last.
    """

    document: Document
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Name of the document."""
        return self.document.name

    @cached_property
    def text(self) -> bytes:
        """The bytes of the stretch."""
        return self.document.text[self.start : self.stop]

    @cached_property
    def sha256(self) -> str:
        """Hash of the stretch's bytes."""
        return hashlib.sha256(self.text).hexdigest()

    @cached_property
    def identity(self) -> str:
        """Hash by which stretches of the same text are recognised; final newlines do not count."""
        return identity_of(self.text)


@dataclass(frozen=True)
class Split:
    """Training and validation pieces; one that overlaps cannot be made.

    Attributes:
        train: pieces of the training text.
        validation: pieces of the validation text.
        rule: ``documents`` (whole documents held out) or ``tail`` (the end of the text held out).
        num_duplicates: documents left out because another has the same content.

    Raises:
        ValueError: a text, or a byte of a document, is on both sides; or a side is empty.
    """

    train: tuple[Piece, ...]
    validation: tuple[Piece, ...]
    rule: Literal["documents", "tail"]
    num_duplicates: int = 0

    def __post_init__(self) -> None:
        for side, pieces in (("train", self.train), ("validation", self.validation)):
            num_bytes = _num_bytes(pieces)
            check(num_bytes > 0, "Split", side, "hold text", f"{num_bytes} bytes", "There is too little text to divide.")
        check_disjoint(self.train, self.validation)

    @property
    def validation_share(self) -> float:
        """Bytes of the validation text over those of both."""
        held_out = _num_bytes(self.validation)
        return held_out / (held_out + _num_bytes(self.train))


def check_disjoint(train: Sequence[Piece], validation: Sequence[Piece]) -> None:
    """Raise unless no text and no byte of a document is on both sides.

    Raises:
        ValueError: naming the document and the bytes.
    """
    train_texts = {piece.identity for piece in train}
    train_ranges: dict[str, list[Piece]] = {}
    for piece in train:
        train_ranges.setdefault(piece.document.sha256, []).append(piece)
    for held_out in validation:
        if held_out.identity in train_texts:
            fail("check_disjoint", "validation", "share no text with training", held_out.name)
        for piece in train_ranges.get(held_out.document.sha256, []):
            start, stop = max(piece.start, held_out.start), min(piece.stop, held_out.stop)
            if start < stop:
                found = f"bytes {start} to {stop} of {held_out.name}"
                fail("check_disjoint", "validation", "share no bytes with training", found)


def split_documents(documents: Iterable[Document], validation_fraction: float) -> Split:
    """Hold a share of the text out.

    Documents with the same content, final newlines apart, count once. Whole documents are held out where they can make up the
    share: in the order of their content's SHA-256, each that still fits. If they reach less than 0.8 of it (few documents, or
    large ones), the end of the text is held out instead: whole documents from the last backwards, and the tail of the one that
    the border falls in, cut after a line where one ends nearby.

    Documents held out by hash keep that order, so that the first windows of validation are a fair sample; all others keep their
    own order.

    Args:
        documents: in a fixed order.
        validation_fraction: share of the bytes to hold out, above 0 and at most 0.5.

    Raises:
        ValueError: there is too little text to divide.
    """
    given = list(documents)
    first: dict[str, Document] = {}
    for document in given:
        first.setdefault(document.identity, document)
    unique = list(first.values())
    target = validation_fraction * sum(len(document.text) for document in unique)
    held_out = _fitting(sorted(unique, key=lambda document: document.sha256), target)
    if sum(len(document.text) for document in held_out) >= _ACCEPTED_SHARE * target > 0:
        hashes = {document.sha256 for document in held_out}
        train = [_whole(document) for document in unique if document.sha256 not in hashes]
        return Split(tuple(train), tuple(map(_whole, held_out)), "documents", len(given) - len(unique))
    train, validation = _tail(unique, target)
    # A training document may equal the tail that was cut off another one.
    tails = {piece.identity for piece in validation}
    kept = [piece for piece in train if piece.identity not in tails]
    return Split(tuple(kept), tuple(validation), "tail", len(given) - len(unique) + len(train) - len(kept))


def _fitting(documents: Iterable[Document], target: float) -> list[Document]:
    chosen, total = [], 0
    for document in documents:
        if total + len(document.text) <= target:
            chosen.append(document)
            total += len(document.text)
    return chosen


def _tail(documents: Sequence[Document], target: float) -> tuple[list[Piece], list[Piece]]:
    train: list[Piece] = []
    validation: list[Piece] = []
    missing = target
    for document in reversed(documents):
        size = len(document.text)
        cut = _line_start(document.text, size - round(missing)) if 0 < missing < size else (0 if missing > 0 else size)
        if cut < size:
            validation.append(Piece(document, cut, size))
        if cut > 0:
            train.append(Piece(document, 0, cut))
        missing = 0 if cut > 0 else missing - size
    return train[::-1], validation[::-1]


def _line_start(text: bytes, position: int) -> int:
    """First line start at or soon after a position; where there is none near, the next character."""
    newline = text.find(b"\n", max(position - 1, 0), position + (len(text) - position) // _LINE_SEARCH)
    if newline >= 0:
        return newline + 1
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return position


def _whole(document: Document) -> Piece:
    return Piece(document, 0, len(document.text))


def _num_bytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)
