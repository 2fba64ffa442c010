"""A choice of blocks in the forms that the kernels of the selected branch want, made on the device; see ``index.py``."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.tiles import VARYING, find_tile, sequence_rows


@triton.jit
def larger(a, b):
    """Combine function of a running maximum."""
    return tl.maximum(a, b)


@triton.jit
def choices_scatter(union_ptr, N: tl.constexpr, LIMIT_4: tl.constexpr):
    """Whether the mean list of a tile is longer than ``LIMIT_4 / 4 * N`` blocks."""
    return tl.load(union_ptr) * 4 > tl.load(union_ptr + 1) * (LIMIT_4 * N)


@triton.jit(do_not_specialize=[*VARYING, "num_lists"])
def list_kernel(
    indices_ptr, block_ptr, word_ptr, count_ptr, union_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_lists,
    G: tl.constexpr, HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr, PAD_Q: tl.constexpr, PAD_N: tl.constexpr, COUNTED: tl.constexpr, LIMIT_4: tl.constexpr,
):  # fmt: skip
    """The list of one tile of ``ROWS`` rows, queries by ``G`` heads: of at most ``BLOCK_Q`` queries.

    ``count_ptr`` gets, for each tile: blocks wholly in the past of every query, blocks wholly inside the sequence, and all. To
    ``union_ptr`` (None: nobody asks) are added the blocks of the list, and 1 for the tile: whole numbers, whose sum is the same
    in any order. If they are ``COUNTED`` already, lists are made only where they are read.
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
        block = tl.load(indices_ptr + entry, mask=ok, other=-1).to(tl.int32)
        t = num_tokens - num_q + row
        present = ok & (block >= 0) & (block <= t // BLOCK_SIZE)
        NONE: tl.constexpr = 0x7FFFFFFF // SIZE
        ranked = tl.sort(tl.where(present, block, NONE) * SIZE + e)
        block = ranked // SIZE
        bit = tl.where(block < NONE, tl.full([SIZE], 1, tl.int64) << ((ranked % SIZE) // PAD_N).to(tl.int64), 0)
        first = (e == 0) | (block != tl.gather(block, tl.maximum(e - 1, 0), 0))
        last = (block < NONE) & ((e == SIZE - 1) | (block != tl.gather(block, tl.minimum(e + 1, SIZE - 1), 0)))
        total = tl.cumsum(bit, 0)
        # Sums never fall, so the greatest start so far is that of the entry's own block.
        word = total - tl.associative_scan(tl.where(first, total - bit, 0), 0, larger)
        place = tl.cumsum(last.to(tl.int32), 0) - 1
        out = (head.to(tl.int64) * num_lists + number) * (BLOCK_Q * N) + place
        tl.store(block_ptr + out, block, mask=last)
        tl.store(word_ptr + out, word.to(tl.int32), mask=last)
        t_first = num_tokens - num_q + tile_q
        past = tl.sum((last & (block * BLOCK_SIZE + (BLOCK_SIZE - 1) <= t_first)).to(tl.int32), 0)
        inside = tl.sum((last & ((block + 1) * BLOCK_SIZE <= num_tokens)).to(tl.int32), 0)
        at = (head.to(tl.int64) * num_lists + number) * 3
        tl.store(count_ptr + at, past)
        tl.store(count_ptr + at + 1, inside)
        length = tl.sum(last.to(tl.int32), 0)
        tl.store(count_ptr + at + 2, length)
        if union_ptr is not None and not COUNTED:
            tl.atomic_add(union_ptr, length.to(tl.int64), sem="relaxed")
            tl.atomic_add(union_ptr + 1, tl.full([], 1, tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=[*VARYING, "num_blocks", "segments", "segment_rows", "none"])
def key_kernel(
    indices_ptr, key_ptr, cu_q_ptr, cu_k_ptr, cu_block_ptr, len_q, len_k, num_sequences, num_blocks, segments, segment_rows,
    none, HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Key of each entry of a tile of queries, see ``InverseIndex``."""
    sequence, tile = find_tile(cu_q_ptr, tl.program_id(0), num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        if cu_block_ptr is None:
            first_block = sequence * tl.cdiv(len_k, BLOCK_SIZE)
        else:
            first_block = tl.load(cu_block_ptr + sequence)
        row = tile * BLOCK_Q
        first = (first_q + row).to(tl.int64) * (HKV * N)
        count = tl.minimum(num_q - row, BLOCK_Q) * (HKV * N)
        for begin in tl.range(0, count, ENTRIES):
            e = begin + tl.arange(0, ENTRIES)
            block = tl.load(indices_ptr + first + e, mask=e < count, other=-1).to(tl.int32)
            query = row + e // (HKV * N)
            present = (block >= 0) & (block <= (num_tokens - num_q + query) // BLOCK_SIZE)
            head = e // N % HKV
            key = (head * num_blocks + first_block + block) * segments + (first_q + query) // segment_rows
            tl.store(key_ptr + first + e, tl.where(present, key, none).to(key_ptr.dtype.element_ty), mask=e < count)
