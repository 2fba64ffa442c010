from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nsa.train.data import IGNORED_TARGET, Batch, TextSource, collate, validation_batches
from nsa.train.data.synthetic import SyntheticSource

BYTES = np.ones(256, dtype=np.int64)
BYTES[0] = 0


def source_of(*documents: str) -> TextSource:
    tokens = [np.frombuffer(text.encode(), dtype=np.uint8) for text in documents]
    return TextSource(tokens, 0, BYTES)


LETTERS = source_of(
    "abc",
    "defg",
    "hi",
)  # abc|defg|hi|, of which the windows are [abc|d]e, [efg|h]i


def batch_of(*indices: int, document_mask: bool = True) -> Batch:
    return collate(LETTERS, indices, 5, document_mask=document_mask)


def spelled(tensor: torch.Tensor) -> str:
    names = {IGNORED_TARGET: "_", 0: "|"}
    return "".join(names.get(token) or chr(token) for token in tensor.tolist())


@pytest.mark.parametrize(
    ("document_mask", "targets", "cu_seqlens", "counts"),
    [(True, "fg|_ibc|_e", [0, 4, 5, 9, 10], (8, 6)), (False, "fg|hibc|de", [0, 5, 10], (10, 8))],
)
def test_windows_are_packed(
    document_mask: bool,
    targets: str,
    cu_seqlens: list[int],
    counts: tuple[int, int],
) -> None:
    """With the mask, documents of a window are sequences of their own; without, windows are."""
    batch = batch_of(1, 0, document_mask=document_mask)
    assert spelled(batch.tokens) == "efg|habc|d"
    assert spelled(batch.targets) == targets
    assert batch.cu_seqlens.tolist() == cu_seqlens
    assert (batch.num_targets, batch.num_bytes) == counts
    assert batch.max_seqlen == 5
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32


def test_document_that_ends_with_the_window() -> None:
    batch = collate(source_of("abc", "defg"), [0, 1], 4, document_mask=True)  # [abc|]d [defg]|
    assert spelled(batch.targets) == "bc|_efg|"
    assert batch.cu_seqlens.tolist() == [0, 4, 8]


@given(
    st.lists(st.text("abc", max_size=12), min_size=1, max_size=12),
    st.integers(1, 20),
    st.booleans(),
)
def test_every_target_is_the_next_token_of_the_same_document(
    texts: list[str],
    seq_len: int,
    document_mask: bool,
) -> None:
    source = source_of(*texts)
    num_windows = source.num_windows(seq_len)
    assume(num_windows > 0)
    batch = collate(source, range(num_windows), seq_len, document_mask=document_mask)
    size = num_windows * seq_len
    tokens = source.tokens[: size + 1].astype(np.int64)
    ends = (tokens[:-1] == 0) & document_mask
    expected = np.where(ends, IGNORED_TARGET, tokens[1:])
    assert batch.tokens.tolist() == tokens[:-1].tolist()
    assert batch.targets.tolist() == expected.tolist()
    assert batch.num_targets == (expected != IGNORED_TARGET).sum()
    assert batch.num_bytes == (expected > 0).sum()
    borders = [i for i in range(1, size) if i % seq_len == 0 or ends[i - 1]]
    assert batch.cu_seqlens.tolist() == [0, *borders, size]
    assert max(np.diff(batch.cu_seqlens)) <= batch.max_seqlen


def test_bytes_are_those_that_the_targets_spell() -> None:
    documents = [np.array([1, 2, 3, 3]), np.array([2, 1])]
    source = TextSource(documents, 0, np.array([0, 1, 5, 12]))  # 1 2 3 3 | 2 1 |
    assert collate(source, [0], 6, document_mask=True).num_bytes == 5 + 12 + 12 + 0 + 1
    assert collate(source, [0], 6, document_mask=False).num_bytes == 5 + 12 + 12 + 0 + 5 + 1


def test_masked_targets_of_a_source_are_left_out() -> None:
    batch = collate(SyntheticSource("needle", "train", seed=1), [3, 4], 40, document_mask=False)
    counted = batch.targets.view(2, 40) != IGNORED_TARGET
    assert counted.tolist() == [[False] * 32 + [True] * 8] * 2
    assert (batch.num_targets, batch.num_bytes) == (16, 16)


def test_validation_batches_go_through_the_first_windows_in_order() -> None:
    source = source_of("".join(chr(33 + i % 90) for i in range(100)))
    for micro_batch, sizes in ((1, [10] * 7), (3, [30, 30, 10]), (7, [70]), (100, [70])):
        batches = list(validation_batches(source, 10, micro_batch, 7, document_mask=True))
        assert [len(batch.tokens) for batch in batches] == sizes
        tokens = torch.cat([batch.tokens for batch in batches])
        assert tokens.tolist() == source.tokens[:70].tolist()
        assert sum(batch.num_targets for batch in batches) == 70
    batches = list(validation_batches(source, 10, 4, 10**6, document_mask=True))
    assert sum(len(batch.tokens) for batch in batches) == 100
    message = "num_windows must be positive, with at least one window in the source, got 5"
    with pytest.raises(ValueError, match=message):
        list(validation_batches(source, 1000, 4, 5, document_mask=True))


def test_batch_moves_as_a_whole() -> None:
    batch = batch_of(0)
    moved = batch.to("meta")
    for name in ("tokens", "targets", "cu_seqlens"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(batch.to("cpu"), name).equal(getattr(batch, name))
    for name in ("max_seqlen", "num_bytes", "num_targets"):
        assert getattr(moved, name) == getattr(batch, name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_copy_to_the_gpu_does_not_wait() -> None:
    batch = batch_of(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.tokens.cpu().equal(batch.tokens)
    assert moved.cu_seqlens.cpu().equal(batch.cu_seqlens)


def test_padding_with_empty_sequences() -> None:
    batch = batch_of(1, 0)
    assert batch.num_sequences == 4
    assert batch.padded(6).cu_seqlens.tolist() == [0, 4, 5, 9, 10, 10, 10]
    assert batch.padded(4).cu_seqlens.equal(batch.cu_seqlens)
    with pytest.raises(ValueError, match=r"num_sequences must be at least 4, got 2"):
        batch.padded(2)


def test_a_batch_takes_over_another() -> None:
    mine, theirs = batch_of(0), batch_of(1)
    tokens = mine.tokens
    mine.copy_(theirs)
    assert tokens.equal(theirs.tokens)
    assert mine.targets.equal(theirs.targets)
    assert mine.cu_seqlens.equal(theirs.cu_seqlens)


def test_empty_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="indices must name at least one window"):
        batch_of()
