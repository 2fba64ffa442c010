"""Forward of the gathered algorithm: partial results of remote blocks, and their merge."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import (
    LN_2,
    LOG2_E,
    load_rows,
    load_tile,
    sequence_rows,
    store_rows,
)
from nsa.ops.selected.gathered import (
    SEGMENT,
    find_chunk,
    load_order,
    load_slots,
    local_selections,
    locate_rows,
    slot_rows,
)
from nsa.ops.selected.index_kernels import selections_scatter


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
    """Output ``[G, Dv]`` and lse ``[G]``, base 2, of every (query, slot) whose block is remote.

    Program (i, p) owns part p of the block of the segment's i-th chunk of selections, and loops
    over the rows of the chunk, queries by heads.
    """
    if not selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
        return
    G: tl.constexpr = HEADS.G
    D: tl.constexpr = HEADS.D
    DV: tl.constexpr = HEADS.DV
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    HKV: tl.constexpr = HEADS.HQ // G
    PARTS: tl.constexpr = BLOCKS.SIZE // BLOCK_N
    sequences = (cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences)
    chunk = find_chunk(
        chunks, sequences, num_blocks, segment, segment_rows, chunk_size, HKV, BLOCKS
    )
    head_kv = chunk.head_kv
    order_ptr = chunks[0] + chunk.begin
    local = local_selections(order_ptr, chunk, HKV, BLOCKS)
    if chunk.count > local:
        first_key, num_tokens = sequence_rows(cu_k_ptr, chunk.sequence, len_k)
        part = tl.program_id(1)
        key = chunk.block * BLOCKS.SIZE + part * BLOCK_N + tl.arange(0, BLOCK_N)
        key_ok = key < num_tokens
        key_row = (first_key + key).to(tl.int64)
        # [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_DV]
        k_ptr += head_kv * stride_k[1]
        k = load_rows(k_ptr, key_row, key_ok, stride_k[0], D, BLOCK_D, True)
        v_ptr += head_kv * stride_v[1]
        v = load_rows(v_ptr, key_row, key_ok, stride_v[0], DV, BLOCK_DV, True)
        first_row = segment.to(tl.int64) * segment_rows
        scale = softmax_scale * LOG2_E
        order_ptr += local
        num_rows = (chunk.count - local) * G
        # Selections are loaded a step ahead: a row's number is needed before the row can be. The
        # pipeline's depth is that of the launch: given by the loop, it would take in the loads of
        # selections too, which a step ahead leaves no room for.
        ahead = load_order(order_ptr, 0, num_rows, chunk.first_selection, G, BLOCK_M, True)
        for r in tl.range(0, num_rows, BLOCK_M):
            selection = ahead
            ahead = load_order(
                order_ptr, r + BLOCK_M, num_rows, chunk.first_selection, G, BLOCK_M, True
            )
            rows = locate_rows(selection, r, num_rows, G, HKV * BLOCKS.N, BLOCK_M)
            token = first_row + rows.query
            q_at = token * stride_q[0] + (head_kv * G + rows.head) * stride_q[1]
            q = load_tile(q_ptr, q_at, rows.ok, D, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
            s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
            row_max = tl.max(s, 1) * scale
            p = tl.exp2(s * scale - row_max[:, None])
            total = tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v, input_precision="ieee")  # [BLOCK_M, BLOCK_DV] fp32
            slot = (rows.selection * PARTS + part) * G + rows.head
            store_rows(part_ptr, slot, rows.ok, DV, out * (1.0 / total)[:, None], DV, BLOCK_DV)
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
    """out, and lse ``[T, Hq]``, of a segment: what local blocks gave, merged with the slots.

    Program i owns the i-th ``STEPS`` tiles of ``BLOCK_M`` rows of the segment, queries by heads,
    and adds ``BLOCK_S`` slots at a time.
    """
    HQ: tl.constexpr = HEADS.HQ
    N: tl.constexpr = BLOCKS.N
    DV: tl.constexpr = HEADS.DV
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
        for step in tl.range(0, STEPS, num_stages=1):
            r = (tl.program_id(0) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
            first_row = segment.to(tl.int64) * segment_rows
            row = first_row * HQ + r
            row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HQ
            local_lse = tl.load(lse_ptr + row, mask=row_ok, other=-float("inf")) * LOG2_E
            row_max = tl.maximum(local_lse, -1e30)
            total = tl.exp2(local_lse - row_max)
            out = load_rows(out_ptr, row, row_ok, DV, DV, BLOCK_DV, True)  # [BLOCK_M, BLOCK_DV]
            acc = out.to(tl.float32) * total[:, None]
            for first in tl.range(0, N * PARTS, BLOCK_S):
                part, ok = slot_rows(
                    key_ptr, r, row_ok, first, first_row, absent, HEADS, N, PARTS, BLOCK_S
                )
                lse = tl.load(lse_part_ptr + part, mask=ok, other=-float("inf"))
                new_max = tl.maximum(row_max, tl.max(lse, 1))
                weight = tl.exp2(lse - new_max[:, None])  # [BLOCK_M, BLOCK_S]
                alpha = tl.exp2(row_max - new_max)
                slots = load_slots(part_ptr, part, ok, DV, BLOCK_DV)
                acc = acc * alpha[:, None] + tl.sum(slots * weight[:, :, None], 1)
                total = total * alpha + tl.sum(weight, 1)
                row_max = new_max
            empty = total == 0
            total = tl.where(empty, 1.0, total)
            store_rows(out_ptr, row, row_ok, DV, acc / total[:, None], DV, BLOCK_DV)
            lse = tl.where(empty, -float("inf"), (row_max + tl.log2(total)) * LN_2)
            tl.store(lse_ptr + row, lse, mask=row_ok)
