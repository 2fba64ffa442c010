"""A choice of blocks in the forms that the kernels of the selected branch want; nothing here waits for the device.

- **Lists by tile.** A tile is a few consecutive queries of one group. Its list holds every block that one of them chose,
  ascending, and beside each block a word whose bit i says that query i of the tile chose it.
- **Inverse index.** An *item* is a block of one head, ``head * num_blocks + block``. An *entry* is a (query, head, slot),
  numbered as in ``block_indices [T, Hkv, n]``; sorted by item, the entries of an item are the
  queries that chose the block, in order. Kernels that need memory for every entry cut the queries
  into segments, which are worked off one after the other. The entries of an item in a segment are
  cut into *chunks*, one a program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops import _limits
from nsa.ops._limits import check_numbers
from nsa.ops._triton.layout import Layout
from nsa.ops._triton.sizes import cdiv, next_power_of_2
from nsa.ops.selected.algorithm import LIMIT_4
from nsa.ops.selected.index_kernels import chunk_kernel, item_kernel, key_kernel, list_kernel

# Items, or chunks, of a program that looks for their places.
BLOCK = 128


@dataclass(frozen=True)
class Lists:
    """Blocks that the queries of each tile chose.

    Attributes:
        block: int32 ``[Hkv, tiles, BLOCK_Q * n]``, ascending.
        word: the same shape: bit i says that query i of the tile chose the block.
        count: int32 ``[Hkv, tiles, 4]``: blocks wholly in the past of every query, wholly inside
            the sequence, all, and those before the near ones of every query.
        queries: at most so many queries of a tile.
    """

    block: Tensor
    word: Tensor
    count: Tensor
    queries: int


@dataclass(frozen=True)
class Chunks:
    """Programs that share the entries of an inverse index; their memory, until :meth:`fill` has been called.

    Attributes:
        order: of the index.
        begin: int32 ``[segments * items]``: where the entries of each item in a segment begin in
            ``order``.
        length: the same shape: how many they are.
        item: int32: ``segment * items + item`` of each chunk.
        start: int32 ``[segments * items + 1]``: the first chunk of each item in a segment.
        num_blocks: of the index.
        segments: segments that the queries are cut into.
        index_segments: segments that the index tells apart, a multiple.
        segment_rows: queries of a segment.
        size: entries of a chunk.
        limit: at least the chunks of any segment.
    """

    order: Tensor
    begin: Tensor
    length: Tensor
    item: Tensor
    start: Tensor
    num_blocks: int
    segments: int
    index_segments: int
    segment_rows: int
    size: int
    limit: int

    def arguments(self) -> tuple[Tensor, ...]:
        """What kernels take to find their chunk."""
        return self.order, self.begin, self.length, self.item, self.start

    def fill(self, ranked: Tensor) -> None:
        """Find the chunks, from what :meth:`InverseIndex.fill` gives."""
        total, entries = self.begin.shape[0], ranked.shape[0]
        count = torch.empty_like(self.start)
        item_kernel[(cdiv(total, BLOCK),)](
            ranked, self.begin, self.length, count, entries, entries.bit_length(), total // self.segments, self.segments,
            self.index_segments // self.segments, self.size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        torch.cumsum(count, 0, dtype=torch.int32, out=self.start)
        most = self.item.shape[0]
        chunk_kernel[(cdiv(most, BLOCK),)](
            self.start, self.item, total, most, (total + 1).bit_length(), BLOCK=BLOCK, num_warps=4
        )


@dataclass(frozen=True)
class InverseIndex:
    """The queries that chose each block; their memory, until :meth:`fill` has been called.

    Attributes:
        key: int16 or int32 ``[T, Hkv, n]``: ``item * segments + segment`` of each entry, ``none``
            where the block is absent.
        far: the same with ``none`` where the block is near, see ``triton_fwd.py``; None where it is
            not needed.
        order: int32 ``[T * Hkv * n]``: entries by key and, for one key, by query.
        num_blocks: at least the blocks of all sequences together.
        segments: segments that can be told apart.
        segment_rows: queries of a segment.
        none: number of keys.
    """

    key: Tensor
    far: Tensor | None
    order: Tensor
    num_blocks: int
    segments: int
    segment_rows: int
    none: int

    def fill(
        self, block_indices: Tensor, layout: Layout, block_size: int, *, unique: bool, sort: bool
    ) -> Tensor:
        """Number the entries of ``block_indices [T, Hkv, n]``, and sort them unless ``order`` is known already.

        Args:
            block_indices: int32 or int64.
            layout: where the sequences lie.
            block_size: tokens of a block.
            unique: whether no query names a block twice; otherwise it is looked for, and a block
                counts once.
            sort: whether to fill ``order``.

        Returns:
            The keys in their order, ``[T * Hkv * n]``.
        """
        num_q, num_kv_heads, n = block_indices.shape
        if layout.cu_q is not None:  # rows of no sequence are not visited
            self.key.fill_(self.none)
            if self.far is not None:
                self.far.fill_(self.none)
        block_q = 64
        key_kernel[(layout.num_tiles(num_q, block_q, layout.len_q),)](
            block_indices.contiguous(), self.key, self.far, *layout.arguments(), self.num_blocks, self.segments,
            self.segment_rows, self.none, HKV=num_kv_heads, N=n, BLOCK_SIZE=block_size, BLOCK_Q=block_q, ENTRIES=1024,
            UNIQUE=unique, num_warps=4,
        )  # fmt: skip
        if not sort:
            return self.key.flatten()[self.order]
        ranked, order = self.key.flatten().sort(stable=True)
        self.order.copy_(order)
        return ranked

    def new_chunks(self, segments: int, size: int) -> Chunks:
        """Memory for chunks of ``size`` entries, in all segments of the index or in one."""
        num_q, num_kv_heads, n = self.key.shape
        items, entries = num_kv_heads * self.num_blocks, self.order.numel()
        total = segments * items
        sizes = (total, total, entries // size + total, total + 1)
        begin, length, item, start = (
            torch.empty(number, dtype=torch.int32, device=self.order.device) for number in sizes
        )
        rows = -(-num_q // segments)
        limit = rows * num_kv_heads * n // size + items
        numbers = (self.num_blocks, segments, self.segments, rows, size, limit)
        return Chunks(self.order, begin, length, item, start, *numbers)


def new_index(
    block_indices: Tensor,
    layout: Layout,
    block_size: int,
    num_tokens: int,
    segments: int,
    order: Tensor | None = None,
    *,
    with_far: bool = False,
) -> InverseIndex:
    """Memory for the inverse index of ``block_indices [T, Hkv, n]`` over keys of ``num_tokens`` tokens.

    Args:
        block_indices: of it shape and device count.
        layout: where the sequences lie.
        block_size: tokens of a block.
        num_tokens: of all sequences' keys.
        segments: segments of queries to be told apart.
        order: memory for the order, or that of an index of the same choice in any number of
            segments; None makes it.
        with_far: whether to tell far blocks from near ones.
    """
    num_q, num_kv_heads, _ = block_indices.shape
    num_blocks = layout.num_tiles(num_tokens, block_size, layout.len_k)
    none = num_kv_heads * num_blocks * segments
    check_numbers(
        "selected_attention", "k", none, "blocks times KV heads times segments of queries"
    )
    # Half as many bits are sorted in half the passes.
    dtype = torch.int16 if none < 2**15 - 1 else torch.int32
    key = torch.empty(block_indices.shape, dtype=dtype, device=block_indices.device)
    far = torch.empty_like(key) if with_far else None
    order = new_order(block_indices) if order is None else order
    return InverseIndex(key, far, order, num_blocks, segments, -(-num_q // segments), none)


def new_order(block_indices: Tensor) -> Tensor:
    """Memory for the order of an inverse index."""
    return torch.empty(block_indices.numel(), dtype=torch.int32, device=block_indices.device)


def _check_lists(listed: int, num_blocks: int, places: int) -> None:
    """The blocks of a tile can be counted, and an entry sorted by its block and its place in the tile in one number."""
    name, slots = "selected_attention", "slots for the queries of a tile"
    check_numbers(name, "block_indices", listed, slots, _limits.LISTED, "Give fewer slots a query.")
    most, hint = (
        _limits.SORTED // places,
        "Give max_seqlen_k, fewer slots a query or shorter sequences.",
    )
    check_numbers(name, "k", num_blocks, "blocks a sequence with so many slots", most, hint)


def make_lists(
    block_indices: Tensor,
    layout: Layout,
    group_size: int,
    block_size: int,
    rows: int,
    union: Tensor | None,
    *,
    counted: bool,
) -> Lists:
    """Lists of every tile of ``rows`` rows, queries by heads; ``union`` int64 ``[2]`` gets their blocks and their number added.

    If the choice is ``counted`` in it already, lists that nobody reads are left empty.
    """
    num_q, num_kv_heads, n = block_indices.shape
    device = block_indices.device
    num_lists = layout.num_tiles(num_q * group_size, rows, layout.len_q * group_size)
    # A tile of whole queries, or one that begins and ends between the heads of two.
    block_q = rows // group_size if rows % group_size == 0 else (rows - 2) // group_size + 2
    pad_q, pad_n = next_power_of_2(block_q), next_power_of_2(n)
    _check_lists(block_q * n, -(-layout.len_k // block_size), pad_q * pad_n)
    block, word = (
        torch.empty(num_kv_heads, num_lists, block_q * n, dtype=torch.int32, device=device)
        for _ in range(2)
    )
    count = torch.empty(num_kv_heads, num_lists, 4, dtype=torch.int32, device=device)
    if num_lists:
        list_kernel[(num_lists, num_kv_heads)](
            block_indices.contiguous(), block, word, count, union, *layout.arguments(), num_lists, G=group_size,
            HKV=num_kv_heads, N=n, BLOCK_SIZE=block_size, BLOCK_Q=block_q, ROWS=rows, PAD_Q=pad_q,
            PAD_N=pad_n, COUNTED=counted, LIMIT_4=LIMIT_4, num_warps=max(1, min(8, block_q * pad_n // 256)),
        )  # fmt: skip
    return Lists(block, word, count, block_q)
