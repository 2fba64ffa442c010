from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nsa.train.data import (
    IGNORED_TARGET,
    Prefetcher,
    Sampler,
    StarvedError,
    TextSource,
    collate,
    spread,
    validation_batches,
)
from nsa.train.data import batch as batch_module
from nsa.train.data.synthetic import SyntheticSource

BYTES = np.ones(256, dtype=np.int64)
BYTES[0] = 0


def source_of(*documents: str) -> TextSource:
    return TextSource([np.frombuffer(f"{d}\0".encode(), np.uint8) for d in documents], 0, BYTES)


LETTERS = source_of("abc", "defg", "hi")  # abc|defg|hi|, whose sequences are [abc|d]e and [efg|h]i


# --- sequences and their order --------------------------------------------------------------------
def test_tokens_are_of_the_smallest_type():
    assert LETTERS.tokens.tobytes() == b"abc\0defg\0hi\0"
    assert TextSource([np.array([50256])], 0, np.ones(50257, dtype=int)).tokens.dtype == np.uint16


@given(st.integers(1, 400), st.integers(1, 450))
def test_sequences_overlap_by_the_one_token_that_is_only_a_target(num_tokens, seq_len):
    source = TextSource([np.arange(num_tokens)], 0, np.ones(512, dtype=int))
    number = source.num_sequences(seq_len)
    assert 0 <= num_tokens - 1 - number * seq_len < seq_len  # less than a sequence is left out
    for i in range(number):
        sequence = source.sequence(seq_len, i)
        assert sequence.dtype == np.int64
        assert sequence.tolist() == list(range(i * seq_len, (i + 1) * seq_len + 1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 5))
def test_most_sequences_is_the_number_in_the_fullest_ones(lengths, seq_len, wanted):
    source = source_of(*("x" * length for length in lengths))
    indices = range(source.num_sequences(seq_len))
    batches = [collate(source, [index], seq_len, document_mask=True) for index in indices]
    fullest = sorted((batch.num_sequences for batch in batches), reverse=True)[:wanted]
    # Sequences that are missing count as one document.
    assert source.most_sequences(seq_len, wanted) == sum(fullest) + wanted - len(fullest)


def sampler_of(num_sequences: int, seed: int) -> Sampler:
    """A sampler of sequences of one token."""
    return source_of("x" * num_sequences).sampler(1, seed)


def test_epochs_are_different_permutations_that_never_change():
    orders = [sampler_of(37, seed).next_indices(3 * 37) for seed in (5, 6)]
    epochs = [tuple(order[start : start + 37]) for order in orders for start in (0, 37, 74)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({*epochs, tuple(range(37))}) == 7
    # A run resumed under another NumPy must see the same sequences.
    order = [0, 8, 3, 1, 2, 5, 9, 7, 6, 4, 8, 4, 2, 9, 7, 6, 5, 0, 1, 3]
    assert sampler_of(10, 1337).next_indices(20) == order


@given(*(st.integers(1, most) for most in (50, 4, 4, 3, 3)))
def test_global_batch_does_not_depend_on_the_number_of_ranks(
    num_sequences, micro_batch, world_size, accumulation, steps
):
    alone, *ranks = (sampler_of(num_sequences, 3) for _ in range(1 + world_size))
    for step in range(1, steps + 1):
        size = micro_batch * world_size * accumulation
        expected, drawn = alone.next_indices(size), []
        for _ in range(accumulation):
            for rank, sampler in enumerate(ranks):
                drawn += sampler.next_indices(micro_batch, rank=rank, world_size=world_size)
        assert drawn == expected  # the same sequences in the same order, across epochs
        assert {sampler.position for sampler in (alone, *ranks)} == {step * size}


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 40))
def test_state_is_four_integers_and_resumes_exactly(num_sequences, before, after):
    sampler, resumed = sampler_of(num_sequences, 11), sampler_of(num_sequences, 11)
    sampler.next_indices(before)
    state = sampler.state_dict()
    counts = {"num_windows": num_sequences, "position": before}
    assert state == {"seed": 11, "seq_len": 1, **counts}
    assert sampler.epoch == before // num_sequences
    resumed.load_state_dict(state)
    assert resumed.next_indices(after) == sampler.next_indices(after)


def test_state_of_other_data_is_an_error():
    state = sampler_of(10, 1).state_dict()
    for other, message in (
        (sampler_of(11, 1), r"num_windows must equal this run's \(11\), got 10"),
        (sampler_of(10, 2), r"seed must equal this run's \(2\), got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)


# --- batches --------------------------------------------------------------------------------------
@given(
    st.lists(st.text("abc", max_size=12), min_size=1, max_size=12),
    st.integers(1, 20),
    st.booleans(),
)
def test_every_target_is_the_next_token_of_the_same_document(texts, seq_len, document_mask):
    source = source_of(*texts)
    number = source.num_sequences(seq_len)
    assume(number > 0)
    batch = collate(source, range(number), seq_len, document_mask=document_mask)
    size = number * seq_len
    tokens = source.tokens[: size + 1].astype(np.int64)
    ends = (tokens[:-1] == 0) & document_mask
    expected = np.where(ends, IGNORED_TARGET, tokens[1:])
    assert batch.tokens.tolist() == tokens[:-1].tolist()
    assert batch.targets.tolist() == expected.tolist()
    assert batch.num_targets == (expected != IGNORED_TARGET).sum()
    borders = [i for i in range(1, size) if i % seq_len == 0 or ends[i - 1]]
    assert batch.cu_seqlens.tolist() == [0, *borders, size]
    assert batch.max_seqlen == seq_len


def test_bytes_are_those_that_the_targets_spell():
    source = TextSource([np.array([1, 2, 3, 3, 0, 2, 1, 0])], 0, np.array([0, 1, 5, 12]))
    for document_mask, size in ((True, 5 + 12 + 12 + 0 + 1), (False, 5 + 12 + 12 + 0 + 5 + 1)):
        assert collate(source, [0], 6, document_mask=document_mask).num_bytes == size


def test_masked_targets_of_a_source_are_left_out():
    batch = collate(SyntheticSource("needle", "train", seed=1), [3, 4], 40, document_mask=False)
    counted = batch.targets.view(2, 40) != IGNORED_TARGET
    assert counted.tolist() == [[False] * 32 + [True] * 8] * 2
    assert (batch.num_targets, batch.num_bytes) == (16, 16)


def test_validation_batches_come_from_all_of_the_text():
    source = source_of("".join(chr(33 + i % 90) for i in range(100)))
    batches = list(validation_batches(source, 10, 3, 7, document_mask=True))
    expected = [10 * index + k for index in (0, 1, 2, 4, 5, 7, 8) for k in range(10)]
    assert [len(batch.tokens) for batch in batches] == [30, 30, 10]
    assert torch.cat([batch.tokens for batch in batches]).tolist() == [*source.tokens[expected]]


@given(st.integers(1, 300), st.integers(1, 300))
def test_sequences_are_spread_evenly(number, available):
    chosen = spread(number, available)
    assert len(chosen) == min(number, available)
    assert chosen[0] == 0 <= chosen[-1] < available
    steps = np.diff([*chosen, available])
    assert {*steps} <= {available // len(chosen), -(-available // len(chosen))}


def test_a_batch_moves_as_a_whole_and_is_padded_with_empty_sequences():
    batch = collate(LETTERS, [1, 0], 5, document_mask=True)
    moved = batch.to("cpu")
    for name in ("tokens", "targets", "cu_seqlens"):
        assert getattr(moved, name).equal(getattr(batch, name))
    assert (moved.max_seqlen, moved.num_bytes, moved.num_targets) == (5, 6, 8)
    assert batch.num_sequences == 4
    assert batch.padded(6).cu_seqlens.tolist() == [0, 4, 5, 9, 10, 10, 10]


# --- batches made ahead ---------------------------------------------------------------------------
def test_items_come_in_order_and_no_more_than_two_ahead():
    before, numbers = threading.enumerate(), itertools.count()
    items = Prefetcher(lambda: next(numbers))
    assert [items.get(1.0) for _ in range(100)] == list(range(100))
    time.sleep(0.05)  # it waits for room by now
    assert next(numbers) <= 104  # two ready, one in the thread's hand
    items.close()
    assert threading.enumerate() == before


def test_an_error_is_raised_in_the_order_of_the_items():
    items = Prefetcher(iter([1, 2]).__next__)
    assert [items.get(1.0), items.get(1.0)] == [1, 2]
    with pytest.raises(StopIteration):
        items.get(1.0)
    items.close()


def test_a_read_that_hangs_starves_and_is_left_running(monkeypatch):
    monkeypatch.setattr(batch_module, "_CLOSING_S", 0.2)
    end = threading.Event()
    items = Prefetcher(end.wait)
    begin = time.monotonic()
    with pytest.raises(StarvedError, match=r"no batch in 0\.1 s"):
        items.get(0.1)
    items.close()
    assert 0.3 < time.monotonic() - begin < 5
    end.set()
