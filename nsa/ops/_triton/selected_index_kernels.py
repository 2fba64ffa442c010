"""Kernels that build the index structures over selected blocks; see ``selected_index.py``."""

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
def selections_scatter(tile_stats_ptr, SCATTERED: tl.constexpr):
    """Whether the mean list length of a tile exceeds ``SCATTERED`` blocks."""
    blocks = tl.load(tile_stats_ptr).to(tl.float64)
    return blocks > tl.load(tile_stats_ptr + 1).to(tl.float64) * SCATTERED


@triton.jit
def either(a, b):
    """Combine function of a bitwise or."""
    return a | b


@triton.jit
def blocks_by_word(named, present, PAD_Q: tl.constexpr, PAD_N: tl.constexpr, WORD: tl.constexpr):
    """Blocks selected in the slots ``[PAD_Q * PAD_N]`` of queries, see ``list_kernel``.

    Returns:
        ``[PAD_Q]``, the blocks of each query, one bit per block; ``[WORD]`` each: block ids,
        ascending; the queries that selected each, one bit per query; and whether any did.
    """
    word_type: tl.constexpr = tl.int64 if WORD > 32 else tl.int32
    one = tl.full([PAD_Q * PAD_N], 1, word_type)
    bit = tl.where(present, one << tl.where(present, named, 0).to(word_type), 0)
    words = tl.reduce(tl.reshape(bit, [PAD_Q, PAD_N]), 1, either)  # bitmap of each query, [PAD_Q]
    block = tl.arange(0, WORD)
    named_by = ((words[None, :] >> block[:, None].to(word_type)) & 1).to(tl.int32)
    query_mask = tl.sum(named_by << tl.arange(0, PAD_Q)[None, :], 1)
    return words, block, query_mask, query_mask != 0


@triton.jit
def blocks_by_sort(named, present, e, PAD_Q: tl.constexpr, PAD_N: tl.constexpr):
    """Blocks of ``blocks_by_word`` by sorting, ``[PAD_Q * PAD_N]``; valid where the last is true.

    ``e`` are the slot indices.
    """
    SIZE: tl.constexpr = PAD_Q * PAD_N
    NONE: tl.constexpr = 0x7FFFFFFF // SIZE
    ranked = tl.sort(tl.where(present, named.to(tl.int32), NONE) * SIZE + e)
    block = ranked // SIZE
    # (block, query): equal to the neighbor's if a query selects a block twice.
    pair = ranked // PAD_N
    before = tl.gather(pair, tl.maximum(e - 1, 0), 0)
    counts_here = (block < NONE) & ((e == 0) | (pair != before))
    bit = tl.where(counts_here, tl.full([SIZE], 1, tl.int64) << (pair % PAD_Q).to(tl.int64), 0)
    first = (e == 0) | (block != before // PAD_Q)
    after = tl.gather(block, tl.minimum(e + 1, SIZE - 1), 0)
    last = (block < NONE) & ((e == SIZE - 1) | (block != after))
    total = tl.cumsum(bit, 0)
    # Sums never decrease, so the running maximum of starts belongs to the slot's own block.
    query_mask = total - tl.associative_scan(tl.where(first, total - bit, 0), 0, larger)
    return block, query_mask.to(tl.int32), last


@kernel(do_not_specialize=[*VARYING, "num_lists"])
def list_kernel(
    indices_ptr,
    block_ptr,
    mask_ptr,
    count_ptr,
    tile_stats_ptr,
    words_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_lists,
    num_rows,
    window,
    G: tl.constexpr,
    HKV: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    LIST_LEN: tl.constexpr,
    PAD_Q: tl.constexpr,
    PAD_N: tl.constexpr,
    COUNTED: tl.constexpr,
    WORD: tl.constexpr,
):
    """Build the lists of the tiles, see ``Lists``. Duplicate blocks of a query count once.

    Program (i, h) handles the i-th tile of ``ROWS`` rows (queries by ``G`` heads of KV head h) and
    finds the blocks selected by its queries, at most ``LIST_LEN``: by sorting or, if no sequence
    has more than ``WORD`` blocks, with bitmaps, which takes far fewer instructions. It adds the
    length of the list and 1 (for the tile) to ``tile_stats_ptr`` unless it is None; integer sums do
    not depend on the order. If they are ``COUNTED`` already, only lists that are read are built.
    With ``words_ptr`` ``[Hkv, T]`` it stores the bitmaps, and lists contain all blocks in the
    ``window`` of the tile, too.
    """
    BLOCK_SIZE: tl.constexpr = BLOCKS.SIZE
    if COUNTED:  # noqa: SIM102 (known when the kernel is compiled)
        if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
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
        e = tl.arange(0, SIZE)  # slots of all queries of the tile, [SIZE]
        query = e // PAD_N
        slot = e % PAD_N
        row = tile_q + query
        ok = (row < end_q) & (slot < BLOCKS.N)
        at = ((first_q + row).to(tl.int64) * HKV + head) * BLOCKS.N + slot
        named = tl.load(indices_ptr + at, mask=ok, other=-1)  # [SIZE], 32 or 64 bits
        t = num_tokens - num_q + row
        present = ok & (named >= 0) & (named <= t // BLOCK_SIZE)
        if WORD:
            words, block, query_mask, last = blocks_by_word(named, present, PAD_Q, PAD_N, WORD)
            if words_ptr is not None:
                row = tile_q + tl.arange(0, PAD_Q)
                token = head.to(tl.int64) * num_rows + first_q + row
                tl.store(words_ptr + token, words, mask=row < end_q)
                first = num_tokens - num_q + tile_q
                seen = tl.maximum(first - window + 1, 0) // BLOCK_SIZE
                own = (num_tokens - num_q + end_q - 1) // BLOCK_SIZE
                last = last | ((block >= seen) & (block <= own))
        else:
            block, query_mask, last = blocks_by_sort(named, present, e, PAD_Q, PAD_N)
        place = tl.cumsum(last.to(tl.int32), 0) - 1
        out = (head.to(tl.int64) * num_lists + number) * LIST_LEN + place
        tl.store(block_ptr + out, block, mask=last)
        tl.store(mask_ptr + out, query_mask, mask=last)
        t_first = num_tokens - num_q + tile_q
        # One reduction for two counts: a list has less than 2^16 blocks.
        in_past = (last & (block < (t_first + 1) // BLOCK_SIZE)).to(tl.int32)
        remote = (last & (block < t_first // BLOCK_SIZE - 1)).to(tl.int32)
        counts = tl.sum(in_past + (remote << 16), 0)
        inside = tl.sum((last & ((block + 1) * BLOCK_SIZE <= num_tokens)).to(tl.int32), 0)
        at = (head.to(tl.int64) * num_lists + number) * 4
        tl.store(count_ptr + at, counts & 0xFFFF)
        tl.store(count_ptr + at + 1, inside)
        length = tl.sum(last.to(tl.int32), 0)
        tl.store(count_ptr + at + 2, length)
        tl.store(count_ptr + at + 3, counts >> 16)
        if tile_stats_ptr is not None and not COUNTED:
            tl.atomic_add(tile_stats_ptr, length.to(tl.int64), sem="relaxed")
            tl.atomic_add(tile_stats_ptr + 1, tl.full([], 1, tl.int64), sem="relaxed")


@kernel(do_not_specialize=[*VARYING, "num_blocks", "segments", "segment_rows", "absent"])
def key_kernel(
    indices_ptr,
    key_ptr,
    remote_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_blocks,
    segments,
    segment_rows,
    absent,
    HKV: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    STEP: tl.constexpr,
    UNIQUE: tl.constexpr,
):
    """Write sort keys of all selections and of remote blocks only, see ``InverseIndex``.

    Program i handles the i-th tile of ``BLOCK_Q`` queries, ``STEP`` selections at a time. Unless
    blocks are known to be ``UNIQUE``, a selection is absent if an earlier slot of its query has the
    same block.
    """
    sequence, tile = find_tile(cu_q_ptr, tl.program_id(0), num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_block = tiles_before(cu_k_ptr, sequence, len_k, BLOCK_SIZE)
        row = tile * BLOCK_Q
        first = (first_q + row).to(tl.int64) * (HKV * N)
        count = tl.minimum(num_q - row, BLOCK_Q) * (HKV * N)
        for begin in tl.range(0, count, STEP):
            e = begin + tl.arange(0, STEP)  # selections of the tile, [STEP]
            named = tl.load(indices_ptr + first + e, mask=e < count, other=-1)  # 32 or 64 bits
            query = row + e // (HKV * N)
            own = (num_tokens - num_q + query) // BLOCK_SIZE
            present = (named >= 0) & (named <= own)
            if not UNIQUE:
                for back in tl.range(1, N):
                    again = (e < count) & (e % N >= back)
                    earlier = tl.load(indices_ptr + first + (e - back), mask=again, other=-1)
                    present = present & (named != earlier)
            block = named.to(tl.int32)
            head = e // N % HKV
            key_block = head * num_blocks + first_block + block
            key = key_block * segments + (first_q + query) // segment_rows
            key = tl.where(present, key, absent).to(key_ptr.dtype.element_ty)
            tl.store(key_ptr + first + e, key, mask=e < count)
            if remote_ptr is not None:
                remote = tl.where((block > 0) & (block < own - 1), key, absent)
                tl.store(remote_ptr + first + e, remote, mask=e < count)


@triton.jit
def first_at_least(sorted_ptr, x, length, steps):
    """Lower bound: index of the first of ``length`` ascending numbers that is >= x, elementwise.

    Binary search with ``steps`` iterations.
    """
    low = tl.zeros(x.shape, tl.int32)
    high = low + length
    for _ in range(steps):
        middle = low + (high - low) // 2
        searching = low < high
        less = tl.load(sorted_ptr + middle, mask=searching, other=0).to(tl.int32) < x
        low = tl.where(searching & less, middle + 1, low)
        high = tl.where(searching & (less == 0), middle, high)
    return low


@kernel(
    do_not_specialize=["num_selections", "steps", "key_blocks", "segments", "own_segments", "size"]
)
def key_block_kernel(
    ranked_ptr,
    begin_ptr,
    length_ptr,
    chunks_ptr,
    num_selections,
    steps,
    key_blocks,
    segments,
    own_segments,
    size,
    BLOCK: tl.constexpr,
):
    """First selection, number of selections and number of chunks of each key block.

    Program i handles the i-th ``BLOCK`` pairs of segment and key block, see ``Chunks``. There are
    ``segments`` segments, each made of ``own_segments`` segments of the index. Chunk
    counts are stored one element later, after a 0, so that their cumulative sum is the first chunk
    of each key block.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = number < segments * key_blocks
    key = (number % key_blocks * segments + number // key_blocks) * own_segments
    keys = key[:, None] + (tl.arange(0, 2) * own_segments)[None, :]
    begin, end = tl.split(first_at_least(ranked_ptr, keys, num_selections, steps))
    tl.store(begin_ptr + number, begin, mask=ok)
    tl.store(length_ptr + number, end - begin, mask=ok)
    tl.store(chunks_ptr + 1 + number, (end - begin + size - 1) // size, mask=ok)
    tl.store(chunks_ptr + number, 0, mask=number == 0)


@kernel(do_not_specialize=["num_key_blocks", "num_chunks", "steps"])
def chunk_kernel(start_ptr, key_block_ptr, num_key_blocks, num_chunks, steps, BLOCK: tl.constexpr):
    """Key block of each chunk: the last one that begins at or before the chunk.

    Program i handles the i-th ``BLOCK`` chunks. Values after the last chunk are arbitrary.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key_block = first_at_least(start_ptr, number + 1, num_key_blocks + 1, steps) - 1
    tl.store(key_block_ptr + number, key_block, mask=number < num_chunks)
