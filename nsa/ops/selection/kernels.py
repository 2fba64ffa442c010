"""Selection-block scores and top n in one pass, without a queries-by-keys buffer.

The heads of a group are processed one by one, and their probabilities are accumulated in one tile
over the compressed keys of a step, so the sum over the group (Eq. 10) costs nothing and G needs no
padding. The stencil of Eq. 9 is applied once to the sum: a compression block contributes
``min(O, R - m)`` of its overlap to the selection block that it starts in and ``max(m + O - R, 0)``
to the next one, where ``O = l / d``, ``R = l' / d`` and m is its index in the block. Forced blocks
are not ranked. The best others are kept sorted as int64 keys with the score in the high and the
inverted id in the low bits, so that ties go to the lower id; those of a step are found by a bitonic
top-k and merged.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import LOG2_E, VARYING, find_tile, load_rows, sequence_rows
from nsa.ops.selection.fp8 import apply_scales, load_scales
from nsa.ops.selection.two_stage import LAST_ID, kept_columns


class Scoring(NamedTuple):
    """Sizes of the sparse pattern, as compile-time constants.

    Attributes:
        L: tokens of a compression block.
        STRIDE: compression stride, in tokens.
        BLOCK_SIZE: tokens of a selection block.
        N: selected blocks per query.
        BLOCK_N: N padded to a power of two.
        BLOCK_R: blocks of a query that are ranked, those that are not forced, padded likewise.
    """

    L: int
    STRIDE: int
    BLOCK_SIZE: int
    N: int
    BLOCK_N: int
    BLOCK_R: int


class QueryBlock(NamedTuple):
    """Queries of a program, ``[BLOCK_Q]`` each unless stated.

    Attributes:
        token: int64, packed row.
        ok: whether the query exists.
        t: position in the sequence.
        current: selection block that contains the query.
        visible: number of compressed keys visible to the query.
        t_first, t_last: scalars, positions of the first and the last query.
        first_key, num_keys: scalars, first row and number of compressed keys of the sequence.
    """

    token: Any
    ok: Any
    t: Any
    current: Any
    visible: Any
    t_first: Any
    t_last: Any
    first_key: Any
    num_keys: Any


@triton.jit
def query_block(
    cu_q_ptr,
    cu_k_ptr,
    cu_key_ptr,
    len_q,
    len_k,
    len_key,
    sequence,
    tile,
    SCORING: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """The tile-th ``BLOCK_Q`` queries of a sequence, see ``QueryBlock``."""
    first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
    _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
    first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    ok = row < num_q
    t = num_tokens - num_q + row
    current = t // SCORING.BLOCK_SIZE
    token = (first_q + row).to(tl.int64)
    visible = tl.maximum(t + 1 - SCORING.L + SCORING.STRIDE, 0) // SCORING.STRIDE
    t_first = num_tokens - num_q + tile * BLOCK_Q
    t_last = num_tokens - num_q + tl.minimum(tile * BLOCK_Q + BLOCK_Q, num_q) - 1
    return QueryBlock(token, ok, t, current, visible, t_first, t_last, first_key, num_keys)


@triton.jit
def load_head(q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, head, stride_q, HEADS: tl.constexpr):
    """Load queries ``[BLOCK_Q, BLOCK_D]`` of one head, their lse ``[BLOCK_Q]``, base 2, and scales.

    Scales are unused without ``q_scale_ptr``.
    """
    q_at = queries.token * stride_q[0] + head * stride_q[1]
    q = load_rows(q_ptr, q_at, queries.ok, 1, HEADS.D, HEADS.BLOCK_D)
    at = (head + tl.zeros_like(queries.token)) * num_rows + queries.token
    lse = tl.load(lse_ptr + at, mask=queries.ok, other=float("inf")) * LOG2_E
    return q, lse, load_scales(q_scale_ptr, queries.token, queries.ok, head, HEADS.HQ)


@triton.jit
def load_compressed(k_ptr, queries, key, stride_k, HEADS: tl.constexpr):
    """Load compressed keys ``[BLOCK_C, BLOCK_D]`` of one head by their index in the sequence."""
    row = queries.first_key + key
    return load_rows(k_ptr, row, key < queries.num_keys, stride_k[0], HEADS.D, HEADS.BLOCK_D)


@triton.jit
def start_ranking(BLOCK_Q: tl.constexpr, SCORING: tl.constexpr):
    """Initial carry and an empty ranking, see ``rank_blocks``."""
    carry = tl.zeros([BLOCK_Q], tl.float32)
    return carry, tl.full([BLOCK_Q, SCORING.BLOCK_R], -1, tl.int64)


@triton.jit
def block_scores(
    p, carry, jj, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, R: tl.constexpr, O: tl.constexpr
):
    """Scores ``[BLOCK_Q, BLOCK_J]`` (Eq. 9) from probabilities ``[BLOCK_Q, BLOCK_J * R]``.

    ``carry`` is the contribution of the last block to the next step.
    """
    place = tl.arange(0, R)
    p = p.reshape(BLOCK_Q, BLOCK_J, R)
    score = tl.sum(p * tl.minimum(O, R - place).to(tl.float32)[None, None, :], 2)
    if O > 1:
        to_next = tl.sum(p * tl.maximum(place + O - R, 0).to(tl.float32)[None, None, :], 2)
        before = tl.broadcast_to(tl.maximum(jj - 1, 0)[None, :], (BLOCK_Q, BLOCK_J))
        score += tl.where((jj == 0)[None, :], carry[:, None], tl.gather(to_next, before, 1))
        carry = tl.sum(tl.where((jj == BLOCK_J - 1)[None, :], to_next, 0.0), 1)
    return score, carry


@triton.jit
def rank_blocks(
    p,
    carry,
    best,
    queries,
    key,
    j0,
    jj,
    kept,
    num_init,
    num_local,
    SCORING: tl.constexpr,
):
    """Merge the blocks ``j0 + jj`` into the current ranking.

    Args:
        p: probabilities ``[BLOCK_Q, BLOCK_J * R]`` of their compressed keys.
        carry: ``[BLOCK_Q]``, see ``block_scores``.
        best: sorted int64 keys ``[BLOCK_Q, BLOCK_R]``, score in the high bits, inverted id in the
            low bits.
        queries: see ``QueryBlock``.
        key: indices of the compressed keys.
        j0: the first block.
        jj: ``0 .. BLOCK_J``.
        kept: candidates ``[BLOCK_Q, BLOCK_J]``; None means all.
        num_init: number of forced first blocks.
        num_local: number of forced recent blocks.
        SCORING: sizes.
    """
    R: tl.constexpr = SCORING.BLOCK_SIZE // SCORING.STRIDE
    p = tl.where(key[None, :] < queries.visible[:, None], p, 0.0)
    score, carry = block_scores(
        p, carry, jj, p.shape[0], jj.shape[0], R, SCORING.L // SCORING.STRIDE
    )
    return carry, merge_scores(score, best, queries, j0, jj, kept, num_init, num_local, SCORING)


@triton.jit
def merge_scores(score, best, queries, j0, jj, kept, num_init, num_local, SCORING: tl.constexpr):
    """Merge blocks with scores ``[BLOCK_Q, BLOCK_J]`` into the ranking, see ``rank_blocks``.

    Forced blocks are not ranked.
    """
    j = (j0 + jj)[None, :]
    bits = score.to(tl.int32, bitcast=True).to(tl.int64)
    candidate = (j >= num_init) & (j <= queries.current[:, None] - num_local)
    if kept is not None:
        candidate = candidate & kept
    ranked = tl.where(candidate, (bits << 32) | (j * -1 + LAST_ID).to(tl.int64), -1)
    step_best = tl.topk(ranked, SCORING.BLOCK_R, dim=1)
    merged = tl.maximum(best, tl.flip(step_best, 1))
    return tl.bitonic_merge(merged, dim=1, descending=True)


@triton.jit
def ids_of(best):
    """Block ids of a ranking, ``LAST_ID`` where there is none; see ``rank_blocks``."""
    return tl.where(best >= 0, (best & LAST_ID) * -1 + LAST_ID, LAST_ID).to(tl.int32)


@triton.jit
def sorted_ids(ids, selected):
    """Each row's selected ids, ascending, padded with -1."""
    ids = tl.sort(tl.where(selected, ids, LAST_ID), dim=1)
    return tl.where(ids == LAST_ID, -1, ids)


@triton.jit
def store_selection(
    out_ptr,
    best,
    queries,
    where,
    HKV: tl.constexpr,
    SCORING: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Store the forced and the best blocks, ascending, padded with -1.

    ``where``: KV head, and numbers of forced first and recent blocks.
    ``COUNTS`` is a flat tuple ``(length, n, length, n ..)``: a query selects n blocks of the first
    pair with position < length.
    """
    head_kv, num_init, num_local = where
    N: tl.constexpr = SCORING.N
    ROWS: tl.constexpr = len(COUNTS) // 2
    BLOCK_R: tl.constexpr = SCORING.BLOCK_R
    column = tl.arange(0, SCORING.BLOCK_N)[None, :]
    current = queries.current[:, None]
    count = tl.full([best.shape[0]], N, tl.int32)
    for i in tl.static_range(ROWS - 1, -1, -1):
        count = tl.where(queries.t < COUNTS[2 * i], COUNTS[2 * i + 1], count)
    # The last columns have the forced blocks, the first ones the best.
    number = column - (N - num_init - num_local)
    local = current - num_local + 1 + number - num_init
    forced = tl.where(number < num_init, number, tl.where(local >= num_init, local, LAST_ID))
    ids = ids_of(best)
    if BLOCK_R < SCORING.BLOCK_N:
        place = tl.minimum(column, BLOCK_R - 1)
        ids = tl.gather(ids, tl.broadcast_to(place, (best.shape[0], SCORING.BLOCK_N)), 1)
    ids = tl.where(number < 0, ids, tl.where(forced <= current, forced, LAST_ID))
    selected = (number >= 0) | (column < count[:, None] - num_init - num_local)
    ids = sorted_ids(ids, selected & (column < N))
    row = (queries.token * HKV + head_kv) * N
    tl.store(out_ptr + row[:, None] + column, ids, mask=queries.ok[:, None] & (column < N))


@triton.jit
def load_group(
    q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, head_kv, stride_q, HEADS: tl.constexpr
):
    """Load every head of a group with ``load_head``."""
    G: tl.constexpr = HEADS.G
    heads = ()
    for h in tl.static_range(G):
        number = head_kv * G + h
        head = load_head(q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, number, stride_q, HEADS)
        heads = heads + (head,)  # noqa: RUF005  Triton has no starred expressions
    return heads


@triton.jit
def probabilities(head, k, k_scale, scale, SCALED: tl.constexpr):
    """Probabilities ``[BLOCK_Q, BLOCK_C]`` fp32 for compressed keys and a loaded head."""
    q, lse, q_scale = head
    s = apply_scales(tl.dot(q, tl.trans(k), input_precision="ieee"), q_scale, k_scale, SCALED)
    return tl.exp2(s * scale - lse[:, None])


@kernel(do_not_specialize=VARYING)
def select_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    coarse_ptr,
    out_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_key_ptr,
    len_q,
    len_k,
    len_key,
    num_sequences,
    num_rows,
    stride_q,
    stride_k,
    softmax_scale,
    num_init,
    num_local,
    HEADS: tl.constexpr,
    SCORING: tl.constexpr,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
    FACTOR: tl.constexpr,
    NUM_COARSE: tl.constexpr,
):
    """Write the selected blocks, int32 ``[T, Hkv, n]``.

    Program (i, h) handles the i-th tile of queries from the end and KV head h, in a loop over
    the selection blocks, ``TILE.keys`` at a time.

    ``coarse_ptr``: int32 ``[T, Hkv, NUM_COARSE]``, coarse blocks kept by the first of two stages,
    of ``FACTOR`` blocks each; one stage if ``FACTOR`` is 0. Scales: see ``fp8.py``.
    """
    G: tl.constexpr = HEADS.G
    HKV: tl.constexpr = HEADS.HQ // G
    BLOCK_Q: tl.constexpr = TILE.rows
    BLOCK_J: tl.constexpr = TILE.keys
    R: tl.constexpr = SCORING.BLOCK_SIZE // SCORING.STRIDE
    SCALED: tl.constexpr = q_scale_ptr is not None
    head_kv = tl.program_id(1)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        queries = query_block(
            cu_q_ptr, cu_k_ptr, cu_key_ptr, len_q, len_k, len_key, sequence, tile, SCORING, BLOCK_Q
        )
        scale = softmax_scale * LOG2_E
        jj = tl.arange(0, BLOCK_J)
        carry, best = start_ranking(BLOCK_Q, SCORING)
        if FACTOR > 0:
            coarse = coarse_ptr + (queries.token * HKV + head_kv) * NUM_COARSE
            place = tl.full([BLOCK_Q], -1, tl.int32)
            block = tl.full([BLOCK_Q], -1, tl.int32)
            kept_next, place, block = kept_columns(
                coarse, queries.ok, place, block, 0, BLOCK_J, FACTOR, NUM_COARSE
            )
        if TILE.keep_queries:
            heads = load_group(
                q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, head_kv, stride_q, HEADS
            )
        end = queries.t_last // SCORING.BLOCK_SIZE + 1
        for j0 in tl.range(0, end, BLOCK_J, num_stages=TILE.stages if TILE.keep_queries else 1):
            kept_here = None
            active = True
            if FACTOR > 0:
                kept_here = kept_next
                kept_next, place, block = kept_columns(
                    coarse, queries.ok, place, block, j0 + BLOCK_J, BLOCK_J, FACTOR, NUM_COARSE
                )
                wanted = tl.max(tl.max((kept_here | kept_next).to(tl.int32), 1), 0) > 0
                local = queries.t_first // SCORING.BLOCK_SIZE + 1 - num_local
                active = wanted | (j0 < num_init) | (j0 + BLOCK_J > local)
            if active:
                key = j0 * R + tl.arange(0, R * BLOCK_J)
                k_head = k_ptr + head_kv * stride_k[1]
                k = load_compressed(k_head, queries, key, stride_k, HEADS)
                key_ok = key < queries.num_keys
                k_scale = load_scales(k_scale_ptr, queries.first_key + key, key_ok, head_kv, HKV)
                p = tl.zeros([BLOCK_Q, R * BLOCK_J], tl.float32)
                if TILE.keep_queries:
                    for h in tl.static_range(G):
                        p += probabilities(heads[h], k, k_scale, scale, SCALED)
                else:
                    for h in tl.range(0, G, num_stages=TILE.stages):
                        number_q = head_kv * G + h
                        head = load_head(
                            q_ptr,
                            q_scale_ptr,
                            lse_ptr,
                            queries,
                            num_rows,
                            number_q,
                            stride_q,
                            HEADS,
                        )
                        p += probabilities(head, k, k_scale, scale, SCALED)
                carry, best = rank_blocks(
                    p, carry, best, queries, key, j0, jj, kept_here, num_init, num_local, SCORING
                )
        where = (head_kv, num_init, num_local)
        store_selection(out_ptr, best, queries, where, HKV, SCORING, COUNTS)
