"""A choice of blocks in the forms that the kernels of the selected branch want, made on the device.

- **Lists by tile.** A tile is a few consecutive queries of one group. Its list holds every block that one of them chose,
  ascending, and beside each block a word whose bit i says that query i of the tile chose it.
- **Inverse index.** A choice is a (query, slot). Each gets a number, the same for all that chose the same block of the same
  sequence; sorting these numbers gives, block by block, the choices of it. Queries come in segments, so that buffers over
  choices need not hold all of them at a time.

A tile's list may leave blocks out, which then go through the inverse index. Which ones depends on positions alone, so that what
a query computes does not depend on what later queries chose: a tile keeps block 0, the blocks of its first query's position and
of the one before, and those after; and everything while its first position lies below ``early``.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.tiles import VARYING, find_tile, sequence_rows

# What became of a choice, in the array of states.
ABSENT = tl.constexpr(0)
IN_TILE = tl.constexpr(1)
GATHERED = tl.constexpr(2)


@triton.jit
def larger(a, b):
    """Combine function of a running maximum."""
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=[*VARYING, "num_lists", "num_blocks", "num_keys", "segment_rows", "early"])
def selected_list_kernel(
    indices_ptr, block_ptr, word_ptr, count_ptr, key_ptr, state_ptr, cu_q_ptr, cu_k_ptr, cu_block_ptr, len_q, len_k,
    num_sequences, num_rows, num_lists, num_blocks, num_keys, segment_rows, early,
    HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, PAD_Q: tl.constexpr,
    PAD_N: tl.constexpr,
):  # fmt: skip
    """The list of one tile of ``BLOCK_Q`` queries, and numbers and states of its choices, each where there is a place for it.

    ``count_ptr`` gets, for each tile: blocks wholly in the past of every query, blocks wholly inside the sequence, and all.
    """
    number = tl.program_id(0)
    head = tl.program_id(1)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        SIZE: tl.constexpr = PAD_Q * PAD_N
        e = tl.arange(0, SIZE)
        query = e // PAD_N
        slot = e % PAD_N
        row = tile * BLOCK_Q + query
        ok = (query < BLOCK_Q) & (row < num_q) & (slot < N)
        entry = ((first_q + row).to(tl.int64) * HKV + head) * N + slot
        index = tl.load(indices_ptr + entry, mask=ok, other=-1)
        present = ok & (index >= 0) & (index <= (num_tokens - num_q + row) // BLOCK_SIZE)
        block = tl.where(present, index, 0).to(tl.int32)
        t_first = num_tokens - num_q + tile * BLOCK_Q
        kept = present & ((block == 0) | ((block + 2) * BLOCK_SIZE > t_first) | (t_first < early))
        choice = (head.to(tl.int64) * num_rows + first_q + row) * N + slot
        if state_ptr is not None:
            tl.store(state_ptr + choice, tl.where(kept, IN_TILE, tl.where(present, GATHERED, ABSENT)).to(tl.int8), mask=ok)
        if key_ptr is not None:
            if cu_block_ptr is None:
                first_block = sequence * ((len_k + BLOCK_SIZE - 1) // BLOCK_SIZE)
            else:
                first_block = tl.load(cu_block_ptr + sequence)
            key = ((first_q + row) // segment_rows * HKV + head) * num_blocks + first_block + block
            tl.store(key_ptr + choice, tl.where(present, key, num_keys).to(key_ptr.dtype.element_ty), mask=ok)
        if block_ptr is not None:
            NONE: tl.constexpr = 0x7FFFFFFF // SIZE
            ranked = tl.sort(tl.where(kept, block, NONE) * SIZE + e)
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
            past = tl.sum((last & (block * BLOCK_SIZE + (BLOCK_SIZE - 1) <= t_first)).to(tl.int32), 0)
            inside = tl.sum((last & ((block + 1) * BLOCK_SIZE <= num_tokens)).to(tl.int32), 0)
            at = (head.to(tl.int64) * num_lists + number) * 3
            tl.store(count_ptr + at, past)
            tl.store(count_ptr + at + 1, inside)
            tl.store(count_ptr + at + 2, tl.sum(last.to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_choices"])
def selected_entry_kernel(order_ptr, state_ptr, entry_ptr, num_choices, BLOCK: tl.constexpr):
    """Choices in the order of the index, in the narrow type of ``entry_ptr``; one that is not gathered as its complement."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.load(order_ptr + i, mask=i < num_choices, other=0)
    state = tl.load(state_ptr + choice, mask=i < num_choices, other=0)
    entry = tl.where(state == GATHERED, choice, -1 - choice)
    tl.store(entry_ptr + i, entry.to(entry_ptr.dtype.element_ty), mask=i < num_choices)


@triton.jit(do_not_specialize=["num_keys"])
def selected_chunk_kernel(start_ptr, chunk_start_ptr, part_start_ptr, num_keys, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Chunks before each block (of each segment), and those of them that share their block with others. One program."""
    chunks_before = 0
    parts_before = 0
    for first in tl.range(0, num_keys + 1, BLOCK):
        i = first + tl.arange(0, BLOCK)
        begin = tl.load(start_ptr + i, mask=i < num_keys, other=0)
        end = tl.load(start_ptr + i + 1, mask=i < num_keys, other=0)
        chunks = ((end - begin + (CHUNK - 1)) // CHUNK).to(tl.int32)
        parts = tl.where(chunks > 1, chunks, 0)
        tl.store(chunk_start_ptr + i, chunks_before + tl.cumsum(chunks, 0) - chunks, mask=i <= num_keys)
        tl.store(part_start_ptr + i, parts_before + tl.cumsum(parts, 0) - parts, mask=i <= num_keys)
        chunks_before += tl.sum(chunks, 0)
        parts_before += tl.sum(parts, 0)


@triton.jit(do_not_specialize=["num_keys"])
def selected_chunk_key_kernel(chunk_start_ptr, chunk_key_ptr, num_keys, BLOCK: tl.constexpr):
    """The block (of a segment) that each chunk belongs to."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(chunk_start_ptr + key, mask=key < num_keys, other=0)
    count = tl.load(chunk_start_ptr + key + 1, mask=key < num_keys, other=0) - begin
    for i in tl.range(0, tl.max(count, 0)):
        tl.store(chunk_key_ptr + begin + i, key, mask=i < count)


@triton.jit
def find_chunk(start_ptr, chunk_start_ptr, chunk_key_ptr, number, segment, num_items, CHUNK: tl.constexpr):
    """Where the number-th chunk of a segment lies.

    Whether there is one, its item (block and head), entries of the item before it, its first entry, and how many it has.
    """
    chunk = tl.load(chunk_start_ptr + segment * num_items) + number
    real = chunk < tl.load(chunk_start_ptr + (segment + 1) * num_items)
    key = tl.load(chunk_key_ptr + chunk, mask=real, other=segment * num_items)
    place = (chunk - tl.load(chunk_start_ptr + key)) * CHUNK
    begin = tl.load(start_ptr + key) + place
    count = tl.minimum(tl.load(start_ptr + key + 1) - begin, CHUNK).to(tl.int32)
    return real, key - segment * num_items, place, begin, count


@triton.jit
def load_entries(entry_ptr, index, ok, first_choice):
    """Choices of one head counted from its first, int32, and whether each is gathered."""
    entry = tl.load(entry_ptr + index, mask=ok, other=0)
    choice = tl.where(entry < 0, -1 - entry, entry) - first_choice
    return tl.where(ok, choice, 0).to(tl.int32), entry >= 0
