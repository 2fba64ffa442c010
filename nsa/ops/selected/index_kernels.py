"""A choice of blocks in the forms that the kernels of the selected branch want, made on the device; see ``index.py``."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import VARYING, find_tile, sequence_rows, tiles_before


@triton.jit
def larger(a, b):
    """Combine function of a running maximum."""
    return tl.maximum(a, b)


@triton.jit
def choices_scatter(union_ptr, N: tl.constexpr, LIMIT_4: tl.constexpr):
    """Whether the mean list of a tile is longer than ``LIMIT_4 / 4 * N`` blocks."""
    return tl.load(union_ptr) * 4 > tl.load(union_ptr + 1) * (LIMIT_4 * N)


@kernel(do_not_specialize=[*VARYING, "num_lists"])
def list_kernel(
    indices_ptr, block_ptr, word_ptr, count_ptr, union_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_lists,
    G: tl.constexpr, HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr, PAD_Q: tl.constexpr, PAD_N: tl.constexpr, COUNTED: tl.constexpr, LIMIT_4: tl.constexpr,
):  # fmt: skip
    """The list of one tile of ``ROWS`` rows, queries by ``G`` heads: of at most ``BLOCK_Q`` queries.

    ``count_ptr`` gets, for each tile: blocks wholly in the past of every query, blocks wholly
    inside the sequence, all, and those before the own block of the first query and the one before
    it. To ``union_ptr`` (None: nobody asks) are added the blocks of the list, and 1 for the tile:
    whole numbers, whose sum is the same in any order. If they are ``COUNTED`` already, lists are
    made only where they are read. A block that a query names more than once counts once.
    """
    if COUNTED:  # noqa: SIM102 (known when the kernel is compiled)
        if choices_scatter(union_ptr, N, LIMIT_4):
            return
    number = tl.program_id(0)
    head = tl.program_id(1)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, ROWS, G)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        tile_q = tile * ROWS // G
        end_q = tl.minimum((tile * ROWS + ROWS - 1) // G + 1, num_q)
        SIZE: tl.constexpr = PAD_Q * PAD_N
        e = tl.arange(0, SIZE)
        query = e // PAD_N
        slot = e % PAD_N
        row = tile_q + query
        ok = (row < end_q) & (slot < N)
        entry = ((first_q + row).to(tl.int64) * HKV + head) * N + slot
        named = tl.load(indices_ptr + entry, mask=ok, other=-1)  # 32 or 64 bits
        t = num_tokens - num_q + row
        present = ok & (named >= 0) & (named <= t // BLOCK_SIZE)
        NONE: tl.constexpr = 0x7FFFFFFF // SIZE
        ranked = tl.sort(tl.where(present, named.to(tl.int32), NONE) * SIZE + e)
        block = ranked // SIZE
        # block and query: the same in neighbours where a query names a block again
        pair = ranked // PAD_N
        before = tl.gather(pair, tl.maximum(e - 1, 0), 0)
        counts_here = (block < NONE) & ((e == 0) | (pair != before))
        bit = tl.where(counts_here, tl.full([SIZE], 1, tl.int64) << (pair % PAD_Q).to(tl.int64), 0)
        first = (e == 0) | (block != before // PAD_Q)
        last = (block < NONE) & (
            (e == SIZE - 1) | (block != tl.gather(block, tl.minimum(e + 1, SIZE - 1), 0))
        )
        total = tl.cumsum(bit, 0)
        # Sums never fall, so the greatest start so far is that of the entry's own block.
        word = total - tl.associative_scan(tl.where(first, total - bit, 0), 0, larger)
        place = tl.cumsum(last.to(tl.int32), 0) - 1
        out = (head.to(tl.int64) * num_lists + number) * (BLOCK_Q * N) + place
        tl.store(block_ptr + out, block, mask=last)
        tl.store(word_ptr + out, word.to(tl.int32), mask=last)
        t_first = num_tokens - num_q + tile_q
        # Two counts by one sum: a list has less than 2^16 blocks.
        in_past = (last & (block < (t_first + 1) // BLOCK_SIZE)).to(tl.int32)
        counts = tl.sum(
            in_past + ((last & (block < t_first // BLOCK_SIZE - 1)).to(tl.int32) << 16), 0
        )
        inside = tl.sum((last & ((block + 1) * BLOCK_SIZE <= num_tokens)).to(tl.int32), 0)
        at = (head.to(tl.int64) * num_lists + number) * 4
        tl.store(count_ptr + at, counts & 0xFFFF)
        tl.store(count_ptr + at + 1, inside)
        length = tl.sum(last.to(tl.int32), 0)
        tl.store(count_ptr + at + 2, length)
        tl.store(count_ptr + at + 3, counts >> 16)
        if union_ptr is not None and not COUNTED:
            tl.atomic_add(union_ptr, length.to(tl.int64), sem="relaxed")
            tl.atomic_add(union_ptr + 1, tl.full([], 1, tl.int64), sem="relaxed")


@kernel(do_not_specialize=[*VARYING, "num_blocks", "segments", "segment_rows", "none"])
def key_kernel(
    indices_ptr, key_ptr, far_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_blocks, segments, segment_rows, none,
    HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, ENTRIES: tl.constexpr,
    UNIQUE: tl.constexpr,
):  # fmt: skip
    """Key of each entry of a tile of queries, and the same without near blocks, see ``InverseIndex``.

    Unless blocks are known to be ``UNIQUE``, an entry whose query named its block in a slot before
    is absent.
    """
    sequence, tile = find_tile(cu_q_ptr, tl.program_id(0), num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_block = tiles_before(cu_k_ptr, sequence, len_k, BLOCK_SIZE)
        row = tile * BLOCK_Q
        first = (first_q + row).to(tl.int64) * (HKV * N)
        count = tl.minimum(num_q - row, BLOCK_Q) * (HKV * N)
        for begin in tl.range(0, count, ENTRIES):
            e = begin + tl.arange(0, ENTRIES)
            named = tl.load(indices_ptr + first + e, mask=e < count, other=-1)  # 32 or 64 bits
            query = row + e // (HKV * N)
            own = (num_tokens - num_q + query) // BLOCK_SIZE
            present = (named >= 0) & (named <= own)
            if not UNIQUE:
                for back in tl.range(1, N):
                    again = (e < count) & (e % N >= back)
                    present = present & (
                        named != tl.load(indices_ptr + first + (e - back), mask=again, other=-1)
                    )
            block = named.to(tl.int32)
            head = e // N % HKV
            key = (head * num_blocks + first_block + block) * segments + (
                first_q + query
            ) // segment_rows
            key = tl.where(present, key, none).to(key_ptr.dtype.element_ty)
            tl.store(key_ptr + first + e, key, mask=e < count)
            if far_ptr is not None:
                tl.store(
                    far_ptr + first + e,
                    tl.where((block > 0) & (block < own - 1), key, none),
                    mask=e < count,
                )


@triton.jit
def first_at_least(sorted_ptr, x, length, steps):
    """Where the first of ``length`` ascending numbers that is at least x lies, for every x of a tensor; ``steps`` halvings."""
    low = tl.zeros(x.shape, tl.int32)
    high = low + length
    for _ in range(steps):
        middle = low + (high - low) // 2
        searching = low < high
        less = tl.load(sorted_ptr + middle, mask=searching, other=0).to(tl.int32) < x
        low = tl.where(searching & less, middle + 1, low)
        high = tl.where(searching & (less == 0), middle, high)
    return low


@kernel(do_not_specialize=["num_entries", "steps", "items", "segments", "own_segments", "size"])
def item_kernel(
    ranked_ptr, begin_ptr, length_ptr, chunks_ptr, num_entries, steps, items, segments, own_segments, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the entries of items begin in the inverse index, how many there are and their chunks; see ``Chunks``.

    There are ``segments`` of each item, in the index ``own_segments`` times as many. Chunks are
    written one place further on, after a 0, so that their running sums are where the chunks of each
    item begin.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = number < segments * items
    key = (number % items * segments + number // items) * own_segments
    keys = key[:, None] + (tl.arange(0, 2) * own_segments)[None, :]
    begin, end = tl.split(first_at_least(ranked_ptr, keys, num_entries, steps))
    tl.store(begin_ptr + number, begin, mask=ok)
    tl.store(length_ptr + number, end - begin, mask=ok)
    tl.store(chunks_ptr + 1 + number, (end - begin + size - 1) // size, mask=ok)
    tl.store(chunks_ptr + number, 0, mask=number == 0)


@kernel(do_not_specialize=["num_items", "num_chunks", "steps"])
def chunk_kernel(start_ptr, item_ptr, num_items, num_chunks, steps, BLOCK: tl.constexpr):
    """The item of each chunk: the last one that begins at the chunk or before it. Beyond the last chunk, any number."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item = first_at_least(start_ptr, number + 1, num_items + 1, steps) - 1
    tl.store(item_ptr + number, item, mask=number < num_chunks)
