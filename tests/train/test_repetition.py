"""Passages that a model has to repeat."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.data import TextSource
from nsa.train.data.synthetic import SyntheticSource
from nsa.train.evaluation import Measurement, SplitSequences
from nsa.train.repetition import RepeatedPassages, repeated_passages


def text(*sizes: int) -> TextSource:
    generator = np.random.default_rng(0)
    documents = [np.append(generator.integers(1, 256, size=size - 1), 0) for size in sizes]
    spelled = np.ones(256, dtype=np.int64)
    spelled[0] = 0  # the separator
    return TextSource(documents, 0, spelled)


@given(st.integers(4, 40), st.data())
def test_the_end_of_a_window_repeats_what_stands_before(seq_len: int, data: st.DataObject) -> None:
    """Windows are those of the text that no document ends in, all but for their last tokens."""
    sizes = data.draw(st.lists(st.integers(2, 150), min_size=1, max_size=4))
    length = data.draw(st.integers(2, seq_len // 2))
    distance = data.draw(st.integers(length, seq_len - length))
    source, half = text(*sizes), length // 2
    whole = [source.sequence(seq_len, index) for index in range(source.num_sequences(seq_len))]
    whole = [window for window in whole if 0 not in window]
    found = RepeatedPassages(source, seq_len, length, distance)
    assert found.num_sequences(seq_len) == len(whole)
    for index, before in enumerate(whole):
        window, counted = found.sequence(seq_len, index), found.target_mask(seq_len, index)
        assert window[:-length].tolist() == before[:-length].tolist()
        passage = before[seq_len + 1 - length - distance :][:length]
        assert window[-length:].tolist() == passage.tolist()
        assert counted.sum() == 2 * half
        # The second half of the passage is counted twice: at its end, and at its first place.
        targets = window[1:][counted].tolist()
        assert targets == [*passage[length - half :]] * 2
        assert found.sequence(seq_len, index).tolist() == window.tolist(), "reading changes nothing"


def test_figures_are_those_of_both_places() -> None:
    """Of hand-made sums: each of 2 targets in row p costs p + 1 nats, and one spells nothing."""
    source = repeated_passages(text(100), 32, 8)[1]
    rows = np.array([[2 * (p + 1), 2, 1] for p in range(32)], dtype=np.float64)
    again, first = (29 + 30 + 31 + 32) / 4, (13 + 14 + 15 + 16) / 4
    assert source.figures(Measurement(np.zeros((1, 3)), rows)) == {
        "distance": 16,
        "loss_nats": again,
        "bits_per_byte": pytest.approx(2 * again / math.log(2)),
        "num_targets": 8,
        "num_bytes": 4,
        "first_loss_nats": first,
        "first_bits_per_byte": pytest.approx(2 * first / math.log(2)),
    }


def test_distances_double_up_to_the_whole_window() -> None:
    def distances(seq_len: int, length: int) -> list[int]:
        source = text(1000)
        measured = Measurement(np.zeros((1, 3)), np.ones((seq_len, 3)))
        found = repeated_passages(source, seq_len, length)
        return [int(one.figures(measured)["distance"]) for one in found]

    assert distances(256, 16) == [16, 32, 64, 128, 240]
    assert distances(48, 16) == [16, 32]
    assert distances(32, 16) == [16]
    batch, _ = next(
        SplitSequences(repeated_passages(text(1000), 32, 8)[0], 32, document_mask=False).batches(2, 9)
    )
    assert batch.num_targets == 2 * 2 * 4


@pytest.mark.parametrize(
    ("source", "length", "rule"),
    [
        (text(100), 1, "--repeat must be from 2 to 16, half of a window, got 1"),
        (text(100), 17, "--repeat must be from 2 to 16"),
        (SyntheticSource("copy", "validation", 0), 8, "be left out for a synthetic task"),
        (text(*[20] * 9), 8, "no document of the text has a whole window of 32 tokens"),
    ],
)
def test_what_cannot_be_repeated_is_refused(source: TextSource, length: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        repeated_passages(source, 32, length)
