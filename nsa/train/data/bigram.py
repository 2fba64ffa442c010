"""The baseline that a language model must beat: a bigram model of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nsa.errors import check
from nsa.train.data.source import TextSource

_CHOOSING_SHARE = 0.1
_BIGRAM_PRIORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_DENSE_PAIRS = 1 << 24  # up to this many possible pairs, a table of all is quicker than sorting those that occur
_UNIGRAM_PRIORS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def bigram_bits_per_byte(train: TextSource, validation: TextSource, *, num_targets: int | None = None) -> float:
    """Bits per byte of validation text under a smoothed bigram model of the training text.

    ``P(b | a) = (count(a, b) + alpha * P(b)) / (count(a) + alpha)`` with ``P(b) = (count(b) + beta) / (N + beta * V)``: counts
    interpolated with the token's frequency, and that with the uniform distribution (MacKay and Peto, "A hierarchical Dirichlet
    language model", 1995). alpha and beta are chosen on the last tenth of the training text, with counts from the rest; the
    counts then come from all of it. Validation text plays no part in the choice.

    As in a batch with ``document_mask``, the first token of a document is not a target, and the separator is a target that
    spells no bytes.

    Args:
        train: training text.
        validation: held-out text, in the same tokens.
        num_targets: measures the first so many tokens only (``seq_len * num_windows`` for an evaluation); None for all.

    Returns:
        Bits per byte.
    """
    check(
        np.array_equal(train.token_bytes, validation.token_bytes) and train.separator_id == validation.separator_id,
        "bigram_bits_per_byte", "validation", "have the training text's vocabulary", f"{len(validation.token_bytes)} tokens",
    )  # fmt: skip
    vocab_size, separator = len(train.token_bytes), train.separator_id
    border = len(train.tokens) - int(len(train.tokens) * _CHOOSING_SHARE)
    counts = _count(train.tokens[:border], vocab_size, separator)
    chosen = _count(train.tokens[border - 1 :], vocab_size, separator)
    priors = [(alpha, beta) for alpha in _BIGRAM_PRIORS for beta in _UNIGRAM_PRIORS]
    alpha, beta = min(priors, key=lambda pair: counts.bits(chosen, *pair))
    measured = _count(validation.tokens[: None if num_targets is None else num_targets + 1], vocab_size, separator)
    num_bytes = int((measured.counts * validation.token_bytes[measured.second]).sum())
    check(num_bytes > 0, "bigram_bits_per_byte", "validation", "hold text", f"{num_bytes} bytes")
    return _count(train.tokens, vocab_size, separator).bits(measured, alpha, beta) / num_bytes


@dataclass(frozen=True)
class _Pairs:
    """Counts of the pairs that occur, in the order of ``first * vocab_size + second``."""

    vocab_size: int
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    counts: NDArray[np.int64]

    def bits(self, text: _Pairs, alpha: float, beta: float) -> float:
        """Total ``-log2 P(second | first)`` of another text under these counts."""
        firsts = np.bincount(self.first, self.counts, self.vocab_size)
        seconds = np.bincount(self.second, self.counts, self.vocab_size)
        unigram = (seconds[text.second] + beta) / (seconds.sum() + beta * self.vocab_size)
        known, wanted = self.first * self.vocab_size + self.second, text.first * self.vocab_size + text.second
        place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        seen = np.where(known[place] == wanted, self.counts[place], 0)
        probability = (seen + alpha * unigram) / (firsts[text.first] + alpha)
        return -float((text.counts * np.log2(probability)).sum())


def _count(tokens: NDArray[np.integer], vocab_size: int, separator: int | None) -> _Pairs:
    inside = tokens[:-1] != separator
    codes = tokens[:-1][inside].astype(np.int64) * vocab_size + tokens[1:][inside]
    check(codes.size > 0, "bigram_bits_per_byte", "tokens", "hold at least two tokens of a document", len(tokens))
    if vocab_size**2 <= _DENSE_PAIRS:
        table = np.bincount(codes)
        pairs = np.flatnonzero(table)
        counts = table[pairs]
    else:
        pairs, counts = np.unique(codes, return_counts=True)
    return _Pairs(vocab_size, pairs // vocab_size, pairs % vocab_size, counts)
