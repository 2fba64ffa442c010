"""From the texts of documents to tokens, with a side for each document."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nsa.train.data.tokenizer import Tokenizer, token_dtype

Side = Literal["train", "validation"]
SIDES: tuple[Side, Side] = ("train", "validation")
_HASH_BYTES = 8


def side_of(text: bytes, validation_fraction: float) -> Side:
    """The side that a document belongs to: held out if its SHA-256, as a number from 0 to 1, is below the fraction.

    A document's side depends on its text alone. So the sides share no document, whatever the order and the number of copies,
    and a data set that grows moves none from one side to the other. Newlines at its end do not count.
    """
    number = int.from_bytes(hashlib.sha256(text.rstrip(b"\r\n")).digest()[:_HASH_BYTES], "big")
    return "validation" if number < validation_fraction * 2 ** (8 * _HASH_BYTES) else "train"


@dataclass(frozen=True)
class Texts:
    """Texts of consecutive rows, in a form that goes quickly from process to process.

    Attributes:
        buffer: the texts without anything between them.
        lengths: int64 ``[rows]``: bytes of each; 0 for a row without text.
    """

    buffer: bytes
    lengths: NDArray[np.int64]

    def __iter__(self) -> Iterator[bytes]:
        start = 0
        for length in self.lengths.tolist():
            yield self.buffer[start : start + length]
            start += length


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of the documents in a batch of rows.

    Attributes:
        tokens: by side, those of its documents in order, each ended by the separator, in the smallest unsigned type.
        lengths: int64 ``[rows]``: tokens of each row, separator included; 0 for a row without a document of the sides wanted.
        held_out: bool ``[rows]``: whether the row's document is validation text.
        num_bytes: int64 ``[rows]``: bytes of the row's text, 0 where ``lengths`` is.
        empty: bool ``[rows]``: rows without text.
        unreadable: bool ``[rows]``: rows whose text is not UTF-8 or holds a NUL byte.
    """

    tokens: dict[Side, NDArray[Any]]
    lengths: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    num_bytes: NDArray[np.int64]
    empty: NDArray[np.bool_]
    unreadable: NDArray[np.bool_]

    def is_of(self, side: Side) -> NDArray[np.bool_]:
        """Which rows belong to a side, bool ``[rows]``; a row without document belongs to training."""
        return self.held_out if side == "validation" else ~self.held_out

    def head(self, rows: int) -> TokenBatch:
        """The first so many rows."""
        return TokenBatch(
            {side: tokens[: int(self.lengths[:rows][self.is_of(side)[:rows]].sum())] for side, tokens in self.tokens.items()},
            self.lengths[:rows],
            self.held_out[:rows],
            self.num_bytes[:rows],
            self.empty[:rows],
            self.unreadable[:rows],
        )


@dataclass(frozen=True)
class Tokenise:
    """The step from texts to tokens, ready to be sent to another process.

    Attributes:
        tokenizer: of all sides; it has a separator.
        validation_fraction: see :func:`side_of`.
        sides: documents of other sides become rows without tokens.
    """

    tokenizer: Tokenizer
    validation_fraction: float
    sides: tuple[Side, ...] = SIDES

    def __call__(self, texts: Texts) -> TokenBatch:
        """Tokenise a batch."""
        rows: dict[Side, list[int]] = {side: [] for side in self.sides}
        documents: dict[Side, list[bytes]] = {side: [] for side in self.sides}
        held_out, empty, unreadable = np.zeros((3, len(texts.lengths)), dtype=bool)
        for row, text in enumerate(texts):
            if not text:
                empty[row] = True
            elif not is_text(text):
                unreadable[row] = True
            elif (side := side_of(text, self.validation_fraction)) in rows:
                rows[side].append(row)
                documents[side].append(text)
        lengths, num_bytes = np.zeros((2, len(texts.lengths)), dtype=np.int64)
        tokens: dict[Side, NDArray[Any]] = {}
        for side in self.sides:
            encoded = self.tokenizer.encode_batch(documents[side])
            lengths[rows[side]] = [len(ids) + 1 for ids in encoded]
            num_bytes[rows[side]] = texts.lengths[rows[side]]
            held_out[rows[side]] = side == "validation"
            tokens[side] = self._joined(encoded)
        return TokenBatch(tokens, lengths, held_out, num_bytes, empty, unreadable)

    def _joined(self, encoded: Sequence[NDArray[Any]]) -> NDArray[Any]:
        dtype = token_dtype(self.tokenizer.vocab_size)
        tokens = np.full(sum(len(ids) + 1 for ids in encoded), self.tokenizer.separator_id, dtype=dtype)
        start = 0
        for ids in encoded:
            tokens[start : start + len(ids)] = ids
            start += len(ids) + 1
        return tokens


def is_text(text: bytes) -> bool:
    """Whether bytes are UTF-8 without NUL, which is the byte tokenizer's separator."""
    if b"\0" in text:
        return False
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
