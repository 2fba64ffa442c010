from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.data import IGNORED_TARGET, Batch, TextSource, collate, validation_batches
from nsa.train.data.synthetic import SyntheticSource

BYTES = np.ones(256, dtype=np.int64)
BYTES[0] = 0


def source_of(*documents: str) -> TextSource:
    return TextSource([np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in documents], 0, BYTES)


def spelled(tensor: torch.Tensor) -> str:
    return "".join("_" if token == IGNORED_TARGET else "|" if token == 0 else chr(token) for token in tensor.tolist())


def test_documents_of_a_window_are_sequences_of_their_own() -> None:
    batch = collate(source_of("abc", "defg", "hi"), [1, 0], 5, document_mask=True)
    # The text is abc|defg|hi|, its windows [abc|d]e and [efg|h]i.
    assert spelled(batch.tokens) == "efg|habc|d"
    assert spelled(batch.targets) == "fg|_ibc|_e"
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 9, 10]
    assert (batch.max_seqlen, batch.num_targets, batch.num_bytes) == (5, 8, 6)
    assert [batch.tokens.dtype, batch.targets.dtype, batch.cu_seqlens.dtype] == [torch.int64, torch.int64, torch.int32]


def test_without_the_mask_a_window_is_one_sequence_and_every_target_counts() -> None:
    batch = collate(source_of("abc", "defg", "hi"), [1, 0], 5, document_mask=False)
    assert spelled(batch.tokens) == "efg|habc|d"
    assert spelled(batch.targets) == "fg|hibc|de"
    assert batch.cu_seqlens.tolist() == [0, 5, 10]
    assert (batch.max_seqlen, batch.num_targets, batch.num_bytes) == (5, 10, 8)


def test_document_that_ends_with_the_window() -> None:
    batch = collate(source_of("abc", "defg"), [0, 1], 4, document_mask=True)  # [abc|]d [defg]|
    assert spelled(batch.targets) == "bc|_efg|"
    assert batch.cu_seqlens.tolist() == [0, 4, 8]


@given(st.lists(st.text("abc", max_size=12), min_size=1, max_size=12), st.integers(1, 20), st.booleans())
def test_every_target_is_the_next_token_of_the_same_document(texts: list[str], seq_len: int, document_mask: bool) -> None:
    source = source_of(*texts)
    num_windows = source.num_windows(seq_len)
    if num_windows == 0:
        return
    batch = collate(source, list(range(num_windows)), seq_len, document_mask=document_mask)
    document = np.cumsum(source.tokens == 0) - (source.tokens == 0)  # which document each token belongs to
    cu_seqlens = batch.cu_seqlens.tolist()
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == len(batch.tokens) == num_windows * seq_len
    lengths = np.diff(cu_seqlens)
    assert lengths.min() >= 1
    assert lengths.max() <= batch.max_seqlen
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    num_bytes = 0
    for i, (token, target) in enumerate(zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)):
        assert token == source.tokens[i]
        crosses = document[i] != document[i + 1]
        assert target == (IGNORED_TARGET if document_mask and crosses else source.tokens[i + 1])
        num_bytes += target not in (IGNORED_TARGET, 0)
        if i + 1 < len(batch.tokens):
            apart = (i + 1) % seq_len == 0 or (document_mask and crosses)
            assert (sequence[i] != sequence[i + 1]) == apart
    assert batch.num_bytes == num_bytes
    assert batch.num_targets == int((batch.targets != IGNORED_TARGET).sum())


def test_bytes_are_those_that_the_targets_spell() -> None:
    token_bytes = np.array([0, 1, 5, 12], dtype=np.int64)
    source = TextSource([np.array([1, 2, 3, 3]), np.array([2, 1])], 0, token_bytes)  # 1 2 3 3 | 2 1 |
    assert collate(source, [0], 6, document_mask=True).num_bytes == 5 + 12 + 12 + 0 + 1
    assert collate(source, [0], 6, document_mask=False).num_bytes == 5 + 12 + 12 + 0 + 5 + 1


def test_masked_targets_of_a_source_are_left_out() -> None:
    source = SyntheticSource("needle", "train", seed=1)
    batch = collate(source, [3, 4], 40, document_mask=False)
    targets = batch.targets.view(2, 40)
    assert (targets[:, :32] == IGNORED_TARGET).all()
    assert (targets[:, 32:] != IGNORED_TARGET).all()
    assert (batch.num_targets, batch.num_bytes) == (16, 16)


def test_validation_batches_go_through_the_first_windows_in_order() -> None:
    source = source_of("".join(chr(33 + i % 90) for i in range(100)))
    for micro_batch in (1, 3, 7, 100):
        batches = list(validation_batches(source, 10, micro_batch, 7, document_mask=True))
        assert [len(batch.tokens) // 10 for batch in batches] == [
            min(micro_batch, 7 - start) for start in range(0, 7, micro_batch)
        ]
        assert torch.cat([batch.tokens for batch in batches]).tolist() == source.tokens[:70].tolist()
        assert sum(batch.num_targets for batch in batches) == 70
    assert sum(len(batch.tokens) for batch in validation_batches(source, 10, 4, 10**6, document_mask=True)) == 100
    with pytest.raises(ValueError, match="num_windows must be positive, with at least one window in the source, got 5"):
        list(validation_batches(source, 1000, 4, 5, document_mask=True))


def test_batch_moves_as_a_whole() -> None:
    batch = collate(source_of("abc", "defg", "hi"), [0], 5, document_mask=True)
    moved = batch.to("meta")
    assert {moved.tokens.device.type, moved.targets.device.type, moved.cu_seqlens.device.type} == {"meta"}
    assert isinstance(moved, Batch)
    assert (moved.max_seqlen, moved.num_bytes, moved.num_targets) == (batch.max_seqlen, batch.num_bytes, batch.num_targets)
    assert batch.to("cpu").tokens.equal(batch.tokens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_copy_to_the_gpu_does_not_wait() -> None:
    batch = collate(source_of("abc", "defg", "hi"), [0], 5, document_mask=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.tokens.cpu().equal(batch.tokens)
    assert moved.cu_seqlens.cpu().equal(batch.cu_seqlens)


def test_padding_with_empty_sequences() -> None:
    batch = collate(source_of("abc", "defgh", "hi"), [1, 0], 5, document_mask=True)
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 10]
    assert batch.num_sequences == 3
    assert batch.padded(5).cu_seqlens.tolist() == [0, 5, 9, 10, 10, 10]
    assert batch.padded(3).cu_seqlens.equal(batch.cu_seqlens)
    with pytest.raises(ValueError, match=r"num_sequences must be at least 3, got 2"):
        batch.padded(2)


def test_a_batch_takes_over_another() -> None:
    mine, theirs = (collate(source_of("abc", "defg", "hi"), [index], 5, document_mask=True) for index in (0, 1))
    tokens = mine.tokens
    mine.copy_(theirs)
    assert tokens.equal(theirs.tokens)
    assert mine.targets.equal(theirs.targets)
    assert mine.cu_seqlens.equal(theirs.cu_seqlens)


def test_empty_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="indices must name at least one window"):
        collate(source_of("abc"), [], 2, document_mask=True)
