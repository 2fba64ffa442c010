"""Device functions of kernels whose rows are the queries that selected one block, by heads.

Each program handles one chunk of the selections of a key block, see ``selected_index.py``.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.tiles import VARYING, find_tile, load_column, sequence_rows

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
    """Chunk of one program, see ``Chunks``.

    Attributes:
        begin: index of its first selection in the order of the index.
        count: number of selections; 0 if there is no chunk for this program.
        first_selection: first selection of the segment.
        head_kv, sequence, block: head, sequence, and index in the sequence of its key block.
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
    """Rows of a chunk, one per query and head, ``[BLOCK_M]``.

    Attributes:
        selection: selection index relative to the first one of the segment.
        query: query index relative to the first one of the segment.
        head: query head inside the group.
        ok: whether the row exists.
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
    """Find the chunk of this program, see ``Chunk``."""
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
def load_vector(pointers, mask, other, SPLIT: tl.constexpr):
    """Load in a column layout, see ``load_column``; ``SPLIT`` loops load directly (faster)."""
    if SPLIT:
        return tl.load(pointers, mask=mask, other=other)
    else:
        return load_column(pointers, mask, other)


@triton.jit
def load_order(
    order_ptr, r, num_rows, first, G: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr
):
    """Selections of the rows ``r .. r + BLOCK_M`` of a chunk, relative to ``first``."""
    index = r + tl.arange(0, BLOCK_M)
    selection = load_vector(order_ptr + index // G, index < num_rows, 0, SPLIT)
    return selection - first.to(order_ptr.dtype.element_ty)


@triton.jit
def locate_rows(
    selection, r, num_rows, G: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Rows ``r .. r + BLOCK_M`` of a chunk; a query has ``SLOTS`` slots over all KV heads."""
    index = r + tl.arange(0, BLOCK_M)
    query = (selection // SLOTS).to(tl.int32)
    return GatheredRows(selection.to(tl.int32), query, index % G, index < num_rows)
