"""Backward of selected branch and window in one pass, if both have the same keys and values.

Scores s = q . k and dp = dout . v are then equal in both branches; masks, lse and delta differ:

    p  = m_slc exp(s - lse_slc) + m_win exp(s - lse_win)
    ds = m_slc exp(s - lse_slc) (dp - delta_slc) + m_win exp(s - lse_win) (dp - delta_win)

So dQ, dK and dV take five products over the union of both branches instead of ten, and the keys of
a block need no list of the queries that selected it: one bit of a word per query tells.

In a tile whose keys are all in the window of all its queries, or in that of none, m is the same for
all keys of a query, and one exponential serves both branches: relative to the smaller lse of the
branches that see the keys, the powers of the other are a constant factor of at most 1. A tile at
the far edge of the window is visited twice, once for each branch.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops._layout import Gated, cdiv, rows
from nsa.ops._operator import Call, KeyRange
from nsa.ops._plan import once
from nsa.ops._triton.kernel import Launch, fitting, kernel, source
from nsa.ops._triton.selected_index import make_lists, word_of
from nsa.ops._triton.tiles import (
    LOG2_E,
    VARYING,
    Span,
    find_tile,
    key_gradient,
    load_keys,
    load_rows,
    load_statistics,
    load_tile,
    of_keys,
    of_queries,
    products,
    query_tile,
    sequence_rows,
    store_rows,
)
from nsa.ops.range.launch import KeyPlan, key_plan
from nsa.ops.range.types import RangeInputs, RangeResults
from nsa.ops.selected.launch import constants_of, fitted, over_lists, tile_named
from nsa.ops.selected.tiled import find_list, first_step, list_step, selects
from nsa.ops.selected.types import SelectedInputs, SelectedResults

# Programs of dK and dV from which on queries are not split into chunks, and fewest queries of one.
PROGRAMS, CHUNK_ROWS = 1024, 256


@triton.jit
def of_both(lse_slc, delta_slc, lse_win, delta_win):
    """Statistics of queries, and those of keys in both branches: lse, factor and delta.

    All are vectors; lse is in base 2. An lse of inf belongs to a branch whose gate is closed.
    """
    lse = tl.minimum(lse_slc, lse_win)
    slc = tl.where(lse_slc == float("inf"), 0.0, tl.exp2(lse - lse_slc))
    win = tl.where(lse_win == float("inf"), 0.0, tl.exp2(lse - lse_win))
    delta = slc * delta_slc + win * delta_win
    return lse_slc, delta_slc, lse_win, delta_win, lse, slc + win, delta


@triton.jit
def is_seen(back, size, win):
    """Whether a query sees a key that is ``back`` before it, in the window if ``win``."""
    return back.to(tl.uint32, bitcast=True) < tl.where(win, size, 0x7FFFFFFF).to(tl.uint32)


@triton.jit
def rows_of(statistics, selected, slc, win):
    """lse, factor and delta of queries for a tile that the given branches see."""
    lse_slc, delta_slc, lse_win, delta_win, lse, factor, delta = statistics
    lse_win = tl.where(win, lse_win, float("inf"))
    selected = selected & slc
    lse = tl.where(selected, tl.where(win, lse, lse_slc), lse_win)
    delta = tl.where(selected, tl.where(win, delta, delta_slc), delta_win)
    return lse, tl.where(selected & win, factor, 1.0), delta


@kernel(do_not_specialize=[*VARYING, "num_lists"])
def selected_range_dq_kernel(
    q_ptr,
    k_source,
    v_source,
    dout_ptr,
    of_slc,
    of_win,
    gated,
    dq_ptr,
    lists,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_lists,
    num_rows,
    stride_q,
    stride_k,
    stride_v,
    stride_do,
    softmax_scale,
    size,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LIST_LEN: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write dQ ``[T, Hq, D]``, accumulated if ``ADD``, and the gradients of both gates.

    Programs compute the tiles of ``selected_dq_kernel`` over lists of both branches. ``of_slc``
    and ``of_win`` are out and lse of the branches, ``gated`` the gates, their gradients, and an
    output ``[4, Hq, T]`` fp32: gated lse and delta of the selected branch, and those of the window.
    """
    D: tl.constexpr = HEADS.D
    DV: tl.constexpr = HEADS.DV
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
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
        dout_at = rows.token * stride_do[0] + rows.head * stride_do[1]
        out_row = rows.token * HEADS.HQ + rows.head
        at = rows.head.to(tl.int64) * num_rows + rows.token
        dout = load_tile(dout_ptr, dout_at, rows.ok, DV, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
        plane = num_rows.to(tl.int64) * HEADS.HQ
        of_rows = (dout, out_row, at, rows.ok)
        gates_ptr, dgates_ptr, statistics_ptr = gated
        out_ptr, lse_ptr = of_slc
        delta_slc, lse_slc = load_statistics(
            out_ptr, lse_ptr + out_row, statistics_ptr + plane, gated, *of_rows, 1, DV, BLOCK_DV
        )
        statistics_ptr += 2 * plane
        gated = (gates_ptr, dgates_ptr, statistics_ptr)
        out_ptr, lse_ptr = of_win
        delta_win, lse_win = load_statistics(
            out_ptr, lse_ptr + at, statistics_ptr + plane, gated, *of_rows, 2, DV, BLOCK_DV
        )
        statistics = of_both(lse_slc, delta_slc, lse_win, delta_win)
        q = load_tile(q_ptr, q_at, rows.ok, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        scale = softmax_scale * LOG2_E
        tile_list = find_list(lists, head_kv, number, num_lists, LIST_LEN, STEPS)
        # Steps at the lower edge of the window, by the first and the last query. Each is visited
        # twice: for the selected branch, and after all other steps for the window.
        shift = tile_list.end - (rows.t_last // BLOCK_SIZE + 1) * STEPS  # of the first block
        edge = shift + tl.maximum(rows.t_first - size + 1, 0) // BLOCK_N
        edge_end = shift + tl.maximum(rows.t_last - size + BLOCK_N, 0) // BLOCK_N
        bounds = (0, tile_list.inside, tile_list.end)
        for past_end in tl.static_range(2):
            begin, end = bounds[past_end], bounds[past_end + 1]
            again = tl.minimum(tl.maximum(edge, begin), end)
            visits = end + tl.minimum(tl.maximum(edge_end, begin), end) - again
            next_block, next_mask = first_step(tile_list, begin, 0, STEPS)
            for i in tl.range(begin, visits, num_stages=1 if past_end else TILE.stages):
                step = tl.where(i < end, i, again + i - end)
                n, query_mask = next_block * BLOCK_SIZE + step % STEPS * BLOCK_N, next_mask
                next_step = tl.where(i + 1 < end, i + 1, again + i + 1 - end)
                next_block, next_mask = list_step(tile_list, next_step, 0, STEPS)
                # Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV].
                k = load_keys(k_source, keys, n, stride_k, D, BLOCK_D, BLOCK_N, past_end, TILE.tma)
                v = load_keys(
                    v_source, keys, n, stride_v, DV, BLOCK_DV, BLOCK_N, past_end, TILE.tma
                )
                s = tl.dot(q, tl.trans(k), input_precision="ieee")  # scores [BLOCK_M, BLOCK_N] fp32
                dp = tl.dot(dout, tl.trans(v), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
                win = (i >= end) | (step >= edge_end)
                selected = selects(query_mask, rows.bit)
                lse, factor, delta = rows_of(statistics, selected, i < end, win)
                # Probabilities, recomputed from lse.
                p = tl.exp2(s * scale - lse[:, None])
                if (i >= end) | (n + BLOCK_N - 1 > rows.t_first):
                    back = rows.t[:, None] - (n + tl.arange(0, BLOCK_N))[None, :]
                    p = tl.where(is_seen(back, size, win), p, 0.0)
                ds = (p * (dp * factor[:, None] - delta[:, None])).to(k.dtype)
                dq = tl.dot(ds, k, dq, input_precision="ieee")
        dq *= softmax_scale
        if ADD:
            dq += load_rows(dq_ptr, out_row, rows.ok, D, D, BLOCK_D).to(tl.float32)
        store_rows(dq_ptr, out_row, rows.ok, dq, D)


@kernel(do_not_specialize=VARYING)
def selected_range_dkv_kernel(
    q_source,
    k_ptr,
    v_ptr,
    dout_source,
    words_ptr,
    statistics_ptr,
    dk_ptr,
    dv_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_rows,
    chunk_rows,
    num_rows_key,
    stride_q,
    stride_k,
    stride_v,
    stride_do,
    softmax_scale,
    size,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """dK and dV: final ``[S, Hkv, D]`` with one chunk, else fp32 sums ``[chunks, S, Hkv, D]``.

    Program (i, h, c) computes the i-th block of keys of KV head h, in a loop over the queries of
    chunk c from the first key on, head by head. ``words`` ``[Hkv, T]`` tell which blocks a query
    selected, ``statistics`` are those that ``selected_range_dq_kernel`` wrote.
    """
    D: tl.constexpr = HEADS.D
    DV: tl.constexpr = HEADS.DV
    G: tl.constexpr = HEADS.G
    HKV: tl.constexpr = HEADS.HQ // G
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    KEYS_AS_ROWS: tl.constexpr = TILE.keys_as_rows
    TMA: tl.constexpr = TILE.tma
    head_kv = tl.program_id(1)
    chunk = tl.program_id(2)
    sequence, tile = find_tile(cu_k_ptr, tl.program_id(0), num_sequences, len_k, BLOCK_N)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        n = tile * BLOCK_N
        offset = num_tokens - num_q  # position of query row 0
        first = tl.maximum(n - offset, chunk * chunk_rows)
        end = tl.minimum(num_q, (chunk + 1) * chunk_rows)
        if (first < end) | (tl.num_programs(2) == 1):
            key = n + tl.arange(0, BLOCK_N)
            key_ok = key < num_tokens
            key_row = (first_key + key).to(tl.int64)
            # Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV].
            k_ptr += head_kv * stride_k[1]
            k = load_rows(k_ptr, key_row, key_ok, stride_k[0], D, BLOCK_D)
            v_ptr += head_kv * stride_v[1]
            v = load_rows(v_ptr, key_row, key_ok, stride_v[0], DV, BLOCK_DV)
            dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
            scale = softmax_scale * LOG2_E
            plane = num_rows.to(tl.int64) * HEADS.HQ
            words_ptr += head_kv.to(tl.int64) * num_rows
            # Tiles of queries, each processed once per head; the last may reach past the end. Those
            # at the far edge of the window are visited twice, as the steps of dQ.
            count = tl.maximum(end - first, 0)
            bounds = (0, count // BLOCK_M, tl.cdiv(count, BLOCK_M))
            ahead = n - offset - first + size
            edge = tl.maximum(ahead, 0) // BLOCK_M
            edge_end = tl.maximum(ahead + BLOCK_N - 1 + BLOCK_M - 1, 0) // BLOCK_M
            for past_end in tl.static_range(2):
                # Without a mask there are no values for masked elements.
                inf, zero = (float("inf"), 0.0) if past_end else (None, None)
                begin, stop = bounds[past_end], bounds[past_end + 1]
                again = tl.minimum(tl.maximum(edge, begin), stop)
                visits = stop + tl.minimum(tl.maximum(edge_end, begin), stop) - again
                for i in tl.range(begin * G, visits * G, num_stages=1 if past_end else TILE.stages):
                    step = tl.where(i < stop * G, i // G, again + i // G - stop)
                    row = first + step * BLOCK_M
                    head = head_kv * G + i % G
                    queries = Span(head, first_q, num_q)
                    # Load queries [BLOCK_M, BLOCK_D] and dout [BLOCK_M, BLOCK_DV].
                    q = load_keys(
                        q_source, queries, row, stride_q, D, BLOCK_D, BLOCK_M, past_end, TMA
                    )
                    dout = load_keys(
                        dout_source, queries, row, stride_do, DV, BLOCK_DV, BLOCK_M, past_end, TMA
                    )
                    # Columns [BLOCK_M, 1], so that each element is loaded and computed once.
                    m = (row + tl.arange(0, BLOCK_M))[:, None]
                    inside = m < end if past_end else None
                    words = tl.load(words_ptr + first_q + m, mask=inside)
                    at = statistics_ptr + head.to(tl.int64) * num_rows + first_q + m
                    lse_slc = tl.load(at, mask=inside, other=inf) * LOG2_E
                    delta_slc = tl.load(at + plane, mask=inside, other=zero)
                    lse_win = tl.load(at + 2 * plane, mask=inside, other=inf) * LOG2_E
                    delta_win = tl.load(at + 3 * plane, mask=inside, other=zero)
                    both = of_both(lse_slc, delta_slc, lse_win, delta_win)
                    selected = selects(words, n // BLOCKS.SIZE)
                    win = (i >= stop * G) | (step < edge)
                    lse, factor, delta = rows_of(both, selected, i < stop * G, win)
                    lse, factor, delta = tl.sum(lse, 1), tl.sum(factor, 1), tl.sum(delta, 1)
                    # Scores and their gradients: [BLOCK_N, BLOCK_M] fp32 if KEYS_AS_ROWS,
                    # otherwise [BLOCK_M, BLOCK_N].
                    s = products(q, k, KEYS_AS_ROWS)
                    dp = products(dout, v, KEYS_AS_ROWS)
                    # Probabilities, recomputed from lse.
                    p = tl.exp2(s * scale - of_queries(lse, KEYS_AS_ROWS))
                    if (i >= stop * G) | (n + BLOCK_N - 1 > offset + row):
                        t = of_queries(offset + row + tl.arange(0, BLOCK_M), KEYS_AS_ROWS)
                        back = t - of_keys(key, KEYS_AS_ROWS)
                        p = tl.where(is_seen(back, size, win), p, 0.0)
                    factor = of_queries(factor, KEYS_AS_ROWS)
                    # Gradients of values and keys.
                    dv = key_gradient(dv, (p * factor).to(dout.dtype), dout, KEYS_AS_ROWS)
                    ds = (p * (dp * factor - of_queries(delta, KEYS_AS_ROWS))).to(q.dtype)
                    dk = key_gradient(dk, ds, q, KEYS_AS_ROWS)
            out_row = (chunk.to(tl.int64) * num_rows_key + key_row) * HKV + head_kv
            store_rows(dk_ptr, out_row, key_ok, dk * softmax_scale, D)
            store_rows(dv_ptr, out_row, key_ok, dv, DV)


def is_one_pass(inputs: SelectedInputs, call: Call) -> bool:
    """Whether :func:`shared_backward` can run and is faster, by shapes alone.

    The blocks of a sequence fit in a word: two passes are faster with 128 blocks. Heads have at
    most 64 columns: larger ones are not measured.
    """
    _, k, v, block_indices = inputs
    num_blocks = cdiv(call.sequences.len_k, call.config.block_size)
    fits = word_of(num_blocks) > 0 and max(k.shape[-1], v.shape[-1]) <= 64
    return fits and call.algorithm != "gathered" and min(k.numel(), block_indices.numel()) > 0


def shared_backward(
    inputs: SelectedInputs,
    call: Call,
    selected: SelectedResults,
    window: RangeResults,
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    gated: Gated,
) -> None:
    """Run the backward of both branches.

    Args:
        inputs: inputs of the selected branch; the window has the same queries, keys and values.
        call: non-tensor arguments of the forward.
        selected: results of the selected branch.
        window: results of the window.
        dout: gradient of the gated sum of the branches.
        grads: outputs for dq, dk and dv, contiguous.
        gated: gates and gradients for the backward of the gated sum.
    """
    inputs, dout, where = inputs.read(), rows(dout), call.sequences
    (q, k, v, block_indices), (dq, *dkv) = inputs, grads
    num_kv_heads, block_size = k.shape[1], call.config.block_size
    tile, used = once(lambda: fitted("selected_range_dq", inputs, call))
    word = torch.int32 if word_of(cdiv(where.len_k, block_size)) == 32 else torch.int64
    words = block_indices.new_empty(num_kv_heads, q.shape[0], dtype=word)
    statistics = q.new_empty(4, q.shape[1], q.shape[0], dtype=torch.float32)
    sizes = (q.shape[1] // num_kv_heads, block_size, used)
    window_size = call.config.window_size
    lists = make_lists(block_indices, where, *sizes, None, words=words, window=window_size)

    def plan() -> tuple[Launch, KeyPlan]:
        constants = {**constants_of(inputs, call, dout), "size": window_size}
        queries = over_lists(selected_range_dq_kernel, lists, tile, used, constants, ADD=gated.adds)
        keys = fitting(tile_named("selected_range_dkv", inputs, call), q, dout)
        grid = where.num_tiles(k.shape[0], keys.keys, where.len_k), num_kv_heads
        chunks = min(cdiv(PROGRAMS, grid[0] * grid[1]), cdiv(where.len_q, CHUNK_ROWS))
        chunk_rows = cdiv(cdiv(where.len_q, chunks), keys.rows) * keys.rows
        chunked = (cdiv(where.len_q, chunk_rows), chunk_rows)
        return queries, key_plan(selected_range_dkv_kernel, keys, grid, chunked, constants, False)

    query_gradient, key_gradients = once(plan)
    query_gradient(
        q,
        source(k, tile.keys, tile),
        source(v, tile.keys, tile),
        dout,
        (selected.out, selected.lse),
        (window.out, window.lse.t()),
        gated.pointers(statistics),
        dq,
        tuple(lists),
        *where.arguments(),
        lists.block.shape[1],
        q.shape[0],
    )
    read, of_words = RangeInputs(q, k, v), (words, statistics)
    tokens = KeyRange.of_tokens(call)
    key_gradients.run(read, dout, of_words, where.arguments(), (dkv[0], dkv[1]), tokens)
