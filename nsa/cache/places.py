"""Cache index tensors of one step, computed once for all layers of a cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._packed import integers, locate
from nsa.ops._sequences import Sequences

T = TypeVar("T")


class Places:
    """Rows of the new tokens of a step, and of what they need of the past.

    Tensors are int64 unless stated, and made when first asked for: some are needed only when
    attention runs.

    Args:
        config: the sizes of blocks, which all layers share. The pattern of a layer may differ in
            the number of selected blocks, which is not read here.
        table: pages of every sequence, with room for the new tokens.
        before: tokens of each sequence that were cached before.
        counts: new tokens of each sequence.
        sequences: where the new tokens lie, if all sequences are new.

    Attributes:
        after: tokens of each sequence with the new ones.
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
        """Rows of each sequence with the new ones behind ``kept[b]``."""
        return [n + count for n, count in zip(kept, self.counts, strict=True)]

    def queries(self, lengths: Sequence[int]) -> Sequences:
        """The new queries at the end of ``lengths[b]`` keys of each sequence b."""

        def make() -> Sequences:
            where = self.sequences
            if where is None:
                offsets = (self._offsets(self.counts), self._offsets(lengths))
                most = (max(self.counts), max(lengths))
                where = Sequences(offsets, len(self.counts), *most, self.table.device)
            return where.with_blocks(self.config) if self.config.scores_blocks else where

        return self._once(("queries", *lengths), make)

    @property
    def new(self) -> Tensor:
        """Rows of the new tokens in a pool with a page for each selection block."""

        def make() -> Tensor:
            sequence, row = self._located(self.counts)
            position = row + self._numbers(self.before)[sequence]
            return self._slots(self.config.block_size, sequence, position)

        return self._once("new", make)

    @property
    def all_tokens(self) -> Tensor | None:
        """Rows of all tokens of that pool, packed; None: the new ones are all."""

        def make() -> Tensor | None:
            if not any(self.before):
                return None
            return self._slots(self.config.block_size, *self._located(self.after))

        return self._once("all_tokens", make)

    # ----------------------------------------------------------------------------------------------
    # compressed blocks

    @property
    def unfinished(self) -> list[int]:
        """Past tokens of each sequence from the start of the next compression block on."""
        pairs = zip(self.before, self._done, strict=True)
        return [n - done * self.config.compress_stride for n, done in pairs]

    @property
    def unfinished_and_new(self) -> Sequences:
        """Sequences of the tokens that make the next compressed blocks."""

        def make() -> Sequences:
            where = self.sequences
            if where is None:
                lengths = self.with_new(self.unfinished)
                offsets = self._offsets(lengths)
                most = max(lengths)
                where = Sequences((offsets, offsets), len(lengths), most, most, offsets.device)
            return where.with_blocks(self.config)

        return self._once("unfinished_and_new", make)

    @property
    def starts(self) -> Tensor | None:
        """Position of the first of these tokens, int32 ``[B]``; None: all are at 0."""
        if not any(self._done):
            return None
        stride = self.config.compress_stride
        return self._once("starts", lambda: self._numbers(self._done).int() * stride)

    @property
    def num_new_blocks(self) -> int:
        """Compressed blocks that become complete."""
        return sum(self._complete) - sum(self._done)

    @property
    def new_blocks(self) -> Tensor:
        """Their rows in a pool."""

        def make() -> Tensor:
            new = [b - a for a, b in zip(self._done, self._complete, strict=True)]
            sequence, row = self._located(new)
            block = row + self._numbers(self._done)[sequence]
            return self._slots(self._per_page, sequence, block + self._overlap)

        return self._once("new_blocks", make)

    @property
    def all_blocks(self) -> Tensor | None:
        """Rows of all compressed blocks in that pool, packed; None: the new ones are all."""

        def make() -> Tensor | None:
            if not any(self._done):
                return None
            sequence, row = self._located(self._complete)
            return self._slots(self._per_page, sequence, row + self._overlap)

        return self._once("all_blocks", make)

    @property
    def _per_page(self) -> int:
        return self.config.block_size // self.config.compress_stride

    # ----------------------------------------------------------------------------------------------
    # rings

    def behind(self, rows: int, kept: Sequence[int]) -> Tensor | None:
        """The last ``kept[b]`` of each sequence's ring and its new tokens, packed.

        Rows of a ring of ``rows`` a sequence with all new tokens behind it; None: the new ones are
        all.
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
        """Rows for the last new tokens in rings of ``rows`` a sequence, and the tokens' index."""

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
        """Sequence of each of ``counts[b]`` packed rows, and its number there."""
        return locate(sum(counts), self._offsets(counts))[:2]

    def _slots(self, per_page: int, sequence: Tensor, row: Tensor) -> Tensor:
        """Index of rows of sequences in a pool with ``per_page`` rows a page."""
        page = self.table[sequence, row // per_page]
        return page.long() * per_page + row % per_page
