"""Token sources: windows of tokens, each reachable by its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.errors import UserError, check, fail
from nsa.train.data.tokenizer import token_dtype


class DataUnavailableError(UserError):
    """The data are not there, cannot be reached, or do not come any more."""


class TokenSource(Protocol):
    """Windows of ``seq_len + 1`` tokens: ``seq_len`` inputs, and the same shifted by one as targets.

    Attributes:
        separator_id: id that ends a document; None where windows hold no documents.
        token_bytes: int64 ``[vocab_size]``, bytes of text that each id spells.
    """

    separator_id: int | None
    token_bytes: NDArray[np.int64]

    def num_windows(self, seq_len: int) -> int:
        """Windows that there are at this length."""
        ...

    def window(self, seq_len: int, index: int) -> NDArray[np.int64]:
        """Window ``index``: int64 ``[seq_len + 1]``. The same arguments give the same tokens, in any order of calls."""
        ...

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_] | None:
        """Which of the ``seq_len`` targets count: bool ``[seq_len]``, or None for all of them."""
        ...

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """Stretches of documents that any ``num_windows`` different windows hold together, at most.

        None where that is not known before the text is read.
        """
        ...


def most_sequences(source: TokenSource, starts: NDArray[np.integer], seq_len: int, num_windows: int) -> int:
    """:meth:`TokenSource.most_sequences` from the numbers of the tokens that begin documents."""
    inside = starts[(starts % seq_len != 0) & (starts < source.num_windows(seq_len) * seq_len)]
    counts = np.bincount(inside // seq_len) if len(inside) else np.zeros(1, dtype=np.int64)
    return num_windows + int(np.sort(counts)[::-1][:num_windows].sum())


class TextSource:
    """Documents one after another, each ended by the separator, cut into windows.

    Window i begins at token ``i * seq_len`` and overlaps the next by the one token that is only a target, so each token but the
    first is a target of exactly one window. A last stretch shorter than a window is left out.

    Attributes:
        tokens: ``[num_tokens]``, in the smallest unsigned type that holds the vocabulary.

    Args:
        documents: token ids of each document, without separator.
        separator_id: appended to each document.
        token_bytes: int64 ``[vocab_size]``.
    """

    def __init__(self, documents: Sequence[NDArray[np.integer]], separator_id: int, token_bytes: NDArray[np.int64]) -> None:
        num_tokens = sum(len(document) + 1 for document in documents)
        self.tokens = np.full(num_tokens, separator_id, dtype=token_dtype(len(token_bytes)))
        start = 0
        for document in documents:
            self.tokens[start : start + len(document)] = document
            start += len(document) + 1
        self.separator_id: int | None = separator_id
        self.token_bytes = token_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens, separators included."""
        return len(self.tokens)

    def num_windows(self, seq_len: int) -> int:
        """See :class:`TokenSource`; 0 when there are fewer than ``seq_len + 1`` tokens."""
        check(seq_len > 0, "TextSource.num_windows", "seq_len", "be positive", seq_len)
        return max(0, (len(self.tokens) - 1) // seq_len)

    def window(self, seq_len: int, index: int) -> NDArray[np.int64]:
        """See :class:`TokenSource`."""
        check_window(self, seq_len, index)
        return self.tokens[index * seq_len : (index + 1) * seq_len + 1].astype(np.int64)

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_] | None:
        """See :class:`TokenSource`: every target counts (packing leaves out those across documents)."""
        return None

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """See :class:`TokenSource`."""
        starts = np.flatnonzero(self.tokens == self.separator_id) + 1
        return most_sequences(self, starts, seq_len, num_windows)


def check_window(source: TokenSource, seq_len: int, index: int) -> None:
    """Raise ``ValueError`` unless the source has a window of this number."""
    num_windows = source.num_windows(seq_len)
    if not 0 <= index < num_windows:
        fail("TokenSource.window", "index", f"lie between 0 and {num_windows - 1} at seq_len {seq_len}", index)
