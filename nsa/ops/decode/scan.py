"""Decode kernel of the compressed branch, the window and the scores, split over keys."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel, let_next_start, wait_for_inputs
from nsa.ops._triton.tiles import (
    LOG2_E,
    load_rows,
    products,
    softmax_lse,
    softmax_result,
    softmax_start,
    softmax_step,
)
from nsa.ops._triton.token_lse import add_tokens
from nsa.ops.decode.layout import (
    CAPACITIES,
    complete_blocks,
    compressed_rows,
    count_reads,
    page_rows,
    query_rows,
    store_partial,
)
from nsa.ops.selection.fp8 import apply_scales, round_rows
from nsa.ops.selection.token_max import block_maxima


@triton.jit
def compressed_split(
    q,
    query,
    k_ptr,
    v_ptr,
    scores_ptr,
    table_ptr,
    reads_ptr,
    where,
    scale,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Partial out and lse over a program's share of the compressed keys.

    Stores their scores unless tokens are scored. If ``v_ptr`` is None, no out is computed.
    """
    b, head, cached, table_width, most_blocks = where
    row, ok, t = query
    blocks = complete_blocks(cached + P.QUERIES, P)
    share = tl.cdiv(tl.cdiv(blocks, SPLITS.cmp), BLOCK_N) * BLOCK_N
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, blocks)
    visible = complete_blocks(t + 1, P)
    if FP8:
        low_q, q_scale = round_rows(q, 1)
    row_max, total, acc = softmax_start(q.shape[0], HEADS.BLOCK_DV)
    group = (b * P.HKV + head).to(tl.int64) * (P.QUERIES * P.G) + row
    i = begin + tl.arange(0, BLOCK_N)
    # Page lookups run one step ahead, so that loads of keys and values can be pipelined.
    at = compressed_rows(table_ptr, b, table_width, i, i < end, P) * P.HKV + head
    for start in tl.range(begin, end, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        here = i < end
        ahead = i + BLOCK_N
        next_at = compressed_rows(table_ptr, b, table_width, ahead, ahead < end, P) * P.HKV + head
        k = load_rows(k_ptr, at, here, HEADS.D, HEADS.D, HEADS.BLOCK_D)
        s = products(q, k, False)  # [M, BLOCK_N]
        if SPLITS.scored == 0:
            score = s
            if FP8:
                low, k_scale = round_rows(k, 1)
                score = apply_scales(products(low_q, low, False), q_scale, k_scale, True)
            tl.store(
                scores_ptr + group[:, None] * most_blocks + i[None, :],
                score,
                mask=ok[:, None] & here[None, :],
            )
        s = tl.where(i[None, :] < visible[:, None], s, -float("inf"))
        if v_ptr is None:
            new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
            total *= tl.exp2(row_max - new_max)
            total += tl.sum(tl.exp2(s * scale - new_max[:, None]), 1)
            row_max = new_max
        else:
            v = load_rows(v_ptr, at, here, HEADS.DV, HEADS.DV, HEADS.BLOCK_DV)
            row_max, total, acc = softmax_step(s, v, row_max, total, acc, scale)
        at = next_at
    if tl.program_id(2) == 0:
        count_reads(reads_ptr, b * P.HKV + head, tl.maximum(end - begin, 0), 0)
    return softmax_result(row_max, total, acc)


@triton.jit
def window_split(
    q,
    query,
    k_ptr,
    v_ptr,
    reads_ptr,
    where,
    scale,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Partial out and lse over a program's share of the window."""
    b, head, cached, _, _ = where
    _, _, t = query
    first = tl.maximum(cached - P.WINDOW + 1, 0)
    last = cached + P.QUERIES
    share = tl.cdiv(tl.cdiv(last - first, SPLITS.win), BLOCK_N) * BLOCK_N
    begin = first + (tl.program_id(1) - SPLITS.cmp) * share
    end = tl.minimum(begin + share, last)
    row_max, total, acc = softmax_start(q.shape[0], HEADS.BLOCK_DV)
    for start in tl.range(begin, end, BLOCK_N):
        p = start + tl.arange(0, BLOCK_N)
        here = p < end
        at = (b.to(tl.int64) * P.RING + p % P.RING) * P.HKV + head
        k = load_rows(k_ptr, at, here, HEADS.D, HEADS.D, HEADS.BLOCK_D)
        v = load_rows(v_ptr, at, here, HEADS.DV, HEADS.DV, HEADS.BLOCK_DV)
        seen = (p[None, :] <= t[:, None]) & (p[None, :] > t[:, None] - P.WINDOW)
        s = tl.where(seen & here[None, :], products(q, k, False), -float("inf"))
        row_max, total, acc = softmax_step(s, v, row_max, total, acc, scale)
    if tl.program_id(2) == 0:
        count_reads(reads_ptr, b * P.HKV + head, tl.maximum(end - begin, 0), 2)
    return softmax_result(row_max, total, acc)


@triton.jit
def scored_step(
    k,
    start,
    end,
    state,
    queries,
    scores,
    scale,
    forced_blocks,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Add the keys ``k [N, D]`` from ``start`` on to the state of ``scored_split``.

    Args:
        k: the keys.
        start: position of the first key.
        end: end of the program's share.
        state: maximum and sum of the forced tokens, and largest products of a block so far.
        queries: rows, rounded rows and their scales, whether they exist, and their positions.
        scores: memory of the scores, row of each query there, and elements of a row.
        scale: factor on the products, base 2.
        forced_blocks: numbers of forced first and most recent blocks.
        BLOCK_SIZE: tokens of a block.
        FP8: whether scores are products of rounded rows.
    """
    row_max, total, largest = state
    q, low_q, q_scale, ok, t = queries
    scores_ptr, at, most_blocks = scores
    BLOCK_N: tl.constexpr = k.shape[0]
    PER: tl.constexpr = largest.shape[1]
    key = start + tl.arange(0, BLOCK_N)
    s = products(q, k, False)  # [M, BLOCK_N]
    score = s
    if FP8:
        low, k_scale = round_rows(k, BLOCK_SIZE)
        score = apply_scales(products(low_q, low, False), q_scale, k_scale, True)
    here = block_maxima(score, BLOCK_N // PER)
    if BLOCK_N < BLOCK_SIZE:
        here = tl.maximum(here, tl.where(start % BLOCK_SIZE == 0, -float("inf"), largest))
        largest = here
    block = start // BLOCK_SIZE + tl.arange(0, PER)
    exists = ok[:, None] & (block * BLOCK_SIZE < end)[None, :]
    tl.store(scores_ptr + at[:, None] * most_blocks + block[None, :], here, mask=exists)
    row_max, total = add_tokens(
        s * scale, key, key < end, t, row_max, total, forced_blocks, BLOCK_SIZE
    )
    return row_max, total, largest


@triton.jit
def scored_split(
    q_ptr,
    row,
    k_ptr,
    scores_ptr,
    table_ptr,
    reads_ptr,
    where,
    scale,
    forced_blocks,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Log-sum-exp of the forced tokens in a program's share of the pages, and which rows exist.

    ``P`` and ``HEADS`` are those of the queries and keys that score blocks. Stores the largest
    unscaled product of each block, with ``FP8`` that of rounded rows: a step then has whole blocks,
    whose keys share a scale. Products with tokens after the query belong to its own block,
    which is forced, or to later blocks.

    Keys of the first step that earlier steps have cached are loaded before the previous kernel has
    ended.
    """
    b, head, cached, table_width, most_blocks = where
    BLOCK_SIZE: tl.constexpr = P.BLOCK_SIZE
    WHOLE: tl.constexpr = max(BLOCK_N, BLOCK_SIZE)  # shares consist of whole blocks and steps
    PER: tl.constexpr = WHOLE // BLOCK_SIZE  # blocks per step; a step may be a part of one
    D: tl.constexpr = HEADS.D
    tokens = cached + P.QUERIES
    share = tl.cdiv(tl.cdiv(tokens, SPLITS.scored), WHOLE) * WHOLE
    begin = (tl.program_id(1) - SPLITS.cmp - SPLITS.win) * share
    end = tl.minimum(begin + share, tokens)
    key = begin + tl.arange(0, BLOCK_N)
    at = page_rows(table_ptr, b, table_width, key, key < end, BLOCK_SIZE) * P.HKV + head
    k = load_rows(k_ptr, at, key < tl.minimum(end, cached), D, D, HEADS.BLOCK_D)
    wait_for_inputs(AT_ONCE=False)
    if (begin + BLOCK_N > cached) & (begin < end):
        k = load_rows(k_ptr, at, key < end, D, D, HEADS.BLOCK_D)
    ok, place, t = query_rows(row, b, head, cached, P)
    q = load_rows(q_ptr, place, ok, D, D, HEADS.BLOCK_D)
    low_q, q_scale = q, 0.0
    if FP8:
        low_q, q_scale = round_rows(q, 1)
    queries = (q, low_q, q_scale, ok, t)
    group = (b * P.HKV + head).to(tl.int64) * (P.QUERIES * P.G) + row
    scores = (scores_ptr, group, most_blocks)
    state = (
        tl.full([q.shape[0]], -1e30, tl.float32),
        tl.zeros([q.shape[0]], tl.float32),
        tl.full([q.shape[0], PER], -float("inf"), tl.float32),
    )
    key += BLOCK_N
    # Page lookups run one step ahead, so that loads of keys can be pipelined.
    at = page_rows(table_ptr, b, table_width, key, key < end, BLOCK_SIZE) * P.HKV + head
    state = scored_step(
        k, begin, end, state, queries, scores, scale, forced_blocks, BLOCK_SIZE, FP8
    )
    for start in tl.range(begin + BLOCK_N, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        ahead = key + BLOCK_N
        next_row = page_rows(table_ptr, b, table_width, ahead, ahead < end, BLOCK_SIZE)
        k = load_rows(k_ptr, at, key < end, D, D, HEADS.BLOCK_D)
        state = scored_step(
            k, start, end, state, queries, scores, scale, forced_blocks, BLOCK_SIZE, FP8
        )
        at = next_row * P.HKV + head
    if tl.program_id(2) == 0:
        count_reads(reads_ptr, tl.program_id(0), tl.maximum(end - begin, 0), 3)
    row_max, total, _ = state
    return softmax_lse(row_max, total), ok


@kernel(do_not_specialize=CAPACITIES)
def decode_scan_kernel(
    q_ptr,
    q_cmp_ptr,
    q_score_ptr,
    k_cmp_ptr,
    v_cmp_ptr,
    k_score_ptr,
    k_win_ptr,
    v_win_ptr,
    table_ptr,
    lengths_ptr,
    scores_ptr,
    out_ptr,
    lse_ptr,
    score_lse_ptr,
    reads_ptr,
    table_width,
    most_blocks,
    softmax_scale,
    score_scale,
    num_init,
    num_local,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    S: tl.constexpr,
    SCORE_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCORE_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Partial results of the compressed branch and the window, and scores.

    Program (i, s, m) handles sequence and KV head i and the m-th ``BLOCK_M`` rows (queries by
    heads); the first ``SPLITS.cmp`` values of s share the compressed keys, then ``SPLITS.win`` the
    window, then ``SPLITS.scored`` the keys that score blocks. Partial results are stored as
    ``[B * Hkv, cmp + win + slc, T * G]``, grouped by branch; unscaled scores of compressed keys, or
    of blocks if tokens are scored, as ``[B * Hkv, T * G, most_blocks]``, and the log-sum-exp of the
    forced tokens as ``[B * Hkv, scored, T * G]``. Scores have the heads of the pattern ``S``.
    """
    b = tl.program_id(0) // P.HKV
    head = tl.program_id(0) % P.HKV
    split = tl.program_id(1)
    cached = tl.load(lengths_ptr + b)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    ok, place, t = query_rows(row, b, head, cached, P)
    where = (b, head, cached, table_width, most_blocks)
    query = (row, ok, t)
    scale = softmax_scale * LOG2_E
    share = tl.program_id(0) * SPLITS.number + split
    at = share.to(tl.int64) * (P.QUERIES * P.G) + row
    if split < SPLITS.cmp:
        if SPLITS.cmp > 0:
            wait_for_inputs(AT_ONCE=False)
            q = load_rows(q_cmp_ptr, place, ok, HEADS.D, HEADS.D, HEADS.BLOCK_D)
            out, lse = compressed_split(
                q,
                query,
                k_cmp_ptr,
                v_cmp_ptr,
                scores_ptr,
                table_ptr,
                reads_ptr,
                where,
                scale,
                P,
                HEADS,
                SPLITS,
                BLOCK_N,
                FP8,
            )
            let_next_start()
            store_partial(out_ptr, lse_ptr, at, ok, out, lse, HEADS.DV)
    elif split < SPLITS.cmp + SPLITS.win:
        if SPLITS.win > 0:
            wait_for_inputs(AT_ONCE=False)
            q = load_rows(q_ptr, place, ok, HEADS.D, HEADS.D, HEADS.BLOCK_D)
            out, lse = window_split(
                q,
                query,
                k_win_ptr,
                v_win_ptr,
                reads_ptr,
                where,
                scale,
                P,
                HEADS,
                SPLITS,
                BLOCK_N,
            )
            let_next_start()
            store_partial(out_ptr, lse_ptr, at, ok, out, lse, HEADS.DV)
    else:
        if SPLITS.scored > 0:  # noqa: SIM102  `and` of a constant and a tensor
            if head < S.HKV:
                lse_s, ok_s = scored_split(
                    q_score_ptr,
                    row,
                    k_score_ptr,
                    scores_ptr,
                    table_ptr,
                    reads_ptr,
                    where,
                    score_scale * LOG2_E,
                    (num_init, num_local),
                    S,
                    SCORE_HEADS,
                    SPLITS,
                    SCORE_N,
                    FP8,
                )
                let_next_start()
                share_s = (b * S.HKV + head) * SPLITS.scored + split - SPLITS.cmp - SPLITS.win
                at_s = share_s.to(tl.int64) * (S.QUERIES * S.G) + row
                tl.store(score_lse_ptr + at_s, lse_s, mask=ok_s)
