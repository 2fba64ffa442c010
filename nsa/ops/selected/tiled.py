"""Selected branch, tiled algorithm: a query tile against all blocks that its queries selected.

The loop visits the blocks in the tile's list, see ``_triton/selected_index.py``. The query mask of
a block tells which queries selected it, and the rows of the others are masked: the step does not
change them, so a row's arithmetic does not depend on the selections of its neighbors. Blocks fully
in the past need no causal test; a block that reaches past the sequence is the last of the list and
has a loop of its own.

If selections scatter, most blocks of a list are selected by one query each and are handled by
``gathered.py``. This kernel then handles only a query's *local* blocks, which neighbors share: the
first of its sequence, its own and the one before. All others are *remote*.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.selected_index_kernels import selections_scatter
from nsa.ops._triton.tiles import (
    LOG2_E,
    VARYING,
    Span,
    find_tile,
    load_keys,
    load_rows,
    load_statistics,
    load_tile,
    query_tile,
    sequence_rows,
    softmax_result,
    softmax_start,
    softmax_step,
    store_rows,
)


class TileList(NamedTuple):
    """List of one tile; a *step* is a part of a block with as many keys as a key tile.

    Attributes:
        block_ptr: the blocks, ascending.
        mask_ptr: query mask of each block.
        count_ptr: the counts, see ``Lists``.
        past: number of steps fully in the past of every query.
        inside: number of steps fully inside the sequence.
        end: number of steps.
    """

    block_ptr: Any
    mask_ptr: Any
    count_ptr: Any
    past: Any
    inside: Any
    end: Any


@triton.jit
def find_list(lists, head_kv, number, num_lists, LIST_LEN: tl.constexpr, STEPS: tl.constexpr):
    """List of the number-th tile of a KV head, see ``TileList``; ``STEPS`` steps per block."""
    block_ptr, mask_ptr, count_ptr = lists
    index = head_kv.to(tl.int64) * num_lists + number
    block_ptr += index * LIST_LEN
    mask_ptr += index * LIST_LEN
    count_ptr += index * 4
    past = tl.load(count_ptr) * STEPS
    inside = tl.load(count_ptr + 1) * STEPS
    end = tl.load(count_ptr + 2) * STEPS
    return TileList(block_ptr, mask_ptr, count_ptr, past, inside, end)


@triton.jit
def list_step(tile_list, i, skipped, STEPS: tl.constexpr):
    """Block and query mask of step i of a list.

    They are loaded one step ahead, because a block's index is needed before its keys. The last of
    the ``skipped`` blocks is replaced by the first block.
    """
    at = tl.minimum(i, tile_list.end - 1) // STEPS
    at = tl.where(at < skipped, 0, at)
    return tl.load(tile_list.block_ptr + at), tl.load(tile_list.mask_ptr + at)


@triton.jit
def first_step(tile_list, i, skipped, STEPS: tl.constexpr):
    """First step of a list, see ``list_step``; arbitrary values for an empty list."""
    block, query_mask = 0, 0
    if tile_list.end > 0:
        block, query_mask = list_step(tile_list, i, skipped, STEPS)
    return block, query_mask


@triton.jit
def selects(query_mask, bit):
    """Whether the query of each row selected the block; ``bit`` ``[BLOCK_M]`` is its mask bit."""
    return ((query_mask >> bit) & 1) != 0


@triton.jit
def hide_keys(x, selected, t, n, causal, hidden):
    """``x [BLOCK_M, BLOCK_N]`` with ``hidden`` in rows that are not ``selected``.

    If ``causal``, keys after the query are hidden, too.
    """
    x = tl.where(selected[:, None], x, hidden)
    if causal:
        x = tl.where((n + tl.arange(0, x.shape[1]))[None, :] <= t[:, None], x, hidden)
    return x


@kernel(do_not_specialize=[*VARYING, "num_lists"])
def selected_fwd_kernel(
    q_ptr,
    k_source,
    v_source,
    out_ptr,
    lse_ptr,
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
    softmax_scale,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LIST_LEN: tl.constexpr,
):
    """Write out ``[T, Hq, Dv]`` and lse ``[T, Hq]``; over local blocks only if selections scatter.

    Program (i, h) computes the i-th tile of ``ROWS`` rows from the end (queries by query heads of
    KV head h), in a loop over the blocks of its list, at most ``LIST_LEN``.
    """
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    BLOCK_SIZE: tl.constexpr = BLOCKS.SIZE
    STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head_kv = tl.program_id(1)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, ROWS, HEADS.G)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        keys = Span(head_kv, first_key, num_tokens)
        rows = query_tile(tile, head_kv, first_q, num_q, num_tokens, HEADS.G, ROWS, BLOCK_M)
        q_at = rows.token * stride_q[0] + rows.head * stride_q[1]
        q = load_tile(q_ptr, q_at, rows.ok, HEADS.D, HEADS.BLOCK_D)  # [BLOCK_M, BLOCK_D]
        row_max, total, acc = softmax_start(BLOCK_M, HEADS.BLOCK_DV)
        scale = softmax_scale * LOG2_E
        tile_list = find_list(lists, head_kv, number, num_lists, LIST_LEN, STEPS)
        begin, skipped, local = 0, 0, None
        if tile_stats_ptr is not None:
            local = tl.zeros([BLOCK_M], tl.int32)  # first key of the last two local blocks
            if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
                local = (rows.t // BLOCK_SIZE - 1) * BLOCK_SIZE
                skipped = tl.load(tile_list.count_ptr + 3)
                begin = skipped * STEPS
                if skipped > 0:  # noqa: SIM102 (the list may be empty)
                    if tl.load(tile_list.block_ptr) == 0:
                        begin -= STEPS
        next_block, next_mask = first_step(tile_list, begin, skipped, STEPS)
        # Steps inside the sequence, and steps of the block that reaches past it.
        bounds = (begin, tile_list.inside, tile_list.end)
        for past_end in tl.static_range(2):
            for i in tl.range(
                bounds[past_end], bounds[past_end + 1], num_stages=1 if past_end else TILE.stages
            ):
                n, query_mask = next_block * BLOCK_SIZE + i % STEPS * BLOCK_N, next_mask
                next_block, next_mask = list_step(tile_list, i + 1, skipped, STEPS)
                # Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV].
                k = load_keys(
                    k_source, keys, n, stride_k, HEADS.D, HEADS.BLOCK_D, BLOCK_N, past_end, TILE.tma
                )
                v = load_keys(
                    v_source,
                    keys,
                    n,
                    stride_v,
                    HEADS.DV,
                    HEADS.BLOCK_DV,
                    BLOCK_N,
                    past_end,
                    TILE.tma,
                )
                s = tl.dot(q, tl.trans(k), input_precision="ieee")  # scores [BLOCK_M, BLOCK_N] fp32
                selected = selects(query_mask, rows.bit)
                if local is not None:
                    selected = selected & ((n >= local) | (n < BLOCK_SIZE))
                causal = True if past_end else i >= tile_list.past
                s = hide_keys(s, selected, rows.t, n, causal, -float("inf"))
                row_max, total, acc = softmax_step(s, v, row_max, total, acc, scale)
        # Normalize and store.
        out, lse = softmax_result(row_max, total, acc)
        out_row = rows.token * HEADS.HQ + rows.head
        store_rows(out_ptr, out_row, rows.ok, out, HEADS.DV)
        tl.store(lse_ptr + out_row, lse, mask=rows.ok)


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
    """Write dQ ``[T, Hq, D]``, accumulated if ``ADD``; does nothing if selections scatter.

    Programs compute the tiles of the forward. It also writes delta and, with gates, the gated lse,
    ``[T, Hq]`` each, for later kernels; see ``load_statistics``.
    """
    if tile_stats_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
            return
    D: tl.constexpr = HEADS.D
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
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
        dout = load_tile(
            dout_ptr, dout_at, rows.ok, HEADS.DV, HEADS.BLOCK_DV
        )  # [BLOCK_M, BLOCK_DV]
        delta, lse = load_statistics(
            out_ptr,
            lse_ptr + out_row,
            delta_ptr,
            gated,
            dout,
            out_row,
            out_row,
            rows.ok,
            1,
            HEADS.DV,
            HEADS.BLOCK_DV,
        )
        q = load_tile(q_ptr, q_at, rows.ok, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
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
                # Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV].
                k = load_keys(k_source, keys, n, stride_k, D, BLOCK_D, BLOCK_N, past_end, TILE.tma)
                v = load_keys(
                    v_source,
                    keys,
                    n,
                    stride_v,
                    HEADS.DV,
                    HEADS.BLOCK_DV,
                    BLOCK_N,
                    past_end,
                    TILE.tma,
                )
                s = tl.dot(q, tl.trans(k), input_precision="ieee")  # scores [BLOCK_M, BLOCK_N] fp32
                dp = tl.dot(dout, tl.trans(v), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
                # Probabilities, recomputed from lse.
                p = tl.exp2(s * scale - lse[:, None])
                causal = True if past_end else i >= tile_list.past
                p = hide_keys(p, selects(query_mask, rows.bit), rows.t, n, causal, 0.0)
                ds = (p * (dp - delta[:, None])).to(k.dtype)
                dq = tl.dot(ds, k, dq, input_precision="ieee")
        dq *= softmax_scale
        if ADD:
            dq += load_rows(dq_ptr, out_row, rows.ok, D, D, BLOCK_D).to(tl.float32)
        store_rows(dq_ptr, out_row, rows.ok, dq, D)


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
    """Write the outputs of ``selected_dq_kernel`` other than dQ, if selections scatter.

    Each program handles every num_programs-th tile of ``BLOCK_R`` rows (queries by heads).
    """
    if not selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
        return
    num_q = len_q * num_sequences if cu_q_ptr is None else tl.load(cu_q_ptr + num_sequences)
    num_tiles = tl.cdiv(num_q.to(tl.int64) * HEADS.HQ, BLOCK_R)
    for tile in tl.range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        r = tile * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
        token = r // HEADS.HQ
        head = (r % HEADS.HQ).to(tl.int32)
        ok = token < num_q
        dout_at = token * stride_do[0] + head * stride_do[1]
        dout = load_tile(dout_ptr, dout_at, ok, HEADS.DV, HEADS.BLOCK_DV)  # [BLOCK_R, BLOCK_DV]
        load_statistics(
            out_ptr, lse_ptr + r, delta_ptr, gated, dout, r, r, ok, 1, HEADS.DV, HEADS.BLOCK_DV
        )
