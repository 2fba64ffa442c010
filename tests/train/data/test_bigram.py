from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from nsa.train.config import DataConfig
from nsa.train.data import TextSource, bigram, bigram_bits_per_byte, open_data

BYTES = np.ones(256, dtype=np.int64)
BYTES[0] = 0


def markov_source(length: int, seed: int) -> tuple[TextSource, float]:
    """Text of a known bigram process over 8 letters, and its entropy rate in bits."""
    transitions = np.random.default_rng(1).dirichlet(np.full(8, 0.3), size=8)
    uniform = np.random.default_rng(seed).random(length)
    cumulative = transitions.cumsum(axis=1)
    states = [0]
    for value in uniform:
        states.append(min(int(np.searchsorted(cumulative[states[-1]], value)), 7))
    powers = np.linalg.matrix_power(transitions, 200)[0]
    entropy = -float((powers[:, None] * transitions * np.log2(np.maximum(transitions, 1e-300))).sum())
    return TextSource([np.array(states, dtype=np.int64) + 97], 0, BYTES), entropy


def test_reaches_the_entropy_of_a_bigram_process() -> None:
    train, entropy = markov_source(60_000, seed=2)
    validation, _ = markov_source(60_000, seed=3)
    assert 0.5 < entropy < 2.5
    assert bigram_bits_per_byte(train, validation) == pytest.approx(entropy, rel=0.02)


def brute_force_bits(train: list[int], text: list[int], vocab_size: int, alpha: float, beta: float) -> float:
    pairs = [pair for pair in itertools.pairwise(train) if pair[0] != 0]
    bits = 0.0
    for first, second in itertools.pairwise(text):
        if first == 0:
            continue
        unigram = (sum(b == second for _, b in pairs) + beta) / (len(pairs) + beta * vocab_size)
        seen = sum(pair == (first, second) for pair in pairs)
        bits -= math.log2((seen + alpha * unigram) / (sum(a == first for a, _ in pairs) + alpha))
    return bits


@pytest.mark.parametrize("vocab_size", [5, 5000])  # both ways of counting
def test_probabilities_are_those_of_the_formula(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    train, text = rng.integers(0, 5, size=80), rng.integers(0, 5, size=50)
    text[7] = vocab_size - 1
    counts = bigram._count(train, vocab_size, 0)
    measured = bigram._count(text, vocab_size, 0)
    for alpha, beta in ((0.1, 1.0), (3.0, 0.01)):
        expected = brute_force_bits(train.tolist(), text.tolist(), vocab_size, alpha, beta)
        assert counts.bits(measured, alpha, beta) == pytest.approx(expected, rel=1e-12)


def test_probabilities_sum_to_one() -> None:
    train = np.random.default_rng(0).integers(0, 6, size=60)
    counts = bigram._count(train, 7, 0)  # token 6 never occurs
    for first in range(1, 7):
        total = sum(2 ** -counts.bits(bigram._count(np.array([first, second]), 7, 0), 0.7, 0.3) for second in range(7))
        assert total == pytest.approx(1, rel=1e-12)


def test_validation_plays_no_part_in_the_smoothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the priors fixed to the chosen pair, any validation text gives the same as with the choice."""
    train, _ = markov_source(3_000, seed=2)
    rng = np.random.default_rng(0)
    texts = [TextSource([rng.integers(97, 105, size=500)], 0, BYTES), markov_source(500, seed=9)[0]]
    free = [bigram_bits_per_byte(train, text) for text in texts]
    matches = set()
    for alpha in bigram._BIGRAM_PRIORS:
        for beta in bigram._UNIGRAM_PRIORS:
            monkeypatch.setattr(bigram, "_BIGRAM_PRIORS", (alpha,))
            monkeypatch.setattr(bigram, "_UNIGRAM_PRIORS", (beta,))
            if [bigram_bits_per_byte(train, text) for text in texts] == free:
                matches.add((alpha, beta))
            monkeypatch.undo()
    assert len(matches) == 1


def test_bytes_not_tokens_are_the_unit() -> None:
    rng = np.random.default_rng(0)
    train, text = rng.integers(1, 4, size=5000), rng.integers(1, 4, size=5000)
    for spelled in (1, 4):
        token_bytes = np.array([0, spelled, spelled, spelled], dtype=np.int64)
        sources = (TextSource([tokens], 0, token_bytes) for tokens in (train, text))
        assert bigram_bits_per_byte(*sources) * spelled == pytest.approx(math.log2(3), rel=0.01)


def test_first_targets_alone_can_be_measured() -> None:
    train, _ = markov_source(3_000, seed=2)
    easy, hard = np.full(200, 97), np.random.default_rng(0).integers(97, 105, size=200)
    both = TextSource([np.concatenate((easy, hard))], 0, BYTES)
    alone = TextSource([easy], 0, BYTES)
    assert bigram_bits_per_byte(train, both, num_targets=199) == pytest.approx(
        bigram_bits_per_byte(train, alone, num_targets=199), rel=1e-12
    )
    assert bigram_bits_per_byte(train, both) != pytest.approx(bigram_bits_per_byte(train, both, num_targets=199), rel=1e-3)


def test_corpus_baseline() -> None:
    data = open_data(DataConfig(), seed=0, seq_len=256)
    assert isinstance(data.train, TextSource)
    assert isinstance(data.validation, TextSource)
    start = time.perf_counter()
    bits = bigram_bits_per_byte(data.train, data.validation)
    assert time.perf_counter() - start < 5
    assert 3.2 < bits < 4.2  # letters of English given the letter before; other plays measure 3.6 to 3.8


def test_other_vocabulary_is_an_error() -> None:
    source = TextSource([np.array([1, 2, 3])], 0, BYTES)
    other = TextSource([np.array([1, 2, 3])], 0, np.ones(300, dtype=np.int64))
    with pytest.raises(ValueError, match="validation must have the training text's vocabulary"):
        bigram_bits_per_byte(source, other)
