"""Selected branch: dQ of a tile of queries over the blocks of its list; see ``tiled_fwd.py``.

dK and dV: see ``gathered.py``.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.range_attention import load_keys
from nsa.ops._triton.tiles import (
    LOG2_E,
    VARYING,
    Span,
    find_tile,
    load_rows,
    load_statistics,
    load_tile,
    query_tile,
    sequence_rows,
    store_rows,
)
from nsa.ops.selected.index_kernels import selections_scatter
from nsa.ops.selected.tiled_fwd import find_list, first_step, hide_keys, list_step, selects


@kernel(do_not_specialize=[*VARYING, "num_lists"])
def selected_dq_kernel(
    q_ptr,
    k_source,
    v_source,
    out_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    gated,
    lists,
    tile_stats_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_lists,
    stride_q,
    stride_k,
    stride_v,
    stride_do,
    softmax_scale,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LIST_LEN: tl.constexpr,
    ADD: tl.constexpr,
):
    """dQ ``[T, Hq, D]``, added to what is there if ``ADD``; nothing where selections scatter.

    Programs own the tiles of the forward. Writes what the kernels after it read, ``[T, Hq]`` each:
    delta and, with gates, the gated lse, see ``load_statistics``.
    """
    if tile_stats_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
            return
    D: tl.constexpr = HEADS.D
    DV: tl.constexpr = HEADS.DV
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    TMA: tl.constexpr = TILE.tma
    STEPS: tl.constexpr = BLOCKS.SIZE // BLOCK_N
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head_kv = tl.program_id(1)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, ROWS, HEADS.G)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        keys = Span(head_kv, first_key, num_tokens)
        rows = query_tile(tile, head_kv, first_q, num_q, num_tokens, HEADS.G, ROWS, BLOCK_M)
        q_at = rows.token * stride_q[0] + rows.head * stride_q[1]
        dout_at = rows.token * stride_do[0] + rows.head * stride_do[1]
        out_row = rows.token * HEADS.HQ + rows.head
        dout = load_tile(dout_ptr, dout_at, rows.ok, DV, BLOCK_DV, True)  # [BLOCK_M, BLOCK_DV]
        delta, lse = load_statistics(
            out_ptr, lse_ptr, delta_ptr, gated, dout, out_row, out_row, rows.ok, 1, DV, BLOCK_DV
        )
        q = load_tile(q_ptr, q_at, rows.ok, D, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        scale = softmax_scale * LOG2_E
        tile_list = find_list(lists, head_kv, number, num_lists, LIST_LEN, STEPS)
        next_block, next_mask = first_step(tile_list, 0, 0, STEPS)
        bounds = (0, tile_list.inside, tile_list.end)
        for past_end in tl.static_range(2):
            for i in tl.range(
                bounds[past_end], bounds[past_end + 1], num_stages=1 if past_end else TILE.stages
            ):
                n, query_mask = next_block * BLOCKS.SIZE + i % STEPS * BLOCK_N, next_mask
                next_block, next_mask = list_step(tile_list, i + 1, 0, STEPS)
                # [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_DV]
                k = load_keys(k_source, keys, n, stride_k, D, BLOCK_D, BLOCK_N, past_end, TMA)
                v = load_keys(v_source, keys, n, stride_v, DV, BLOCK_DV, BLOCK_N, past_end, TMA)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
                dp = tl.dot(dout, tl.trans(v), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
                p = tl.exp2(s * scale - lse[:, None])
                causal = True if past_end else i >= tile_list.past
                p = hide_keys(p, selects(query_mask, rows.bit), rows.t, n, causal, 0.0)
                ds = (p * (dp - delta[:, None])).to(k.dtype)
                dq = tl.dot(ds, k, dq, input_precision="ieee")
        dq *= softmax_scale
        if ADD:
            dq += load_rows(dq_ptr, out_row, rows.ok, D, D, BLOCK_D, True).to(tl.float32)
        store_rows(dq_ptr, out_row, rows.ok, D, dq, D, BLOCK_D)


@kernel(do_not_specialize=VARYING)
def selected_delta_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    gated,
    tile_stats_ptr,
    cu_q_ptr,
    len_q,
    num_sequences,
    stride_do,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """What ``selected_dq_kernel`` writes besides dQ, where selections scatter.

    Each program takes every num_programs-th tile of ``BLOCK_R`` rows, queries by heads.
    """
    if not selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
        return
    DV: tl.constexpr = HEADS.DV
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    num_q = len_q * num_sequences if cu_q_ptr is None else tl.load(cu_q_ptr + num_sequences)
    num_tiles = tl.cdiv(num_q.to(tl.int64) * HEADS.HQ, BLOCK_R)
    for tile in tl.range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        r = tile * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
        token = r // HEADS.HQ
        head = (r % HEADS.HQ).to(tl.int32)
        ok = token < num_q
        dout_at = token * stride_do[0] + head * stride_do[1]
        dout = load_tile(dout_ptr, dout_at, ok, DV, BLOCK_DV, True)  # [BLOCK_R, BLOCK_DV]
        load_statistics(out_ptr, lse_ptr, delta_ptr, gated, dout, r, r, ok, 1, DV, BLOCK_DV)
