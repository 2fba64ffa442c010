"""Cache index tensors of one step, computed once for all layers of a cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._backend import reads_contents
from nsa.ops._packed import integers, locate
from nsa.ops._sequences import Sequences

T = TypeVar("T")


class Places:
    """Cache rows of the new tokens of a step, and of the cached tokens that they need.

    Tensors are int64 unless stated, and computed at first use.

    Args:
        config: the sparse pattern; only the block sizes and ``compresses_keys`` are used.
        table: page table, with pages for the new tokens.
        before: tokens of each sequence cached before the step.
        counts: new tokens of each sequence.
        sequences: the sequences of the new tokens, if no sequence has cached tokens.

    Attributes:
        after: length of each sequence after the step.
    """

    def __init__(
        self,
        config: NSAConfig,
        table: Tensor,
        before: Sequence[int],
        counts: Sequence[int],
        sequences: Sequences | None,
    ) -> None:
        self.config, self.table, self.sequences = config, table, sequences
        self.before, self.counts = before, counts
        self.after = self.with_new(before)
        stride = config.compress_stride
        self._overlap = config.compress_block_size // stride - 1
        self._done, self._complete = (
            [max(n // stride - self._overlap, 0) for n in lengths]
            for lengths in (self.before, self.after)
        )
        self._made: dict[Hashable, object] = {}

    def with_new(self, kept: Sequence[int]) -> list[int]:
        """Number of kept and new rows of each sequence."""
        return [n + count for n, count in zip(kept, self.counts, strict=True)]

    def queries(self, lengths: Sequence[int]) -> Sequences:
        """Sequences in which the new queries are the last of ``lengths[b]`` keys."""

        def make() -> Sequences:
            where = self.sequences
            if where is None:
                offsets = (self._offsets(self.counts), self._offsets(lengths))
                most = (max(self.counts), max(lengths))
                where = Sequences(offsets, len(self.counts), *most, self.table.device)
            return where.with_blocks(self.config) if self.config.compresses_keys else where

        return self._once(("queries", *lengths), make)

    @cached_property
    def new(self) -> Tensor:
        """Rows of the new tokens in a pool of selection blocks."""
        sequence, row = self._located(self.counts)
        position = row + self._numbers(self.before)[sequence]
        return self._slots(self.config.block_size, sequence, position)

    @cached_property
    def all_tokens(self) -> Tensor | slice | None:
        """Rows of all tokens in a pool of selection blocks, packed; None if all tokens are new."""
        if not any(self.before):
            return None
        return _rows(self._slots(self.config.block_size, *self._located(self.after)))

    # ----------------------------------------------------------------------------------------------
    # compressed blocks

    @property
    def unfinished(self) -> list[int]:
        """Number of cached tokens of each sequence in incomplete compression blocks."""
        pairs = zip(self.before, self._done, strict=True)
        return [n - done * self.config.compress_stride for n, done in pairs]

    @cached_property
    def unfinished_and_new(self) -> Sequences:
        """Sequences of the tokens of incomplete compression blocks and the new tokens."""
        where = self.sequences
        if where is None:
            lengths = self.with_new(self.unfinished)
            offsets, most = self._offsets(lengths), max(lengths)
            where = Sequences((offsets, offsets), len(lengths), most, most, offsets.device)
        return where.with_blocks(self.config)

    @cached_property
    def starts(self) -> Tensor | None:
        """First position in :attr:`unfinished_and_new`, int32 ``[B]``; None if all are 0."""
        if not any(self._done):
            return None
        return self._numbers(self._done).int() * self.config.compress_stride

    @property
    def num_new_blocks(self) -> int:
        """Number of compression blocks that the new tokens complete."""
        return sum(self._complete) - sum(self._done)

    @cached_property
    def new_blocks(self) -> Tensor:
        """Rows of the newly completed blocks in the pool of compressed blocks."""
        new = [b - a for a, b in zip(self._done, self._complete, strict=True)]
        sequence, row = self._located(new)
        return self._block_slots(sequence, row + self._numbers(self._done)[sequence])

    @cached_property
    def all_blocks(self) -> Tensor | slice | None:
        """Rows of all compressed blocks in their pool, packed; None if all blocks are new."""
        return _rows(self._block_slots(*self._located(self._complete))) if any(self._done) else None

    def _block_slots(self, sequence: Tensor, block: Tensor) -> Tensor:
        per_page = self.config.block_size // self.config.compress_stride
        return self._slots(per_page, sequence, block + self._overlap)

    # ----------------------------------------------------------------------------------------------
    # rings

    def behind(self, rows: int, kept: Sequence[int]) -> Tensor | None:
        """Index of the last ``kept[b]`` ring rows of each sequence and its new tokens, packed.

        The index is into rings of ``rows`` per sequence, followed by all new tokens; None if
        nothing is kept.
        """

        def make() -> Tensor | None:
            if not any(kept):
                return None
            sequence, row = self._located(self.with_new(kept))
            old = self._numbers(kept)[sequence]
            position = row - old + self._numbers(self.before)[sequence]
            first_new = rows * len(kept) + self._offsets(self.counts).long()[sequence]
            return torch.where(row < old, sequence * rows + position % rows, first_new + row - old)

        return self._once(("behind", rows, *kept), make)

    def last(self, rows: int) -> tuple[Tensor, Tensor]:
        """Rows of the last new tokens in rings of ``rows`` per sequence, and their index."""

        def make() -> tuple[Tensor, Tensor]:
            last = [min(count, rows) for count in self.counts]
            sequence, row = self._located(last)
            behind = self._numbers(last)[sequence] - row  # 1 for the last
            position = self._numbers(self.after)[sequence] - behind
            ends = self._offsets(self.counts).long()[sequence + 1]
            return sequence * rows + position % rows, ends - behind

        return self._once(("last", rows), make)

    # ----------------------------------------------------------------------------------------------

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]  # type: ignore[assignment]
        return found

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return self._once(("numbers", *values), lambda: integers(values, self.table.device))

    def _offsets(self, values: Sequence[int]) -> Tensor:
        offsets = accumulate(values, initial=0)
        return self._once(
            ("offsets", *values), lambda: integers(offsets, self.table.device, torch.int32)
        )

    def _located(self, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Sequence of each packed row, ``counts[b]`` per sequence, and its index in it."""
        return locate(sum(counts), self._offsets(counts))[:2]

    def _slots(self, per_page: int, sequence: Tensor, row: Tensor) -> Tensor:
        """Index of rows of sequences in a pool with ``per_page`` rows per page."""
        page = self.table[sequence, row // per_page]
        return page.long() * per_page + row % per_page


def _rows(index: Tensor) -> Tensor | slice:
    """Return consecutive rows as a slice, which copies nothing; on a GPU the values are unknown."""
    if not reads_contents(index):
        return index
    first, number = int(index[0]), index.shape[0]
    is_slice = torch.equal(index, torch.arange(first, first + number))
    return slice(first, first + number) if is_slice else index
