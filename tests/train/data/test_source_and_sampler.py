from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.data import Sampler, TextSource, collate

ONES = np.ones(256, dtype=np.int64)


def source_of(*documents: str) -> TextSource:
    return TextSource([np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in documents], 0, ONES)


def test_documents_end_with_the_separator() -> None:
    source = source_of("abc", "", "de")
    assert source.tokens.astype(np.uint8).tobytes() == b"abc\0\0de\0"
    assert source.tokens.dtype == np.uint8
    assert TextSource([np.array([50256])], 0, np.ones(50257, dtype=np.int64)).tokens.dtype == np.uint16


@given(st.integers(2, 400), st.integers(1, 450))
def test_windows_overlap_by_the_one_token_that_is_only_a_target(num_tokens: int, seq_len: int) -> None:
    source = TextSource([np.arange(1, num_tokens)], 0, np.ones(512, dtype=np.int64))
    num_windows = source.num_windows(seq_len)
    windows = [source.window(seq_len, i) for i in range(num_windows)]
    assert all(window.dtype == np.int64 and window.shape == (seq_len + 1,) for window in windows)
    targets = np.concatenate([window[1:] for window in windows]) if windows else np.empty(0)
    assert np.array_equal(targets, source.tokens[1 : 1 + num_windows * seq_len])
    assert len(source.tokens) - 1 - len(targets) < seq_len  # only a stretch shorter than a window is left out


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 5))
def test_most_sequences_is_what_the_fullest_windows_hold(lengths: list[int], seq_len: int, num_windows: int) -> None:
    source = source_of(*("x" * length for length in lengths))
    total = source.num_windows(seq_len)
    held = [collate(source, [index], seq_len, document_mask=True).num_sequences for index in range(total)]
    fullest = sorted(held, reverse=True)[:num_windows]
    missing = num_windows - len(fullest)  # windows that are not there count as one sequence
    assert source.most_sequences(seq_len, num_windows) == sum(fullest) + missing


@pytest.mark.parametrize("index", [-1, 2])
def test_window_out_of_range_is_an_error(index: int) -> None:
    with pytest.raises(ValueError, match=f"index must lie between 0 and 1 at seq_len 3, got {index}"):
        source_of("abcdefg").window(3, index)


def test_epochs_are_different_permutations_of_all_windows() -> None:
    sampler = Sampler(37, seed=5)
    epochs = [[sampler.window_at(epoch * 37 + i) for i in range(37)] for epoch in range(3)]
    assert all(sorted(order) == list(range(37)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(37))
    assert [Sampler(37, seed=6).window_at(i) for i in range(37)] != epochs[0]


def test_order_is_fixed_for_ever() -> None:
    """A run resumed under another NumPy must see the same windows."""
    sampler = Sampler(10, seed=1337)
    assert sampler.next_windows(20) == FIRST_TWO_EPOCHS


FIRST_TWO_EPOCHS = [0, 8, 3, 1, 2, 5, 9, 7, 6, 4, 8, 4, 2, 9, 7, 6, 5, 0, 1, 3]


@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_global_batch_does_not_depend_on_the_number_of_ranks(
    num_windows: int, micro_batch: int, world_size: int, accumulation: int, steps: int
) -> None:
    global_batch = micro_batch * world_size * accumulation
    alone = Sampler(num_windows, seed=3)
    ranks = [Sampler(num_windows, seed=3) for _ in range(world_size)]
    for _ in range(steps):
        expected = alone.next_windows(global_batch)
        drawn = []
        for _ in range(accumulation):
            for rank, sampler in enumerate(ranks):
                drawn += sampler.next_windows(micro_batch, rank=rank, world_size=world_size)
        assert drawn == expected  # the same windows in the same order, crossing epochs included
        assert {sampler.position for sampler in ranks} == {alone.position}
    assert alone.position == steps * global_batch


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 40))
def test_state_is_three_integers_and_resumes_exactly(num_windows: int, before: int, after: int) -> None:
    sampler, resumed = Sampler(num_windows, seed=11), Sampler(num_windows, seed=11)
    for _ in range(before):
        sampler.next_windows(1)
    state = sampler.state_dict()
    assert state == {"seed": 11, "num_windows": num_windows, "position": before}
    assert sampler.epoch == before // num_windows
    resumed.load_state_dict(state)
    assert resumed.next_windows(after) == sampler.next_windows(after)


def test_state_of_other_data_is_an_error() -> None:
    state = Sampler(10, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"num_windows must equal this run's \(11\), got 10"):
        Sampler(11, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"seed must equal this run's \(2\), got 1"):
        Sampler(10, seed=2).load_state_dict(state)


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="num_windows must be positive, got 0"):
        Sampler(0, seed=1)
    with pytest.raises(ValueError, match=r"rank must lie between 0 and world_size - 1 \(1\), got 2"):
        Sampler(4, seed=1).next_windows(1, rank=2, world_size=2)
