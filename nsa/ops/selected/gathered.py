"""Selected branch, gathered algorithm: a block of keys against the queries that selected it.

If neighboring queries select different blocks, a tile of them works mostly on masked rows. Here
the rows of a program are the queries that selected one block, by heads, gathered from anywhere in
the sequence, so no row is masked. dK and dV of both algorithms are computed this way. The
contribution of one block to a query (output and lse, or dQ) is a *partial result*, one row per
(query, slot). Another kernel merges the slots of each query, segment by segment
(``_triton/selected_index.py``) to limit memory. There are no atomics, so results are bitwise
reproducible. A partial result depends only on its query and block, and the slots of a query are
merged in order: the selections of other queries only change where a row is computed, not its
arithmetic.

A block that is too large for one tile is split into ``PARTS`` of ``BLOCK_N`` keys, each with its
own partial results. Kernels with ``tile_stats_ptr`` do their part of the gathered algorithm only if
selections scatter (``selections_scatter``).
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.gathered_rows import SEGMENT, find_chunk, load_order, locate_rows
from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.selected_index_kernels import selections_scatter
from nsa.ops._triton.tiles import (
    LN_2,
    LOG2_E,
    load_rows,
    load_tile,
    sequence_rows,
    store_rows,
)


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
    """Slots ``first .. first + BLOCK_S`` of rows (queries by heads).

    Returns:
        Indices of their partial results ``[M, BLOCK_S]``, and a mask of those that exist.
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
    """Load ``[M, S, BLOCK_D]`` fp32 at once; slot by slot it would need far more registers."""
    d = tl.arange(0, BLOCK_D)
    pointers = part_ptr + part.to(tl.int64)[:, :, None] * D + d[None, None, :]
    mask = ok[:, :, None] & (d < D)[None, None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@kernel(do_not_specialize=SEGMENT)
def selected_gather_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    lse_part_ptr,
    tile_stats_ptr,
    chunks,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_blocks,
    segment,
    segment_rows,
    chunk_size,
    stride_q,
    stride_k,
    stride_v,
    softmax_scale,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Output ``[G, Dv]`` and lse ``[G]``, base 2, for every (query, slot) with a remote block.

    Program (i, p) handles part p of the block of the segment's i-th chunk of selections, in a loop
    over the rows of the chunk (queries by heads).
    """
    if not selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
        return
    G: tl.constexpr = HEADS.G
    BLOCK_M: tl.constexpr = TILE.rows
    HKV: tl.constexpr = HEADS.HQ // G
    PARTS: tl.constexpr = BLOCKS.SIZE // TILE.keys
    sequences = (cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences)
    chunk = find_chunk(
        chunks, sequences, num_blocks, segment, segment_rows, chunk_size, HKV, BLOCKS
    )
    head_kv = chunk.head_kv
    order_ptr = chunks[0] + chunk.begin
    # Leading selections whose queries treat the block as local, see ``tiled.py``.
    local = 0
    if chunk.block == 0:
        local = chunk.count
    elif chunk.t < (chunk.block + 2) * BLOCKS.SIZE:
        # Queries are ordered, one per position.
        index = tl.arange(0, 2 * BLOCKS.SIZE)
        inside = index < chunk.count
        query = tl.load(order_ptr + index, mask=inside, other=0) // (HKV * BLOCKS.N)
        later = (query - tl.load(order_ptr) // (HKV * BLOCKS.N)).to(tl.int32)
        near = inside & (chunk.t + later < (chunk.block + 2) * BLOCKS.SIZE)
        local = tl.sum(near.to(tl.int32), 0)
    if chunk.count > local:
        first_key, num_tokens = sequence_rows(cu_k_ptr, chunk.sequence, len_k)
        part = tl.program_id(1)
        key = chunk.block * BLOCKS.SIZE + part * TILE.keys + tl.arange(0, TILE.keys)
        key_ok = key < num_tokens
        key_row = (first_key + key).to(tl.int64)
        # Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV].
        k_ptr += head_kv * stride_k[1]
        k = load_rows(k_ptr, key_row, key_ok, stride_k[0], HEADS.D, HEADS.BLOCK_D)
        v_ptr += head_kv * stride_v[1]
        v = load_rows(v_ptr, key_row, key_ok, stride_v[0], HEADS.DV, HEADS.BLOCK_DV)
        first_row = segment.to(tl.int64) * segment_rows
        scale = softmax_scale * LOG2_E
        order_ptr += local
        num_rows = (chunk.count - local) * G
        # Selections are loaded one step ahead, because row indices are needed before the rows.
        # The pipeline depth comes from the launch options: a depth set on the loop would also
        # pipeline the loads of selections, which are already one step ahead.
        ahead = load_order(order_ptr, 0, num_rows, chunk.first_selection, G, BLOCK_M, True)
        for r in tl.range(0, num_rows, BLOCK_M):
            selection = ahead
            ahead = load_order(
                order_ptr, r + BLOCK_M, num_rows, chunk.first_selection, G, BLOCK_M, True
            )
            rows = locate_rows(selection, r, num_rows, G, HKV * BLOCKS.N, BLOCK_M)
            token = first_row + rows.query
            q_at = token * stride_q[0] + (head_kv * G + rows.head) * stride_q[1]
            q = load_tile(q_ptr, q_at, rows.ok, HEADS.D, HEADS.BLOCK_D)  # [BLOCK_M, BLOCK_D]
            s = tl.dot(q, tl.trans(k), input_precision="ieee")  # scores [BLOCK_M, BLOCK_N] fp32
            row_max = tl.max(s, 1) * scale
            p = tl.exp2(s * scale - row_max[:, None])
            total = tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v, input_precision="ieee")  # [BLOCK_M, BLOCK_DV] fp32
            slot = (rows.selection * PARTS + part) * G + rows.head
            store_rows(part_ptr, slot, rows.ok, out * (1.0 / total)[:, None], HEADS.DV)
            tl.store(lse_part_ptr + slot, row_max + tl.log2(total), mask=rows.ok)


@kernel(do_not_specialize=SEGMENT)
def selected_merge_out_kernel(
    part_ptr,
    lse_part_ptr,
    key_ptr,
    out_ptr,
    lse_ptr,
    tile_stats_ptr,
    num_rows,
    segment,
    segment_rows,
    absent,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STEPS: tl.constexpr,
):
    """out and lse ``[T, Hq]`` of a segment: results of local blocks merged with the slots.

    Program i handles the i-th ``STEPS`` tiles of ``BLOCK_M`` rows of the segment (queries by
    heads), and merges ``BLOCK_S`` slots at a time.
    """
    DV: tl.constexpr = HEADS.DV
    if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
        for step in tl.range(0, STEPS, num_stages=1):
            r = (tl.program_id(0) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
            first_row = segment.to(tl.int64) * segment_rows
            row = first_row * HEADS.HQ + r
            row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HEADS.HQ
            local_lse = tl.load(lse_ptr + row, mask=row_ok, other=-float("inf")) * LOG2_E
            row_max = tl.maximum(local_lse, -1e30)
            total = tl.exp2(local_lse - row_max)
            out = load_rows(out_ptr, row, row_ok, DV, DV, HEADS.BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
            acc = out.to(tl.float32) * total[:, None]
            for first in tl.range(0, BLOCKS.N * PARTS, BLOCK_S):
                part, ok = slot_rows(
                    key_ptr, r, row_ok, first, first_row, absent, HEADS, BLOCKS.N, PARTS, BLOCK_S
                )
                lse = tl.load(lse_part_ptr + part, mask=ok, other=-float("inf"))
                new_max = tl.maximum(row_max, tl.max(lse, 1))
                weight = tl.exp2(lse - new_max[:, None])  # [BLOCK_M, BLOCK_S]
                alpha = tl.exp2(row_max - new_max)
                slots = load_slots(part_ptr, part, ok, DV, HEADS.BLOCK_DV)
                acc = acc * alpha[:, None] + tl.sum(slots * weight[:, :, None], 1)
                total = total * alpha + tl.sum(weight, 1)
                row_max = new_max
            empty = total == 0
            total = tl.where(empty, 1.0, total)
            store_rows(out_ptr, row, row_ok, acc / total[:, None], DV)
            lse = tl.where(empty, -float("inf"), (row_max + tl.log2(total)) * LN_2)
            tl.store(lse_ptr + row, lse, mask=row_ok)
