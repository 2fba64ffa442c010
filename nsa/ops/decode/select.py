"""Decode kernel that selects blocks and concurrently merges the other branches."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel, wait_for_inputs
from nsa.ops._triton.tiles import LOG2_E, store_rows
from nsa.ops.decode.layout import CAPACITIES, complete_blocks, gated_sum, is_last, query_rows
from nsa.ops.selection.kernels import QueryBlock, block_scores, store_selection
from nsa.ops.selection.token_max import LIMIT
from nsa.ops.selection.two_stage import LAST_ID


@triton.jit
def merged_lse(lse_ptr, share, row, ok, P: tl.constexpr, NUM: tl.constexpr, BLOCK_S: tl.constexpr):
    """lse ``[H]`` (base 2) of rows (queries by heads) over all keys; +inf without any.

    It merges ``NUM`` partial results, beginning with ``share``.
    """
    s = tl.arange(0, BLOCK_S)[None, :]
    at = (share + s).to(tl.int64) * (P.QUERIES * P.G) + row[:, None]
    mask = ok[:, None] & (s < NUM)
    lse = tl.load(lse_ptr + at, mask=mask, other=-float("inf")) * LOG2_E
    largest = tl.max(lse, 1)
    none = largest == -float("inf")
    shift = tl.where(none, 0.0, largest)
    total = tl.where(none, 1.0, tl.sum(tl.exp2(lse - shift[:, None]), 1))
    return tl.where(none, float("inf"), shift + tl.log2(total))


@kernel(do_not_specialize=CAPACITIES)
def decode_select_kernel(
    scores_ptr,
    partial_ptr,
    lse_ptr,
    score_lse_ptr,
    gates_ptr,
    lengths_ptr,
    best_ptr,
    counter_ptr,
    out_ptr,
    others_ptr,
    most_blocks,
    chunks,
    score_scale,
    num_init,
    num_local,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    S: tl.constexpr,
    SCORING: tl.constexpr,
    COUNTS: tl.constexpr,
    HAS_CMP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Selected blocks int32 ``[T, Hkv, N]``, ascending, padded with -1; sum of other branches.

    Program (i, c) handles KV head and query i over all sequences, and the c-th ``BLOCK_J - 1``
    blocks. The last program of a query to arrive merges the best blocks of all, int64
    ``[B * Hkv * T, chunks, BLOCK_R]``, with the score in the high and the inverted id in the low
    bits.

    Programs with ``c >= chunks`` merge the compressed branch and the window of ``BLOCK_H`` heads
    each, ``BLOCK_O`` partial results at a time, into the gated sum fp32 ``[B * Hkv, queries * G,
    Dv]``.

    Scores have the heads of the pattern ``S``: as many KV heads, or one for all.
    """
    wait_for_inputs()
    query = tl.program_id(0) % P.QUERIES
    group = tl.program_id(0) // P.QUERIES  # index of sequence and KV head
    cached = tl.load(lengths_ptr + group // P.HKV)
    if tl.program_id(1) < chunks:
        t = cached + query
        scale = score_scale * LOG2_E
        BY_TOKEN: tl.constexpr = SPLITS.scored > 0
        # Scores per block, and blocks to which a score contributes.
        R: tl.constexpr = 1 if BY_TOKEN else P.BLOCK_SIZE // P.STRIDE
        O: tl.constexpr = 1 if BY_TOKEN else P.L // P.STRIDE
        chunk = tl.program_id(1)
        # Start one block early: the last keys of a block contribute to the next one.
        j0 = chunk * (BLOCK_J - 1) - 1
        jj = tl.arange(0, BLOCK_J)
        key = j0 * R + tl.arange(0, BLOCK_J * R)
        visible = t // P.BLOCK_SIZE + 1 if BY_TOKEN else complete_blocks(t + 1, P)
        seen = (key >= 0) & (key < visible)
        h = tl.arange(0, BLOCK_G)
        row = query * S.G + h
        scored = group * S.HKV // P.HKV
        if BY_TOKEN:
            lse = merged_lse(
                score_lse_ptr, scored * SPLITS.scored, row, h < S.G, S, SPLITS.scored, BLOCK_S
            )
        else:
            first = group * SPLITS.number
            lse = merged_lse(lse_ptr, first, row, h < S.G, S, SPLITS.cmp, BLOCK_S)
        at = (scored.to(tl.int64) * (S.QUERIES * S.G) + row)[:, None] * most_blocks + key[None, :]
        s = tl.load(scores_ptr + at, mask=(h < S.G)[:, None] & seen[None, :], other=-float("inf"))
        s = s * scale - lse[:, None]
        if BY_TOKEN:
            s = tl.minimum(s, LIMIT)
        p = tl.sum(tl.exp2(s), 0)[None, :]
        nothing = tl.zeros([1], tl.float32)
        score = block_scores(p, nothing, jj, 1, BLOCK_J, R, O)[0]
        j = (j0 + jj)[None, :]
        current = t // P.BLOCK_SIZE
        bits = score.to(tl.int32, bitcast=True).to(tl.int64)
        candidate = (jj > 0)[None, :] & (j >= num_init) & (j <= current - num_local)
        ranked = tl.where(candidate, (bits << 32) | (j * -1 + LAST_ID).to(tl.int64), -1)
        BLOCK_R: tl.constexpr = SCORING.BLOCK_R
        best = tl.topk(ranked, BLOCK_R, dim=1)  # [1, BLOCK_R]
        one = tl.full([1], 1, tl.int32)
        token = (group // P.HKV * P.QUERIES + query) * one.to(tl.int64)
        row = QueryBlock(token, one > 0, t * one, current * one, 0, t, t, 0, 0)
        where = (group % P.HKV, num_init, num_local)
        if BLOCK_CHUNKS == 1:
            store_selection(out_ptr, best, row, where, P.HKV, SCORING, COUNTS)
        else:
            place = best_ptr + tl.program_id(0) * (chunks * BLOCK_R)
            column = tl.arange(0, BLOCK_R)[None, :]
            tl.store(place + chunk * BLOCK_R + column, best)
            if is_last(counter_ptr + tl.program_id(0), chunks):
                i = tl.arange(0, BLOCK_CHUNKS * BLOCK_R)[None, :]
                found = tl.load(
                    place + i, mask=i < chunks * BLOCK_R, other=-1, cache_modifier=".cg"
                )
                best = tl.topk(found, BLOCK_R, dim=1)
                store_selection(out_ptr, best, row, where, P.HKV, SCORING, COUNTS)
    else:
        g = (tl.program_id(1) - chunks) * BLOCK_H + tl.arange(0, BLOCK_H)
        row_g = query * P.G + g
        ok_g = g < P.G
        _, place_g, _ = query_rows(row_g, group // P.HKV, group % P.HKV, cached, P)
        parts = (partial_ptr, lse_ptr, group * SPLITS.number)
        rows = (gates_ptr, place_g, row_g, ok_g)
        y = gated_sum(parts, rows, P, HEADS, SPLITS, HAS_CMP, BLOCK_O)
        others = others_ptr + group.to(tl.int64) * (P.QUERIES * P.G * HEADS.DV)
        store_rows(others, row_g, ok_g, y, HEADS.DV)
