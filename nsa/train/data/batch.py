"""Packed batches of training sequences, and a thread that prefetches them."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from nsa.train.data.source import TokenSource

Item = TypeVar("Item")

IGNORED_TARGET = -100  # ignored by torch.nn.functional.cross_entropy by default
_CLOSING_S = 2.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Batch:
    """Packed sequences with their targets.

    Attributes:
        tokens: int64 ``[T]``.
        targets: int64 ``[T]``: the token after each; -100 where nothing is predicted.
        cu_seqlens: int32 ``[N + 1]``: sequence b is ``tokens[cu_seqlens[b] : cu_seqlens[b + 1]]``.
        max_seqlen: upper bound of the lengths in tokens, ``seq_len`` for every batch.
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
        tokens, targets, cu_seqlens = (
            (tensor.pin_memory() if cuda and not tensor.is_cuda else tensor).to(
                device, non_blocking=cuda
            )
            for tensor in self._tensors()
        )
        return replace(self, tokens=tokens, targets=targets, cu_seqlens=cu_seqlens)

    def without_targets(self) -> Batch:
        """Batch of the same tokens in which no target counts."""
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
        """Pad the batch with empty sequences to ``num_sequences``."""
        more = num_sequences - self.num_sequences
        assert more >= 0, f"{self.num_sequences} sequences, at most {num_sequences} expected"
        empty = self.cu_seqlens.new_full((more,), self.tokens.shape[0])
        return replace(self, cu_seqlens=torch.cat((self.cu_seqlens, empty)))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens, self.targets, self.cu_seqlens


def collate(
    source: TokenSource, indices: Sequence[int], seq_len: int, *, document_mask: bool
) -> Batch:
    """Pack training sequences into a batch.

    Args:
        source: see :class:`nsa.train.data.source.TokenSource`.
        indices: indices of the training sequences, in the order in which they are packed.
        seq_len: tokens of a training sequence.
        document_mask: whether each document's part of a training sequence becomes a sequence of its
            own. The first token of a document is then no target, since the document before says
            nothing about it. Otherwise every target of the source counts.

    Returns:
        A batch of ``T = len(indices) * seq_len`` tokens.
    """
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
    source: TokenSource, seq_len: int, micro_batch: int, num_windows: int, *, document_mask: bool
) -> Iterator[Batch]:
    """Batches of the training sequences of :func:`spread`; the last batch may be smaller.

    Args:
        source: usually the validation source.
        seq_len: tokens of a training sequence.
        micro_batch: training sequences of a batch.
        num_windows: number of training sequences, at most as many as there are.
        document_mask: see :func:`collate`.
    """
    chosen = spread(num_windows, source.num_windows(seq_len))
    for start in range(0, len(chosen), micro_batch):
        indices = chosen[start : start + micro_batch]
        yield collate(source, indices, seq_len, document_mask=document_mask)


def spread(num_windows: int, available: int) -> list[int]:
    """Indices of ``num_windows`` sequences at equal distances; all if there are no more.

    Sequence k of n is number ``k * available // n``, so that an evaluation covers all of the text
    and depends on nothing else.
    """
    number = min(num_windows, available)
    return [k * available // number for k in range(number)]


class StarvedError(Exception):
    """No batch came within the time limit."""


class Prefetcher(Generic[Item]):
    """A thread that calls a function over and over, and its results in order.

    Args:
        make: function that makes the next item; :meth:`get` raises its error.
        ahead: items made before they are asked for.
    """

    def __init__(self, make: Callable[[], Item], ahead: int = 2) -> None:
        self._make = make
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
        self._closed = threading.Event()
        # A daemon: a read that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> Item | None:
        """The next item.

        Args:
            timeout_s: longest wait in seconds; 0 waits for ever.
            give_up: asked twice a second while nothing is ready; True ends the wait.

        Returns:
            The item; None if the wait was given up.

        Raises:
            StarvedError: the time is over.
        """
        deadline = time.monotonic() + (timeout_s or math.inf)
        while True:
            left_s = max(deadline - time.monotonic(), 0)
            try:
                item, error = self._ready.get(timeout=min(_POLL_S, left_s))
            except queue.Empty:
                if give_up():
                    return None
                if left_s <= _POLL_S:
                    raise StarvedError(f"no batch in {timeout_s:g} s") from None
                continue
            if error is not None:
                raise error
            return item

    def close(self) -> None:
        """End the thread, unless it is stuck; what is ready is dropped.

        A thread that still runs PyTorch's code when the interpreter ends would abort the process.
        """
        self._closed.set()
        deadline = time.monotonic() + _CLOSING_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            while not self._ready.empty():  # it may wait for room
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _work(self) -> None:
        with ExitStack() as stack:
            stack.push(self._ended)
            while not self._closed.is_set():
                self._ready.put((self._make(), None))

    def _ended(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Hand whatever ended the thread over to the one that waits, where it is raised."""
        if error is not None:
            self._ready.put((None, error))
        return True
