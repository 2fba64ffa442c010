"""Token sources: windows of tokens, each found by its number."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nsa.errors import UserError, check
from nsa.train.data.tokenizer import Ids, Tokens, token_dtype


class DataUnavailableError(UserError):
    """The data do not exist, cannot be reached, or have stopped coming."""


class TokenSource:
    """Windows of ``seq_len + 1`` tokens: inputs, and the same shifted by one as targets.

    Attributes:
        separator_id: id that ends a document; None where windows hold no documents.
        token_bytes: int64 ``[vocab_size]``, bytes of text that each id spells.
    """

    separator_id: int | None
    token_bytes: Ids

    def num_windows(self, seq_len: int) -> int:
        """Windows that there are at this length."""
        raise NotImplementedError

    def window(self, seq_len: int, index: int) -> Ids:
        """Window ``index``: int64 ``[seq_len + 1]``; the same arguments give the same tokens."""
        raise NotImplementedError

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_] | None:
        """Which of the ``seq_len`` targets count: bool ``[seq_len]``, or None for all of them."""
        return None

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """Upper bound of the documents, whole or cut, in any ``num_windows`` different windows.

        None where that is not known before the text is read.
        """
        return None

    def check_window(self, seq_len: int, index: int) -> None:
        """Raise ``ValueError`` unless there is a window of this number."""
        last = self.num_windows(seq_len) - 1
        rule = f"lie between 0 and {last} at seq_len {seq_len}"
        check(0 <= index <= last, "TokenSource.window", "index", rule, index)


class TextSource(TokenSource):
    """Documents one after another, cut into windows.

    Window i begins at token ``i * seq_len`` and overlaps the next by the one token that is only a
    target, so each token but the first is a target of exactly one window. Tokens at the end that
    do not fill a window are left out.

    Attributes:
        tokens: ``[num_tokens]``, in the smallest unsigned type that holds the vocabulary.

    Args:
        documents: tokens of each document, ended by the separator.
        separator_id: see :class:`TokenSource`.
        token_bytes: int64 ``[vocab_size]``.
    """

    def __init__(
        self,
        documents: Iterable[Tokens],
        separator_id: int | None,
        token_bytes: Ids,
    ) -> None:
        empty = np.empty(0, token_dtype(len(token_bytes)))
        self.tokens = np.concatenate([empty, *documents], dtype=empty.dtype, casting="unsafe")
        self.separator_id = separator_id
        self.token_bytes = token_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens, separators included."""
        return len(self.tokens)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens ``start`` to ``stop - 1``, or to the last one."""
        return self.tokens[start:stop]

    def num_windows(self, seq_len: int) -> int:
        """See :class:`TokenSource`; 0 when there are fewer than ``seq_len + 1`` tokens."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def window(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`."""
        self.check_window(seq_len, index)
        return self.read(index * seq_len, (index + 1) * seq_len + 1).astype(np.int64)

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """See :class:`TokenSource`."""
        starts = self.document_starts()
        end = self.num_windows(seq_len) * seq_len
        counts = np.bincount(starts[(starts % seq_len != 0) & (starts < end)] // seq_len)
        return num_windows + int(np.sort(counts)[::-1][:num_windows].sum())

    def document_starts(self) -> Ids:
        """Number of the first token of each document: int64 ``[num_documents]``, ascending."""
        return np.append(0, np.flatnonzero(self.tokens == self.separator_id) + 1)[:-1]
