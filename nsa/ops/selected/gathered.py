"""Selected branch, gathered: a block of keys against the queries that selected it.

Where neighbouring queries select different blocks, a tile of them works mostly on masked rows. Here
the rows of a program are the queries that selected one block, by heads, wherever they lie, so no
row is masked. dK and dV of both algorithms are made so. What a query gets from each of its blocks
(output and lse, or dQ) is a *partial result*, a row for each (query, slot), and another kernel
merges the slots of a query, segment by segment (``index.py``), so that they need little memory. No
atomics: the same bits in every run. What is written for a row follows from its query and its block
alone, and a merge reads the slots of one query in their order: the selections of other queries move
a row to another place, where its arithmetic is the same.

A block that is too large to be held at once is cut into ``PARTS`` of ``BLOCK_N`` keys, each with
partial results of its own. Kernels that are given ``tile_stats_ptr`` do their share of the gathered
algorithm only where selections scatter (``selections_scatter``).
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.tiles import (
    VARYING,
    find_tile,
    load_column,
    sequence_rows,
)

SEGMENT = [
    *VARYING,
    "num_blocks",
    "segment",
    "segment_rows",
    "chunk_size",
    "last_segment",
    "absent",
]


class Chunk(NamedTuple):
    """The chunk of one program, see ``Chunks``.

    Attributes:
        begin: where its selections begin in the order of the index.
        count: how many there are; 0: no chunk is left for this program.
        first_selection: the first selection of the segment.
        head_kv, sequence, block: its block: head, sequence, number inside the sequence.
        t: position of its first query.
        alone: whether it is the only chunk of its key block in the segment.
        key_block: its key block.
    """

    begin: Any
    count: Any
    first_selection: Any
    head_kv: Any
    sequence: Any
    block: Any
    t: Any
    alone: Any
    key_block: Any


class GatheredRows(NamedTuple):
    """Rows of a chunk, a query and head each, ``[BLOCK_M]``.

    Attributes:
        selection: counted from the first one of the segment.
        query: the same.
        head: query head inside the group.
        ok: whether there is such a row.
    """

    selection: Any
    query: Any
    head: Any
    ok: Any


@triton.jit
def find_chunk(
    chunks,
    sequences,
    num_blocks,
    segment,
    segment_rows,
    chunk_size,
    HKV: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The chunk of this program, see ``Chunk``."""
    order_ptr, begin_ptr, length_ptr, owner_ptr, start_ptr = chunks
    cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences = sequences
    key_blocks = HKV * num_blocks
    chunk = tl.load(start_ptr + segment * key_blocks) + tl.program_id(0)
    count = 0
    begin = 0
    head_kv = 0
    sequence = 0
    block = 0
    t = 0
    alone = False
    key_block = 0
    first_selection = segment.to(tl.int64) * segment_rows * (HKV * BLOCKS.N)
    if chunk < tl.load(start_ptr + (segment + 1) * key_blocks):
        owner = tl.load(owner_ptr + chunk)
        place = (chunk - tl.load(start_ptr + owner)) * chunk_size
        begin = tl.load(begin_ptr + owner) + place
        length = tl.load(length_ptr + owner)
        count = tl.minimum(length - place, chunk_size)
        alone = length <= chunk_size
        key_block = owner % key_blocks
        head_kv = key_block // num_blocks
        sequence, block = find_tile(
            cu_k_ptr, key_block % num_blocks, num_sequences, len_k, BLOCKS.SIZE
        )
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        query = (tl.load(order_ptr + begin) // (HKV * BLOCKS.N)).to(tl.int32)
        t = num_tokens - num_q - first_q + query
    return Chunk(begin, count, first_selection, head_kv, sequence, block, t, alone, key_block)


@triton.jit
def local_selections(order_ptr, chunk, HKV: tl.constexpr, BLOCKS: tl.constexpr):
    """How many of a chunk's selections, the first ones, are of queries to which its block is local.

    See ``tiled_fwd.py``; the order begins at that of the chunk.
    """
    local = 0
    if chunk.block == 0:
        local = chunk.count
    elif chunk.t < (chunk.block + 2) * BLOCKS.SIZE:
        # Queries come in order, one at a position.
        index = tl.arange(0, 2 * BLOCKS.SIZE)
        inside = index < chunk.count
        query = tl.load(order_ptr + index, mask=inside, other=0) // (HKV * BLOCKS.N)
        later = (query - tl.load(order_ptr) // (HKV * BLOCKS.N)).to(tl.int32)
        near = inside & (chunk.t + later < (chunk.block + 2) * BLOCKS.SIZE)
        local = tl.sum(near.to(tl.int32), 0)
    return local


@triton.jit
def load_vector(pointers, mask, other, SPLIT: tl.constexpr):
    """As a column, see ``load_column``; in ``SPLIT`` loops as it comes, which is faster there."""
    if SPLIT:
        return tl.load(pointers, mask=mask, other=other)
    else:
        return load_column(pointers, mask, other)


@triton.jit
def load_order(
    order_ptr, r, num_rows, first, G: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr
):
    """Selections of the rows ``r .. r + BLOCK_M`` of a chunk, counted from ``first``."""
    index = r + tl.arange(0, BLOCK_M)
    selection = load_vector(order_ptr + index // G, index < num_rows, 0, SPLIT)
    return selection - first.to(order_ptr.dtype.element_ty)


@triton.jit
def locate_rows(
    selection, r, num_rows, G: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """What the rows ``r .. r + BLOCK_M`` of a chunk are; a query has ``SLOTS`` in all KV heads."""
    index = r + tl.arange(0, BLOCK_M)
    query = (selection // SLOTS).to(tl.int32)
    return GatheredRows(selection.to(tl.int32), query, index % G, index < num_rows)


@triton.jit
def slot_rows(
    key_ptr,
    r,
    row_ok,
    first,
    first_row,
    absent,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Slots ``first .. first + BLOCK_S`` of rows, queries by heads.

    Returns:
        Their partial results ``[M, BLOCK_S]``, and whether there are such.
    """
    G: tl.constexpr = HEADS.G
    HKV: tl.constexpr = HEADS.HQ // G
    head = r % HEADS.HQ
    slot = first + tl.arange(0, BLOCK_S)
    selection = (r // HEADS.HQ * HKV + head // G)[:, None] * N + (slot // PARTS)[None, :]
    ok = row_ok[:, None] & (slot < N * PARTS)[None, :]
    key = tl.load(key_ptr + first_row * (HKV * N) + selection, mask=ok, other=absent)
    ok = ok & (key < absent)
    return (selection * PARTS + (slot % PARTS)[None, :]) * G + (head % G)[:, None], ok


@triton.jit
def load_slots(part_ptr, part, ok, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[M, S, BLOCK_D]`` fp32. One load: slot by slot it would need far more registers."""
    d = tl.arange(0, BLOCK_D)
    pointers = part_ptr + part.to(tl.int64)[:, :, None] * D + d[None, None, :]
    mask = ok[:, :, None] & (d < D)[None, None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
