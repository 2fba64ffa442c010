"""Repetition of earlier text by a model, as a function of the distance.

The last tokens of a sequence are replaced by the tokens some distance before. A model that finds
the earlier passage predicts them with nearly no loss; otherwise the loss is that of new text. Heads
that do this are the induction heads of Olsson et al., arXiv:2209.11895.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.errors import check
from nsa.train.data import TextSource, TokenSource
from nsa.train.data.tokenizer import Ids
from nsa.train.evaluation import Measurement, SplitSequences, Sums, figures_of


class RepeatedPassages(TokenSource):
    """Windows of one document whose last tokens repeat those ``distance`` tokens before.

    Targets are the second half of the passage, where the model can know that the text repeats, and
    the same tokens at their first place.

    Args:
        source: the text.
        seq_len: tokens of a window; it has windows of no other length.
        length: tokens of the passage.
        distance: tokens from the passage to its repetition.
    """

    def __init__(self, source: TextSource, seq_len: int, length: int, distance: int) -> None:
        self.separator_id, self.token_bytes = None, source.token_bytes
        self._source, self._length, self._distance = source, length, distance
        ends = np.append(source.document_starts()[1:], source.num_tokens) - 1  # separators
        first = np.arange(source.num_sequences(seq_len)) * seq_len
        before, upto = np.searchsorted(ends, first), np.searchsorted(ends, first + seq_len, "right")
        self._windows = np.flatnonzero(before == upto)
        half = length // 2
        self.again = slice(seq_len - half, seq_len)  # rows of targets
        self.at_first = slice(seq_len - half - distance, seq_len - distance)

    def windows(self, seq_len: int) -> SplitSequences:
        """Sequences to measure; each counts as a document."""
        return SplitSequences(self, seq_len, document_mask=False)

    def num_sequences(self, seq_len: int) -> int:
        """Number of windows that are inside one document."""
        return len(self._windows)

    def sequence(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`."""
        tokens = self._source.sequence(seq_len, self._windows[index])
        begin = len(tokens) - self._length
        tokens[begin:] = tokens[begin - self._distance :][: self._length].copy()
        return tokens

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_]:
        """See :class:`TokenSource`."""
        mask = np.zeros(seq_len, dtype=bool)
        mask[self.again] = mask[self.at_first] = True
        return mask

    def figures(self, measured: Measurement) -> dict[str, Any]:
        """Figures of the repetition, and of the first place as ``first_*``."""

        def of(rows: slice) -> dict[str, float]:
            sums: Sums = measured.positions[rows]
            return figures_of(*sums.sum(axis=0).tolist())

        first = {f"first_{name}": value for name, value in of(self.at_first).items()}
        del first["first_num_targets"], first["first_num_bytes"]
        return {"distance": self._distance, **of(self.again), **first}


def repeated_passages(source: TokenSource, seq_len: int, length: int) -> list[RepeatedPassages]:
    """Make repetitions at distances ``length``, twice as far and so on, up to the whole window.

    Args:
        source: the text.
        seq_len: tokens of a window.
        length: tokens of the passage.

    Raises:
        ValueError: a window has no room for the passage twice, no document fills one, or there are
            no documents.
    """
    rule = f"be from 2 to {seq_len // 2}, half of a window"
    check(2 <= length <= seq_len // 2, "eval", "--repeat", rule, length)
    is_text = isinstance(source, TextSource)
    check(is_text, "eval", "--repeat", "be left out for a synthetic task", length)
    assert isinstance(source, TextSource)
    furthest = seq_len - length
    doubled = [length << k for k in range(seq_len.bit_length())]
    distances = [*(distance for distance in doubled if distance < furthest), furthest]
    found = [RepeatedPassages(source, seq_len, length, distance) for distance in distances]
    rule = f"be left out, as no document of the text has a whole window of {seq_len} tokens"
    check(found[0].num_sequences(seq_len) > 0, "eval", "--repeat", rule, length)
    return found
