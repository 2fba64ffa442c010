"""Bigram model of the same tokens: the baseline that a language model must beat."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from nsa.errors import check
from nsa.train.data.batch import TextSource
from nsa.train.data.tokenizer import Ids, Tokens

_Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # codes and counts

_CHOOSING_FRACTION = 0.1
_BIGRAM_PRIORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_UNIGRAM_PRIORS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_DENSE_PAIRS = 1 << 24  # up to so many possible pairs, counting all is faster than sorting


def bigram_bits_per_byte(
    train: TextSource,
    validation: TextSource,
    *,
    sequences: Ids | None = None,
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
        sequences: sequences of the validation text to measure, integers ``[N, seq_len + 1]``; None
            for all of the text.

    Returns:
        Bits per byte.
    """
    size, separator = len(validation.token_bytes), train.separator_id
    border = train.num_tokens - int(train.num_tokens * _CHOOSING_FRACTION)
    counts, last = (
        _count(tokens, size, separator)
        for tokens in (train.tokens[:border], train.tokens[border - 1 :])
    )
    priors = itertools.product(_BIGRAM_PRIORS, _UNIGRAM_PRIORS)
    alpha, beta = min(priors, key=lambda pair: _bits(counts, last, size, *pair))
    measured = _count(validation.tokens if sequences is None else sequences, size, separator)
    num_bytes = int((measured[1] * validation.token_bytes[measured[0] % size]).sum())
    rule = "contain text"
    check(num_bytes > 0, "validation", rule, f"{num_bytes} bytes")
    counts = _count(train.tokens, size, separator)
    return _bits(counts, measured, size, alpha, beta) / num_bytes


def _count(tokens: Tokens | Ids, vocab_size: int, separator: int | None) -> _Pairs:
    """Codes of the pairs of neighbouring tokens of a document, ascending, and their counts.

    Args:
        tokens: one text ``[T]`` or sequences ``[N, seq_len + 1]``.
        vocab_size: a code is ``first * vocab_size + second``.
        separator: id that ends a document.
    """
    before, after = tokens[..., :-1], tokens[..., 1:]
    inside = before != separator
    codes = before[inside].astype(np.int64) * vocab_size + after[inside]
    if vocab_size**2 > _DENSE_PAIRS:
        return np.unique(codes, return_counts=True)
    table = np.bincount(codes)
    codes = np.flatnonzero(table)
    return codes, table[codes]


def _bits(train: _Pairs, text: _Pairs, vocab_size: int, alpha: float, beta: float) -> float:
    """Total ``-log2 P(second | first)`` of a text under the counts of the training text."""
    (codes, counts), (wanted, times) = train, text
    firsts = np.bincount(codes // vocab_size, counts, vocab_size)
    seconds = np.bincount(codes % vocab_size, counts, vocab_size)
    unigram = (seconds[wanted % vocab_size] + beta) / (seconds.sum() + beta * vocab_size)
    index = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    seen = np.where(codes[index] == wanted, counts[index], 0)
    probability = (seen + alpha * unigram) / (firsts[wanted // vocab_size] + alpha)
    return -float((times * np.log2(probability)).sum())
