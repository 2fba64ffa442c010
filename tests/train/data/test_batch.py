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
    Batch,
    Prefetcher,
    StarvedError,
    TextSource,
    collate,
    spread,
    validation_batches,
)
from nsa.train.data import (
    batch as batch_module,
)
from nsa.train.data.synthetic import SyntheticSource

BYTES = np.ones(256, dtype=np.int64)
BYTES[0] = 0


def source_of(*documents: str) -> TextSource:
    return TextSource([np.frombuffer(f"{d}\0".encode(), np.uint8) for d in documents], 0, BYTES)


LETTERS = source_of("abc", "defg", "hi")  # abc|defg|hi|, whose windows are [abc|d]e and [efg|h]i


def batch_of(*indices: int, document_mask: bool = True) -> Batch:
    return collate(LETTERS, indices, 5, document_mask=document_mask)


@given(
    st.lists(st.text("abc", max_size=12), min_size=1, max_size=12),
    st.integers(1, 20),
    st.booleans(),
)
def test_every_target_is_the_next_token_of_the_same_document(texts, seq_len, document_mask):
    source = source_of(*texts)
    num_sequences = source.num_sequences(seq_len)
    assume(num_sequences > 0)
    batch = collate(source, range(num_sequences), seq_len, document_mask=document_mask)
    size = num_sequences * seq_len
    tokens = source.tokens[: size + 1].astype(np.int64)
    ends = (tokens[:-1] == 0) & document_mask
    expected = np.where(ends, IGNORED_TARGET, tokens[1:])
    assert batch.tokens.tolist() == tokens[:-1].tolist()
    assert batch.targets.tolist() == expected.tolist()
    assert batch.num_targets == (expected != IGNORED_TARGET).sum()
    assert batch.num_bytes == (expected > 0).sum()
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


@pytest.mark.parametrize(
    ("micro_batch", "num_sequences", "sizes"),
    [(1, 7, [10] * 7), (3, 7, [30, 30, 10]), (100, 7, [70]), (4, 10**6, [40, 40, 20])],
)
def test_validation_batches_hold_windows_from_all_of_the_text(micro_batch, num_sequences, sizes):
    source = source_of("".join(chr(33 + i % 90) for i in range(100)))
    batches = list(validation_batches(source, 10, micro_batch, num_sequences, document_mask=True))
    assert [len(batch.tokens) for batch in batches] == sizes
    tokens = torch.cat([batch.tokens for batch in batches])
    first = {7: [0, 1, 2, 4, 5, 7, 8], 10**6: range(10)}  # numbers of 10 windows
    places = [10 * index + k for index in first[num_sequences] for k in range(10)]
    assert tokens.tolist() == source.tokens[places].tolist()


@given(st.integers(1, 300), st.integers(1, 300))
def test_windows_are_spread_evenly(number, available):
    chosen = spread(number, available)
    assert len(chosen) == min(number, available)
    assert chosen[0] == 0 <= chosen[-1] < available
    steps = np.diff([*chosen, available])
    assert {*steps} <= {available // len(chosen), -(-available // len(chosen))}


def test_batch_moves_and_is_copied_as_a_whole():
    batch, other = batch_of(0), batch_of(1)
    tensors = [(batch.tokens, other.tokens), (batch.targets, other.targets)]
    moved = batch.to("meta")
    assert {moved.tokens.device.type, moved.targets.device.type} == {"meta"}
    assert moved.num_bytes == batch.num_bytes
    batch.copy_(other)
    assert all(copied.equal(original) for copied, original in tensors)
    assert batch.cu_seqlens.equal(other.cu_seqlens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_copy_to_the_gpu_does_not_wait():
    batch = batch_of(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.tokens.cpu().equal(batch.tokens)
    assert moved.cu_seqlens.cpu().equal(batch.cu_seqlens)


def test_padding_with_empty_sequences():
    batch = batch_of(1, 0)
    assert batch.tokens.tolist() == [*batch_of(1).tokens, *batch_of(0).tokens]
    assert batch.num_sequences == 4
    assert batch.padded(6).cu_seqlens.tolist() == [0, 4, 5, 9, 10, 10, 10]


# --- batches made ahead ---------------------------------------------------------------------------
def test_items_come_in_order_and_no_more_than_two_ahead():
    numbers = itertools.count()
    items = Prefetcher(lambda: next(numbers))
    assert [items.get(1.0) for _ in range(100)] == list(range(100))
    time.sleep(0.05)
    assert next(numbers) <= 104  # two ready, one in the thread's hand
    items.close()


def test_an_error_comes_out_where_its_item_would():
    items = Prefetcher(iter([1, 2]).__next__)
    assert [items.get(1.0), items.get(1.0)] == [1, 2]
    with pytest.raises(StopIteration):
        items.get(1.0)
    items.close()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_ends_the_thread(taken):
    before = threading.enumerate()
    items = Prefetcher(lambda: time.sleep(0.01))
    for _ in range(taken):
        items.get(1.0)
    time.sleep(0.1)  # it waits for room by now
    items.close()
    assert threading.enumerate() == before


def test_a_read_that_hangs_starves_and_is_left_behind(monkeypatch):
    monkeypatch.setattr(batch_module, "_CLOSING_S", 0.2)
    end = threading.Event()
    items = Prefetcher(end.wait)
    begin = time.monotonic()
    with pytest.raises(StarvedError, match=r"no batch in 0\.1 s"):
        items.get(0.1)
    items.close()
    assert 0.3 < time.monotonic() - begin < 5
    end.set()
