from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from nsa.train.data import TextSource, bigram, bigram_bits_per_byte

BYTES = np.ones(256, dtype=np.int64)
BYTES[0] = 0


def source_of(tokens: np.ndarray, token_bytes: np.ndarray = BYTES) -> TextSource:
    return TextSource([tokens], 0, token_bytes)


def markov_source(length: int, seed: int) -> tuple[TextSource, float]:
    """Text of a known bigram process over 8 letters, and its entropy rate in bits."""
    transitions = np.random.default_rng(1).dirichlet(np.full(8, 0.3), size=8)
    cumulative = transitions.cumsum(axis=1)
    states = [0]
    for value in np.random.default_rng(seed).random(length):
        states.append(min(int(np.searchsorted(cumulative[states[-1]], value)), 7))
    powers = np.linalg.matrix_power(transitions, 200)[0]
    bits = transitions * np.log2(np.maximum(transitions, 1e-300))
    return source_of(np.array(states) + 97), -float((powers[:, None] * bits).sum())


@pytest.mark.parametrize("size", [1, 4])
def test_reaches_the_entropy_of_a_bigram_process(size):
    """In bits per byte, of tokens of any number of bytes; for the sequences that are given."""
    train, entropy = markov_source(60_000, seed=2)
    validation, _ = markov_source(60_000, seed=3)
    validation.token_bytes = size * BYTES
    noise = np.random.default_rng(0).integers(97, 105, size=60_000)
    both = source_of(np.concatenate((validation.tokens, noise)), size * BYTES)
    sequences = np.stack([both.sequence(5000, index) for index in range(12)])
    for found in (
        bigram_bits_per_byte(train, validation),
        bigram_bits_per_byte(train, both, sequences=sequences),
    ):
        assert found * size == pytest.approx(entropy, rel=0.02)


@pytest.mark.parametrize("vocab_size", [5, 5000])  # both ways of counting
@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 1.0), (3.0, 0.01)])
def test_probabilities_are_those_of_the_formula(vocab_size, alpha, beta):
    rng = np.random.default_rng(0)
    train, text = rng.integers(0, 5, size=80), rng.integers(0, 5, size=50)
    text[7] = vocab_size - 1
    pairs = [pair for pair in itertools.pairwise(train.tolist()) if pair[0] != 0]
    expected = 0.0
    for first, second in itertools.pairwise(text.tolist()):
        if first != 0:
            count = sum(pair[1] == second for pair in pairs)
            unigram = (count + beta) / (len(pairs) + beta * vocab_size)
            seen, total = pairs.count((first, second)), sum(pair[0] == first for pair in pairs)
            expected -= math.log2((seen + alpha * unigram) / (total + alpha))
    counts, measured = (bigram._count(tokens, vocab_size, 0) for tokens in (train, text))
    assert bigram._bits(counts, measured, vocab_size, alpha, beta) == pytest.approx(
        expected, rel=1e-12
    )


def test_validation_plays_no_part_in_the_smoothing(monkeypatch):
    """With the priors fixed to the chosen pair, any text gives the same as with the choice."""
    train, _ = markov_source(3_000, seed=2)
    noise = source_of(np.random.default_rng(0).integers(97, 105, size=500))
    texts = [noise, markov_source(500, seed=9)[0]]
    free = [bigram_bits_per_byte(train, text) for text in texts]
    matches = 0
    for alpha, beta in itertools.product(bigram._BIGRAM_PRIORS, bigram._UNIGRAM_PRIORS):
        with monkeypatch.context() as patch:
            patch.setattr(bigram, "_BIGRAM_PRIORS", (alpha,))
            patch.setattr(bigram, "_UNIGRAM_PRIORS", (beta,))
            matches += [bigram_bits_per_byte(train, text) for text in texts] == free
    assert matches == 1
