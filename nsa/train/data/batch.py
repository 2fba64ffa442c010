"""Training sequences, their order, and packed batches that a thread makes ahead."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.errors import UserError, check
from nsa.train.data.tokenizer import Ids, Tokens, token_dtype

Item = TypeVar("Item")
Mask = NDArray[np.bool_]

IGNORED_TARGET = -100  # ignored by torch.nn.functional.cross_entropy by default
_AHEAD = 2  # items made before they are asked for
_CLOSING_S = 2.0
_POLL_S = 0.5


class DataUnavailableError(UserError):
    """The data do not exist, cannot be reached, or have stopped coming."""


class TokenSource:
    """Training sequences of ``seq_len + 1`` tokens: inputs, and the targets one token later.

    Attributes:
        separator_id: id that ends a document; None if there are no documents.
        token_bytes: int64 ``[vocab_size]``, bytes of text that each id spells.
    """

    separator_id: int | None
    token_bytes: Ids

    @property
    def text(self) -> TextSource | None:
        """The text that sequences are made of, or None if it is not stored."""
        return None

    def sampler(self, seq_len: int, seed: int) -> Sampler:
        """The order in which training takes the sequences."""
        return Sampler(self, seq_len, seed)

    def num_sequences(self, seq_len: int) -> int:
        """Number of sequences of this length."""
        raise NotImplementedError

    def sequence(self, seq_len: int, index: int) -> Ids:
        """Sequence ``index``: int64 ``[seq_len + 1]``; the same arguments give the same tokens."""
        raise NotImplementedError

    def target_mask(self, seq_len: int, index: int) -> Mask | None:
        """Mask of the targets that count: bool ``[seq_len]``, or None if all targets count."""
        return None

    def most_sequences(self, seq_len: int, num_sequences: int) -> int | None:
        """Upper bound of the documents, whole or cut, in ``num_sequences`` different sequences.

        None if that is not known before the text is read.
        """
        return None


class TextSource(TokenSource):
    """Documents one after another, cut into sequences.

    Sequence i begins at token ``i * seq_len`` and overlaps the next by the one token that is only a
    target, so each token but the first is a target of exactly one sequence. Tokens at the end that
    do not fill a sequence are left out.

    Attributes:
        tokens: ``[num_tokens]``, in the smallest unsigned type for the vocabulary.

    Args:
        documents: tokens of each document, ended by the separator.
        separator_id: see :class:`TokenSource`.
        token_bytes: int64 ``[vocab_size]``.
    """

    def __init__(
        self, documents: Iterable[Tokens], separator_id: int | None, token_bytes: Ids
    ) -> None:
        empty = np.empty(0, token_dtype(len(token_bytes)))
        self.tokens = np.concatenate([empty, *documents], dtype=empty.dtype, casting="unsafe")
        self.separator_id = separator_id
        self.token_bytes = token_bytes

    @property
    def text(self) -> TextSource:
        """See :class:`TokenSource`."""
        return self

    @property
    def num_tokens(self) -> int:
        """Number of tokens, separators included."""
        return len(self.tokens)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens ``start`` to ``stop - 1``, or to the last one."""
        return self.tokens[start:stop]

    def num_sequences(self, seq_len: int) -> int:
        """See :class:`TokenSource`; 0 if there are fewer than ``seq_len + 1`` tokens."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def sequence(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`."""
        assert 0 <= index < self.num_sequences(seq_len), index
        return self.read(index * seq_len, (index + 1) * seq_len + 1).astype(np.int64)

    def most_sequences(self, seq_len: int, num_sequences: int) -> int | None:
        """See :class:`TokenSource`."""
        starts = self.document_starts()
        end = self.num_sequences(seq_len) * seq_len
        counts = np.bincount(starts[(starts % seq_len != 0) & (starts < end)] // seq_len)
        return num_sequences + int(np.sort(counts)[::-1][:num_sequences].sum())

    def document_starts(self) -> Ids:
        """Position of the first token of each document: int64 ``[num_documents]``, ascending."""
        return np.append(0, np.flatnonzero(self.tokens == self.separator_id) + 1)[:-1]


class Sampler:
    """All sequences in another random order each epoch.

    The order is a function of (seed, epoch). ``position`` is the number of sequences drawn since
    training began, by all processes together: epoch e covers the positions
    ``e * num_sequences`` to ``(e + 1) * num_sequences - 1``.

    With ``world_size`` processes, rank r takes the ``micro_batch`` positions from
    ``position + r * micro_batch`` on, and every rank then advances ``position`` by
    ``micro_batch * world_size``. So a run that continues on another number of GPUs with the same
    global batch sees the same batches.

    Args:
        source: the sequences.
        seq_len: tokens of a sequence.
        seed: seed of the order.

    Attributes:
        num_sequences: sequences of the source at this length.
    """

    def __init__(self, source: TokenSource, seq_len: int, seed: int) -> None:
        self.source, self.seq_len, self.seed, self.position = source, seq_len, seed, 0
        self.num_sequences = source.num_sequences(seq_len)
        self._order = lru_cache(maxsize=1)(_order)  # one for each part of a mixture

    def resize(self, seq_len: int) -> None:
        """Go on with sequences of another length; the tokens drawn before count.

        Args:
            seq_len: tokens of a sequence.
        """
        if seq_len != self.seq_len:
            self.position = -(-self.position * self.seq_len // seq_len)
            self.seq_len, self.num_sequences = seq_len, self.source.num_sequences(seq_len)

    @property
    def epoch(self) -> int:
        """Epoch of the next sequence."""
        return self.position // self.num_sequences

    def sequence_at(self, position: int) -> int:
        """Sequence drawn at a position; any position, in any order of calls."""
        epoch, rank = divmod(position, self.num_sequences)
        return int(self._order(self.num_sequences, self.seed, epoch)[rank])

    def next_indices(self, micro_batch: int, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """Draw this rank's next micro-batch; advances ``position`` for all ranks.

        Args:
            micro_batch: sequences for each rank.
            rank: rank of this process.
            world_size: number of processes.

        Returns:
            ``micro_batch`` indices of sequences.
        """
        start = self.position + rank * micro_batch
        self.position += micro_batch * world_size
        return [self.sequence_at(position) for position in range(start, start + micro_batch)]

    def state_dict(self) -> dict[str, Any]:
        """``seed``, ``seq_len``, ``num_windows`` (the sequences of an epoch) and ``position``."""
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "num_windows": self.num_sequences,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a :meth:`state_dict`.

        Raises:
            ValueError: the state belongs to another seed or another number of sequences, so that
                the order would not continue.
        """
        self.resize(state.get("seq_len", self.seq_len))  # not in older checkpoints
        hint = "The data, seq_len or seed changed since the checkpoint."
        for name, ours in (("seed", self.seed), ("num_windows", self.num_sequences)):
            check(state[name] == ours, name, f"equal this run's ({ours})", state[name], hint)
        self.position = state["position"]


def _order(num_sequences: int, seed: int, epoch: int) -> Ids:
    # NumPy guarantees raw Philox output not to change between versions, unlike its permutation.
    philox = np.random.Philox(np.random.SeedSequence((seed, epoch)))
    return np.argsort(philox.random_raw(num_sequences), kind="stable")


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
        tokens, targets, cu_seqlens = (
            torch.empty_like(tensor, device=device) for tensor in self._tensors()
        )
        moved = replace(self, tokens=tokens, targets=targets, cu_seqlens=cu_seqlens)
        moved.copy_(self)
        return moved

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
        source: see :class:`nsa.train.data.batch.TokenSource`.
        indices: indices of the training sequences, in the order in which they are packed.
        seq_len: tokens of a training sequence.
        document_mask: whether each document's part of a training sequence becomes a sequence of its
            own. The first token of a document is then no target, since the document before says
            nothing about it. Otherwise every target of the source counts.

    Returns:
        A batch of ``T = len(indices) * seq_len`` tokens.
    """
    # A source may keep its latest sequence alone, so tokens and mask are taken together.
    found = [(source.sequence(seq_len, i), source.target_mask(seq_len, i)) for i in indices]
    rows = np.stack([row for row, _ in found])
    tokens, targets = rows[:, :-1], rows[:, 1:].copy()
    for row, (_, counted) in enumerate(found):
        if counted is not None:
            targets[row, ~counted] = IGNORED_TARGET
    starts = np.zeros(tokens.shape, dtype=bool)
    starts[:, 0] = True
    if document_mask and source.separator_id is not None:
        ends = tokens == source.separator_id
        targets[ends] = IGNORED_TARGET
        starts[:, 1:] |= ends[:, :-1]
    cu_seqlens = np.append(np.flatnonzero(starts), tokens.size)
    return pack(tokens.reshape(-1), targets.reshape(-1), cu_seqlens, seq_len, source.token_bytes)


def pack(tokens: Ids, targets: Ids, cu_seqlens: Ids, max_seqlen: int, token_bytes: Ids) -> Batch:
    """Batch of arrays; see :class:`Batch` and :class:`TokenSource`."""
    counted = targets[targets != IGNORED_TARGET]
    return Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=max_seqlen,
        num_bytes=int(token_bytes[counted].sum()),
        num_targets=counted.size,
    )


def validation_batches(
    source: TokenSource, seq_len: int, micro_batch: int, num_sequences: int, *, document_mask: bool
) -> Iterator[Batch]:
    """Batches of the training sequences of :func:`spread`; the last batch may be smaller.

    Args:
        source: usually the validation source.
        seq_len: tokens of a training sequence.
        micro_batch: training sequences of a batch.
        num_sequences: number of training sequences, at most as many as there are.
        document_mask: see :func:`collate`.
    """
    chosen = spread(num_sequences, source.num_sequences(seq_len))
    for start in range(0, len(chosen), micro_batch):
        indices = chosen[start : start + micro_batch]
        yield collate(source, indices, seq_len, document_mask=document_mask)


def spread(num_sequences: int, available: int) -> list[int]:
    """Indices of ``num_sequences`` sequences at equal distances; all if there are no more.

    Sequence k of n is number ``k * available // n``, so that an evaluation covers all of the text
    and depends on nothing else.
    """
    number = min(num_sequences, available)
    return [k * available // number for k in range(number)]


class StarvedError(Exception):
    """No batch came within the time limit."""


class Prefetcher(Generic[Item]):
    """A thread that calls a function repeatedly, and the results in order.

    Args:
        make: function that makes the next item; :meth:`get` raises its error.
    """

    def __init__(self, make: Callable[[], Item]) -> None:
        self._make = make
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        # A daemon: a read that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float, give_up: Callable[[], int] = lambda: 0) -> Item | None:
        """The next item.

        Args:
            timeout_s: longest wait in seconds; 0 waits for ever.
            give_up: asked twice a second while nothing is ready; another result than 0 ends the
                wait.

        Returns:
            The item; None if the wait was given up.

        Raises:
            StarvedError: no item came within the time limit.
        """
        deadline = time.monotonic() + (timeout_s or math.inf)
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                item, error = self._ready.get(timeout=min(_POLL_S, left_s))
            except queue.Empty:
                if give_up():
                    return None
                continue
            if error is not None:
                raise error
            return item
        raise StarvedError(f"no batch in {timeout_s:g} s")

    def close(self) -> None:
        """End the thread, unless it is stuck; items that are ready are dropped.

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
        """Pass the error that ended the thread to :meth:`get`."""
        if error is not None:
            self._ready.put((None, error))
        return True
