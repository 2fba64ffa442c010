"""Bigram model of the same tokens: the baseline that a language model must beat."""

from __future__ import annotations

import itertools

import numpy as np

from nsa.errors import check
from nsa.train.data.source import TextSource
from nsa.train.data.tokenizer import Ids, Tokens

_CHOOSING_SHARE = 0.1
_BIGRAM_PRIORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_UNIGRAM_PRIORS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_DENSE_PAIRS = 1 << 24  # up to so many possible pairs, counting all is faster than sorting


def bigram_bits_per_byte(
    train: TextSource,
    validation: TextSource,
    *,
    windows: Ids | None = None,
) -> float:
    """Bits per byte of validation text under a smoothed bigram model of the training text.

    ``P(b | a) = (count(a, b) + alpha * P(b)) / (count(a) + alpha)`` with
    ``P(b) = (count(b) + beta) / (N + beta * V)``: counts interpolated with the token's frequency,
    and that with the uniform distribution (MacKay and Peto, "A hierarchical Dirichlet language
    model", 1995). alpha and beta are chosen on the last tenth of the training text, with counts
    from the rest; the counts then come from all of it. Validation text has no part in the choice.

    As in a batch with ``document_mask``, the first token of a document is not a target, and the
    separator is a target that spells no bytes.

    Args:
        train: training text.
        validation: validation text, in the same tokens.
        windows: sequences of the validation text to measure, integers ``[N, seq_len + 1]``; None
            for all of the text.

    Returns:
        Bits per byte.
    """
    token_bytes = validation.token_bytes

    def count(tokens: Tokens | Ids) -> _Pairs:
        return _Pairs(tokens, len(token_bytes), train.separator_id)

    border = train.num_tokens - int(train.num_tokens * _CHOOSING_SHARE)
    counts, last = count(train.tokens[:border]), count(train.tokens[border - 1 :])
    priors = itertools.product(_BIGRAM_PRIORS, _UNIGRAM_PRIORS)
    alpha, beta = min(priors, key=lambda pair: counts.bits(last, *pair))
    measured = count(validation.tokens if windows is None else windows)
    num_bytes = int((measured.counts * token_bytes[measured.second]).sum())
    check(num_bytes > 0, "bigram_bits_per_byte", "validation", "hold text", f"{num_bytes} bytes")
    return count(train.tokens).bits(measured, alpha, beta) / num_bytes


class _Pairs:
    """Pairs of neighbouring tokens of a document, and their counts.

    The tokens are one text ``[T]`` or sequences ``[N, seq_len + 1]``. The pairs are in ascending
    order of ``codes``, ``first * vocab_size + second``.
    """

    def __init__(self, tokens: Tokens | Ids, vocab_size: int, separator: int | None) -> None:
        before, after = tokens[..., :-1], tokens[..., 1:]
        inside = before != separator
        codes = before[inside].astype(np.int64) * vocab_size + after[inside]
        if vocab_size**2 > _DENSE_PAIRS:
            self.codes, self.counts = np.unique(codes, return_counts=True)
        else:
            table = np.bincount(codes)
            self.codes = np.flatnonzero(table)
            self.counts = table[self.codes]
        self.first, self.second = np.divmod(self.codes, vocab_size)
        self.vocab_size = vocab_size

    def bits(self, text: _Pairs, alpha: float, beta: float) -> float:
        """Total ``-log2 P(second | first)`` of another text under these counts."""
        firsts = np.bincount(self.first, self.counts, self.vocab_size)
        seconds = np.bincount(self.second, self.counts, self.vocab_size)
        unigram = (seconds[text.second] + beta) / (seconds.sum() + beta * self.vocab_size)
        place = np.minimum(np.searchsorted(self.codes, text.codes), len(self.codes) - 1)
        seen = np.where(self.codes[place] == text.codes, self.counts[place], 0)
        probability = (seen + alpha * unigram) / (firsts[text.first] + alpha)
        return -float((text.counts * np.log2(probability)).sum())
