from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.data import Sampler, TextSource, collate

ONES = np.ones(256, dtype=np.int64)


def source_of(text: str) -> TextSource:
    return TextSource([np.frombuffer(text.encode(), np.uint8)], 0, ONES)


def test_tokens_are_of_the_smallest_type():
    assert source_of("abc\0").tokens.tobytes() == b"abc\0"
    assert TextSource([np.array([50256])], 0, np.ones(50257, dtype=int)).tokens.dtype == np.uint16


@given(st.integers(1, 400), st.integers(1, 450))
def test_windows_overlap_by_the_one_token_that_is_only_a_target(num_tokens, seq_len):
    source = TextSource([np.arange(num_tokens)], 0, np.ones(512, dtype=int))
    num_sequences = source.num_sequences(seq_len)
    assert 0 <= num_tokens - 1 - num_sequences * seq_len < seq_len  # less than a window is left out
    for i in range(num_sequences):
        window = source.sequence(seq_len, i)
        assert window.dtype == np.int64
        assert window.tolist() == list(range(i * seq_len, (i + 1) * seq_len + 1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 5))
def test_most_sequences_is_what_the_fullest_windows_hold(lengths, seq_len, num_sequences):
    source = source_of("".join("x" * length + "\0" for length in lengths))
    indices = range(source.num_sequences(seq_len))
    batches = [collate(source, [index], seq_len, document_mask=True) for index in indices]
    fullest = sorted((batch.num_sequences for batch in batches), reverse=True)[:num_sequences]
    missing = num_sequences - len(fullest)  # windows that are not there count as one sequence
    assert source.most_sequences(seq_len, num_sequences) == sum(fullest) + missing


def test_epochs_are_different_permutations_of_all_windows():
    orders = [Sampler(37, seed).next_indices(3 * 37) for seed in (5, 6)]
    epochs = [tuple(order[start : start + 37]) for order in orders for start in (0, 37, 74)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({*epochs, tuple(range(37))}) == 7


def test_order_is_fixed_for_ever():
    """A run resumed under another NumPy must see the same windows."""
    order = [0, 8, 3, 1, 2, 5, 9, 7, 6, 4, 8, 4, 2, 9, 7, 6, 5, 0, 1, 3]
    assert Sampler(10, seed=1337).next_indices(20) == order


@given(*(st.integers(1, most) for most in (50, 4, 4, 3, 3)))
def test_global_batch_does_not_depend_on_the_number_of_ranks(
    num_sequences, micro_batch, world_size, accumulation, steps
):
    alone, *ranks = (Sampler(num_sequences, seed=3) for _ in range(1 + world_size))
    for step in range(1, steps + 1):
        expected = alone.next_indices(micro_batch * world_size * accumulation)
        drawn = []
        for _ in range(accumulation):
            for rank, sampler in enumerate(ranks):
                drawn += sampler.next_indices(micro_batch, rank=rank, world_size=world_size)
        assert drawn == expected  # the same windows in the same order, crossing epochs included
        positions = {sampler.position for sampler in (alone, *ranks)}
        assert positions == {step * micro_batch * world_size * accumulation}


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 40))
def test_state_is_three_integers_and_resumes_exactly(num_sequences, before, after):
    sampler, resumed = Sampler(num_sequences, seed=11), Sampler(num_sequences, seed=11)
    sampler.next_indices(before)
    state = sampler.state_dict()
    assert state == {"seed": 11, "num_sequences": num_sequences, "position": before}
    assert sampler.epoch == before // num_sequences
    resumed.load_state_dict(state)
    assert resumed.next_indices(after) == sampler.next_indices(after)


def test_state_of_other_data_is_an_error():
    state = Sampler(10, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"num_sequences must equal this run's \(11\), got 10"):
        Sampler(11, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"seed must equal this run's \(2\), got 1"):
        Sampler(10, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="num_sequences must be positive, got 0"):
        Sampler(0, seed=1)
