"""From windows to the packed batch that the model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.errors import check
from nsa.train.data.source import TokenSource

IGNORED_TARGET = -100  # the value that torch.nn.functional.cross_entropy leaves out by default


@dataclass(frozen=True)
class Batch:
    """Packed sequences with their targets.

    Attributes:
        tokens: int64 ``[T]``.
        targets: int64 ``[T]``: the token after each; -100 where nothing is predicted.
        cu_seqlens: int32 ``[N + 1]``: sequence b is ``tokens[cu_seqlens[b] : cu_seqlens[b + 1]]``.
        max_seqlen: an upper bound of the sequences' lengths, tokens: the window's length, which is the same for every batch.
        num_bytes: bytes of text that the counted targets spell.
        num_targets: targets that count.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_bytes: int
    num_targets: int

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device. Copies to a CUDA device go through pinned memory and do not wait."""
        cuda = torch.device(device).type == "cuda"

        def move(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if cuda and not tensor.is_cuda else tensor).to(device, non_blocking=cuda)

        return replace(self, tokens=move(self.tokens), targets=move(self.targets), cu_seqlens=move(self.cu_seqlens))

    def without_targets(self) -> Batch:
        """The same tokens, of which nothing counts."""
        return replace(self, targets=torch.full_like(self.targets, IGNORED_TARGET), num_bytes=0, num_targets=0)

    def copy_(self, other: Batch) -> None:
        """Take over the tensors of a batch of the same shapes, from any device, without waiting."""
        for mine, theirs in ((self.tokens, other.tokens), (self.targets, other.targets), (self.cu_seqlens, other.cu_seqlens)):
            pin = mine.is_cuda and not theirs.is_cuda
            mine.copy_(theirs.pin_memory() if pin else theirs, non_blocking=True)

    @property
    def num_sequences(self) -> int:
        """Sequences, empty ones included."""
        return self.cu_seqlens.shape[0] - 1

    def padded(self, num_sequences: int) -> Batch:
        """The same batch with empty sequences behind the others: ``num_sequences`` of them in all.

        Raises:
            ValueError: it has more.
        """
        missing = num_sequences - self.num_sequences
        check(missing >= 0, "Batch.padded", "num_sequences", f"be at least {self.num_sequences}", num_sequences)
        empty = self.cu_seqlens.new_full((missing,), self.tokens.shape[0])
        return replace(self, cu_seqlens=torch.cat((self.cu_seqlens, empty)))


def collate(source: TokenSource, indices: Sequence[int], seq_len: int, *, document_mask: bool) -> Batch:
    """Pack windows into a batch.

    Args:
        source: see :class:`nsa.train.data.source.TokenSource`.
        indices: numbers of the windows, in the order in which they are packed.
        seq_len: tokens of a window.
        document_mask: makes each document's stretch of a window a sequence of its own, and takes the first token of a document
            out of the targets, since the document before says nothing about it. Otherwise each window is one sequence and
            every target of the source counts.

    Returns:
        A batch of ``T = len(indices) * seq_len`` tokens.
    """
    check(len(indices) > 0, "collate", "indices", "name at least one window", list(indices))
    windows = np.stack([source.window(seq_len, index) for index in indices])
    tokens, targets = windows[:, :-1], windows[:, 1:].copy()
    for row, index in enumerate(indices):
        counted = source.target_mask(seq_len, index)
        if counted is not None:
            targets[row, ~counted] = IGNORED_TARGET
    starts = np.zeros(tokens.shape, dtype=bool)
    starts[:, 0] = True
    if document_mask and source.separator_id is not None:
        ends = tokens == source.separator_id
        targets[ends] = IGNORED_TARGET
        starts[:, 1:] |= ends[:, :-1]
    cu_seqlens = np.append(np.flatnonzero(starts), tokens.size).astype(np.int32)
    counted_targets = targets[targets != IGNORED_TARGET]
    return Batch(
        tokens=_tensor(tokens.reshape(-1)),
        targets=_tensor(targets.reshape(-1)),
        cu_seqlens=_tensor(cu_seqlens),
        max_seqlen=seq_len,
        num_bytes=int(source.token_bytes[counted_targets].sum()),
        num_targets=counted_targets.size,
    )


def validation_batches(
    source: TokenSource, seq_len: int, micro_batch: int, num_windows: int, *, document_mask: bool
) -> Iterator[Batch]:
    """Windows 0, 1, .. in order, ``micro_batch`` at a time; the last batch may hold fewer.

    Args:
        source: usually the validation source.
        seq_len: tokens of a window.
        micro_batch: windows of a batch.
        num_windows: windows to go through, at most what there is.
        document_mask: see :func:`collate`.
    """
    check(micro_batch > 0, "validation_batches", "micro_batch", "be positive", micro_batch)
    end = min(num_windows, source.num_windows(seq_len))
    check(end > 0, "validation_batches", "num_windows", "be positive, with at least one window in the source", num_windows)
    for start in range(0, end, micro_batch):
        yield collate(source, range(start, min(start + micro_batch, end)), seq_len, document_mask=document_mask)


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
