"""Index structures over selected blocks for the kernels; nothing here synchronizes.

- **Lists by tile.** A tile is a few consecutive queries of one group. Its list contains every block
  selected by any of them, in ascending order, with a query mask per block: bit i is set if query i
  of the tile selected the block.
- **Inverse index.** A *key block* is a block of one KV head, ``head * num_blocks + block``. A
  *selection* is a (query, KV head, slot), numbered as in ``block_indices [T, Hkv, n]``. Sorted by
  key block, the selections of a key block are the queries that attend to it, in order. Kernels that
  need memory for every selection split the queries into consecutive segments. The selections of a
  key block in a segment are split into *chunks*, one per program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops import _checks
from nsa.ops._checks import check_numbers
from nsa.ops._layout import always_tiled, cdiv, next_power_of_2
from nsa.ops._operator import Call
from nsa.ops._plan import once
from nsa.ops._sequences import Sequences
from nsa.ops._triton.kernel import Launch
from nsa.ops._triton.selected_index_kernels import (
    chunk_kernel,
    key_block_kernel,
    key_kernel,
    list_kernel,
)
from nsa.ops._triton.tuning import scatter_of

# Key blocks, or chunks, per program of the index kernels.
BLOCK = 128
# Bits of the words used as bitmaps over the blocks of a sequence.
WORDS = (32, 64)
# Most selections per chunk. Chunks are smaller if there would be too few: a GPU runs about 400
# programs at once.
MOST_IN_CHUNK, LEAST_IN_CHUNK, PROGRAMS = 1024, 128, 512


class SelectedBlocks(NamedTuple):
    """Selected-block sizes, as compile-time constants.

    Attributes:
        N: slots of a query.
        SIZE: tokens of a block.
        SCATTERED: selections scatter if the mean list length of a tile exceeds this.
    """

    N: int
    SIZE: int
    SCATTERED: float


class Lists(NamedTuple):
    """Blocks selected by the queries of each tile.

    Attributes:
        block: int32 ``[Hkv, tiles, list_len]``, ascending.
        query_mask: same shape; bit i is set if query i of the tile selected the block.
        counts: int32 ``[Hkv, tiles, 4]``: number of blocks fully in the past of every query, fully
            inside the sequence, in total, and before the last two local blocks of every query.
    """

    block: Tensor
    query_mask: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Chunks:
    """Programs that share the selections of an inverse index; empty before :meth:`fill`.

    Attributes:
        order: order of the index.
        begin: int32 ``[segments * key blocks]``: index in ``order`` of the first selection of each
            key block in a segment.
        length: same shape: number of these selections.
        owner: int32: ``segment * key blocks + key block`` of each chunk.
        start: int32 ``[segments * key blocks + 1]``: first chunk of each key block in a segment.
        num_blocks: number of blocks of the index.
        segments: segments that the queries are split into.
        index_segments: segments of the index, a multiple of ``segments``.
        segment_rows: queries per segment.
        size: selections per chunk.
        limit: upper bound on the chunks of any segment.
    """

    order: Tensor
    begin: Tensor
    length: Tensor
    owner: Tensor
    start: Tensor
    num_blocks: int
    segments: int
    index_segments: int
    segment_rows: int
    size: int
    limit: int

    def pointers(self) -> tuple[Tensor, ...]:
        """Return the kernel arguments that locate a program's chunk."""
        return self.order, self.begin, self.length, self.owner, self.start

    def fill(self, ranked: Tensor) -> None:
        """Compute the chunks from the result of :meth:`InverseIndex.fill`."""
        total, selections = self.begin.shape[0], ranked.shape[0]
        count = torch.empty_like(self.start)
        most, options = self.owner.shape[0], {"BLOCK": BLOCK, "num_warps": 4}
        key_blocks, chunks = once(
            lambda: (
                Launch(key_block_kernel, (cdiv(total, BLOCK),), **options),
                Launch(chunk_kernel, (cdiv(most, BLOCK),), **options),
            )
        )
        key_blocks(
            ranked,
            self.begin,
            self.length,
            count,
            selections,
            selections.bit_length(),
            total // self.segments,
            self.segments,
            self.index_segments // self.segments,
            self.size,
        )
        torch.cumsum(count, 0, dtype=torch.int32, out=self.start)
        chunks(self.start, self.owner, total, most, (total + 1).bit_length())


@dataclass(frozen=True)
class InverseIndex:
    """The queries that selected each block; empty before :meth:`fill`.

    Attributes:
        key: int16 or int32 ``[T, Hkv, n]``: ``key block * segments + segment`` of each selection,
            ``absent`` if its block is absent.
        remote: like ``key``, but ``absent`` if the block is local, see ``tiled.py``; None if not
            needed.
        order: int32 ``[T * Hkv * n]``: selections sorted by key, then by query.
        num_blocks: upper bound on the blocks of all sequences together.
        segments: number of segments that the keys distinguish.
        segment_rows: queries per segment.
        absent: key of absent blocks, equal to the number of valid keys.
    """

    key: Tensor
    remote: Tensor | None
    order: Tensor
    num_blocks: int
    segments: int
    segment_rows: int
    absent: int

    def fill(
        self,
        block_indices: Tensor,
        sequences: Sequences,
        block_size: int,
        *,
        unique: bool,
        sort: bool,
    ) -> Tensor:
        """Compute the keys of ``block_indices [T, Hkv, n]``, and sort them if ``sort``.

        Args:
            block_indices: int32 or int64.
            sequences: the sequence layout.
            block_size: tokens of a block.
            unique: whether no query selects a block twice; otherwise duplicates are removed.
            sort: whether to fill ``order``.

        Returns:
            The sorted keys, ``[T * Hkv * n]``.
        """
        num_q, num_kv_heads, n = block_indices.shape
        if sequences.offsets is not None:  # rows outside all sequences are not visited
            self.key.fill_(self.absent)
            if self.remote is not None:
                self.remote.fill_(self.absent)
        block_q = 64
        launch = once(
            lambda: Launch(
                key_kernel,
                (sequences.num_tiles(num_q, block_q, sequences.len_q),),
                HKV=num_kv_heads,
                N=n,
                BLOCK_SIZE=block_size,
                BLOCK_Q=block_q,
                STEP=1024,
                UNIQUE=unique,
                num_warps=4,
            )
        )
        launch(
            block_indices.contiguous(),
            self.key,
            self.remote,
            *sequences.arguments(),
            self.num_blocks,
            self.segments,
            self.segment_rows,
            self.absent,
        )
        if not sort:
            return self.key.flatten()[self.order]
        ranked, order = self.key.flatten().sort(stable=True)
        self.order.copy_(order)
        return ranked

    def new_chunks(self, segments: int, size: int) -> Chunks:
        """Allocate chunks of ``size`` selections, for all segments of the index or for one."""
        num_q, num_kv_heads, n = self.key.shape
        key_blocks, selections = num_kv_heads * self.num_blocks, self.order.numel()
        total = segments * key_blocks
        begin, length, owner, start = (
            torch.empty(number, dtype=torch.int32, device=self.order.device)
            for number in (total, total, selections // size + total, total + 1)
        )
        rows = cdiv(num_q, segments)
        limit = rows * num_kv_heads * n // size + key_blocks
        numbers = (self.num_blocks, segments, self.segments, rows, size, limit)
        return Chunks(self.order, begin, length, owner, start, *numbers)


def new_index(
    block_indices: Tensor,
    sequences: Sequences,
    block_size: int,
    num_tokens: int,
    segments: int,
    order: Tensor | None = None,
    *,
    with_remote: bool = False,
) -> InverseIndex:
    """Allocate the inverse index of ``block_indices [T, Hkv, n]``.

    Args:
        block_indices: only shape and device are used.
        sequences: the sequence layout.
        block_size: tokens of a block.
        num_tokens: total number of key tokens.
        segments: number of query segments to distinguish.
        order: memory for the order, or the order of an index of the same selection with any number
            of segments; None allocates it.
        with_remote: whether to distinguish remote blocks from local ones.
    """
    num_q, num_kv_heads, _ = block_indices.shape
    num_blocks = sequences.num_tiles(num_tokens, block_size, sequences.len_k)
    absent = num_kv_heads * num_blocks * segments
    counted = "blocks times KV heads times segments of queries"
    check_numbers("k", absent, counted)
    # int16 keys need half as many sorting passes.
    dtype = torch.int16 if absent < 2**15 - 1 else torch.int32
    key = torch.empty(block_indices.shape, dtype=dtype, device=block_indices.device)
    remote = torch.empty_like(key) if with_remote else None
    if order is None:
        order = block_indices.new_empty(block_indices.numel(), dtype=torch.int32)
    return InverseIndex(key, remote, order, num_blocks, segments, cdiv(num_q, segments), absent)


def is_always_tiled(q: Tensor, block_indices: Tensor, call: Call) -> bool:
    """Whether selected attention runs its tiled algorithm regardless of the selection.

    If not, its inverse index is sorted.
    """
    config, sequences = call.config, call.sequences
    index = q.device.index if q.is_cuda else None
    size = max(config.head_dim, config.value_dim)
    scatter = once(lambda: scatter_of("selected_attention_fwd", size, q.element_size(), index))
    sizes = (config.group_size, block_indices.shape[-1], sequences.len_q, sequences.len_k)
    return always_tiled(call.algorithm, *sizes, config.block_size, scatter)


def chunk_size(num_selections: int) -> int:
    """Selections per chunk, by shapes alone for a fixed summation order."""
    each = 1 << (max(num_selections // PROGRAMS, 1).bit_length() - 1)
    return min(MOST_IN_CHUNK, max(LEAST_IN_CHUNK, each))


def _check_lists(list_len: int, num_blocks: int, slots: int) -> None:
    """Check that a tile's blocks can be counted, and sorted with their slot in one integer."""
    counted = "slots for the queries of a tile"
    hint = "Give fewer slots a query."
    check_numbers("block_indices", list_len, counted, _checks.LISTED, hint)
    counted = "blocks a sequence with so many slots"
    hint = "Give max_seqlen_k, fewer slots a query or shorter sequences."
    check_numbers("k", num_blocks, counted, _checks.SORTED // slots, hint)


def word_of(num_blocks: int) -> int:
    """Bits of a bitmap over the blocks of a sequence; 0 if there are too many blocks."""
    return next((bits for bits in WORDS if num_blocks <= bits), 0)


def make_lists(
    block_indices: Tensor,
    sequences: Sequences,
    group_size: int,
    block_size: int,
    rows: int,
    tile_stats: Tensor | None,
    scatter: float | None = None,
    *,
    words: Tensor | None = None,
    window: int = 0,
) -> Lists:
    """Build the list of every tile of ``rows`` rows (queries by heads).

    The total list length and the number of tiles are added to ``tile_stats``, int64 ``[2]``. With
    ``scatter`` they are there already, and lists stay empty if their mean length exceeds
    ``scatter`` times n. With ``words``, an output for the blocks of each query as bits ``[Hkv,
    T]``, the lists contain all blocks in the ``window`` of a tile, too; a sequence then has at most
    as many blocks as a word has bits.
    """
    num_q, num_kv_heads, n = block_indices.shape

    def plan() -> tuple[int, int, Launch]:
        num_lists = sequences.num_tiles(num_q * group_size, rows, sequences.len_q * group_size)
        # Either a tile has whole queries, or it begins and ends between the heads of two queries.
        queries = rows // group_size if rows % group_size == 0 else (rows - 2) // group_size + 2
        pad_q, pad_n = next_power_of_2(queries), next_power_of_2(n)
        num_blocks = cdiv(sequences.len_k, block_size)
        list_len = queries * n if words is None else num_blocks
        _check_lists(queries * n, num_blocks, pad_q * pad_n)
        launch = Launch(
            list_kernel,
            (num_lists, num_kv_heads),
            G=group_size,
            HKV=num_kv_heads,
            BLOCKS=SelectedBlocks(n, block_size, (scatter or 0.0) * n),
            ROWS=rows,
            LIST_LEN=list_len,
            PAD_Q=pad_q,
            PAD_N=pad_n,
            COUNTED=scatter is not None,
            WORD=word_of(num_blocks),
            num_warps=1 << min(max(queries * pad_n // 256, 1).bit_length() - 1, 3),
        )
        return num_lists, list_len, launch

    num_lists, list_len, launch = once(plan)
    block, query_mask, count = (
        block_indices.new_empty(num_kv_heads, num_lists, size, dtype=torch.int32)
        for size in (list_len, list_len, 4)
    )
    if num_lists:
        arguments = (tile_stats, words, *sequences.arguments(), num_lists, num_q, window)
        launch(block_indices.contiguous(), block, query_mask, count, *arguments)
    return Lists(block, query_mask, count)
