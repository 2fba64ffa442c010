"""From windows to the packed batch that the model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nsa.errors import check
from nsa.train.data.source import TokenSource

IGNORED_TARGET = -100  # what torch.nn.functional.cross_entropy leaves out by default


@dataclass(frozen=True)
class Batch:
    """Packed sequences with their targets.

    Attributes:
        tokens: int64 ``[T]``.
        targets: int64 ``[T]``: the token after each; -100 where nothing is predicted.
        cu_seqlens: int32 ``[N + 1]``: sequence b is ``tokens[cu_seqlens[b] : cu_seqlens[b + 1]]``.
        max_seqlen: an upper bound of the sequences' lengths, tokens: the window's length, which is
            the same for every batch.
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
        """The batch on a device. Copies to a CUDA device use pinned memory and do not wait."""
        cuda = torch.device(device).type == "cuda"

        def move(tensor: Tensor) -> Tensor:
            pinned = tensor.pin_memory() if cuda and not tensor.is_cuda else tensor
            return pinned.to(device, non_blocking=cuda)

        tokens, targets, cu_seqlens = map(move, self._tensors())
        return replace(self, tokens=tokens, targets=targets, cu_seqlens=cu_seqlens)

    def without_targets(self) -> Batch:
        """The same tokens, of which nothing counts."""
        targets = torch.full_like(self.targets, IGNORED_TARGET)
        return replace(self, targets=targets, num_bytes=0, num_targets=0)

    def copy_(self, other: Batch) -> None:
        """Copy the tensors of a batch of the same shapes, from any device, without waiting."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            pin = mine.is_cuda and not theirs.is_cuda
            mine.copy_(theirs.pin_memory() if pin else theirs, non_blocking=True)

    @property
    def num_sequences(self) -> int:
        """Sequences, empty ones included."""
        return self.cu_seqlens.shape[0] - 1

    def padded(self, num_sequences: int) -> Batch:
        """The same batch with empty sequences at the end: ``num_sequences`` of them in all.

        Raises:
            ValueError: it has more.
        """
        ours = self.num_sequences
        rule = f"be at least {ours}"
        check(num_sequences >= ours, "Batch.padded", "num_sequences", rule, num_sequences)
        empty = self.cu_seqlens.new_full((num_sequences - ours,), self.tokens.shape[0])
        return replace(self, cu_seqlens=torch.cat((self.cu_seqlens, empty)))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens, self.targets, self.cu_seqlens


def collate(
    source: TokenSource,
    indices: Sequence[int],
    seq_len: int,
    *,
    document_mask: bool,
) -> Batch:
    """Pack windows into a batch.

    Args:
        source: see :class:`nsa.train.data.source.TokenSource`.
        indices: numbers of the windows, in the order in which they are packed.
        seq_len: tokens of a window.
        document_mask: makes each document's stretch of a window a sequence of its own, and takes
            the first token of a document out of the targets, since the document before says nothing
            about it. Otherwise each window is one sequence and every target of the source counts.

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
        tokens=torch.from_numpy(tokens.reshape(-1)),
        targets=torch.from_numpy(targets.reshape(-1)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=seq_len,
        num_bytes=int(source.token_bytes[counted_targets].sum()),
        num_targets=counted_targets.size,
    )


def validation_batches(
    source: TokenSource,
    seq_len: int,
    micro_batch: int,
    num_windows: int,
    *,
    document_mask: bool,
) -> Iterator[Batch]:
    """The windows of :func:`spread`, ``micro_batch`` at a time; the last batch may hold fewer.

    Args:
        source: usually the validation source.
        seq_len: tokens of a window.
        micro_batch: windows of a batch.
        num_windows: windows to go through, at most what there is.
        document_mask: see :func:`collate`.
    """
    chosen = spread(num_windows, source.num_windows(seq_len))
    rule = "be positive, with at least one window in the source"
    check(bool(chosen), "validation_batches", "num_windows", rule, num_windows)
    for start in range(0, len(chosen), micro_batch):
        indices = chosen[start : start + micro_batch]
        yield collate(source, indices, seq_len, document_mask=document_mask)


def spread(num_windows: int, available: int) -> list[int]:
    """Numbers of ``num_windows`` windows at equal distances among all; every one if they suffice.

    Window k of n is number ``k * available // n``, so that those of an evaluation come from all of
    the text and depend on nothing else.
    """
    number = min(num_windows, available)
    return [k * available // number for k in range(number)]
