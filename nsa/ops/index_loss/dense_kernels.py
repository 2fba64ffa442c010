"""Kernels of the loss of an index head over all blocks, in memory linear in the tokens.

Masses and scores of blocks are computed twice, once for the loss and the gradient of the index
queries, and once for the gradient of the index keys. A block to rank lies before the query's own,
so its products need no causal mask.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import LN_2, LOG2_E, VARYING, find_tile, load_rows, sequence_rows
from nsa.ops._triton.token_lse import add_weights
from nsa.ops.index_loss.kernels import find_largest, log_sum


class IndexQueries(NamedTuple):
    """Queries of a tile ``[QUERIES]``, and rows of queries by index heads ``[QUERIES * BLOCK_IH]``.

    Attributes:
        query: number of each query in the sequence.
        token: int64, packed row of each query.
        ok: whether the query exists.
        row_token: int64, packed row of each row's query.
        inner: index head of the row, among those of its key head.
        row_ok: whether query and head exist.
        lse: log-sum-exp of the forced blocks, base 2, infinite for no head.
        q: index queries ``[QUERIES * BLOCK_IH, BLOCK_DI]``.
    """

    query: Any
    token: Any
    ok: Any
    row_token: Any
    inner: Any
    row_ok: Any
    lse: Any
    q: Any


@triton.jit
def spread(x, SIZES: tl.constexpr):
    """Values of queries ``[QUERIES]`` for each of their index heads, ``[QUERIES * BLOCK_IH]``."""
    rows = tl.broadcast_to(x[:, None], [SIZES.QUERIES, SIZES.BLOCK_IH])
    return tl.reshape(rows, [SIZES.QUERIES * SIZES.BLOCK_IH])


@triton.jit
def block_mass(attention, head_kv, token, ok, key_row, SIZES: tl.constexpr):
    """Logarithm of the attention mass of a block, added over the heads of a group, ``[QUERIES]``.

    Args:
        attention: queries, keys, lse, strides, factor on the products (base 2) and T.
        head_kv: KV head.
        token: packed rows of the queries, ``[QUERIES]`` int64.
        ok: whether they exist.
        key_row: packed row of the block's first key; all of its keys exist.
        SIZES: see ``IndexSizes``.
    """
    q_ptr, k_ptr, lse_ptr, stride_q, stride_k, scale, num_rows = attention
    QUERIES: tl.constexpr = SIZES.QUERIES
    row_max = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    k_ptr += head_kv * stride_k[1]
    # Not unrolled: the parts of wide fp32 keys would not fit on chip together.
    for part in tl.range(0, SIZES.BLOCK_SIZE // SIZES.KEYS):
        n = tl.arange(0, SIZES.KEYS)
        row = key_row + part * SIZES.KEYS + n
        k = load_rows(k_ptr, row, n >= 0, stride_k[0], SIZES.D, SIZES.BLOCK_D)
        for h in tl.range(0, SIZES.G):
            head = head_kv * SIZES.G + h
            q_at = token * stride_q[0] + head * stride_q[1]
            q = load_rows(q_ptr, q_at, ok, 1, SIZES.D, SIZES.BLOCK_D)  # [QUERIES, BLOCK_D]
            lse_at = head.to(tl.int64) * num_rows + token
            lse = tl.load(lse_ptr + lse_at, mask=ok, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            row_max, total = add_weights(s - lse[:, None], row_max, total)
    return row_max + tl.log2(total)


@triton.jit
def load_index_queries(index, key_head, first_q, start, num_q, SIZES: tl.constexpr):
    """Tile of queries, and their index queries in rows of queries by padded index heads.

    Args:
        index: index queries, index keys, log-sum-exp of the forced blocks, strides, factor on the
            products (base 2) and T. The log-sum-exp is None with one index head per key head.
        key_head: index key head.
        first_q: packed row of the sequence's first query.
        start: first query of the tile.
        num_q: number of queries.
        SIZES: see ``IndexSizes``.
    """
    q_ptr, _, lse_ptr, stride_q, _, _, num_rows = index
    query = start + tl.arange(0, SIZES.QUERIES)
    r = tl.arange(0, SIZES.QUERIES * SIZES.BLOCK_IH)
    row = start + r // SIZES.BLOCK_IH
    inner = r % SIZES.BLOCK_IH
    ok = (row < num_q) & (inner < SIZES.IH)
    token = (first_q + row).to(tl.int64)
    head = key_head * SIZES.IH + inner
    lse = tl.where(inner < SIZES.IH, 0.0, float("inf"))
    if lse_ptr is not None:
        lse += tl.load(lse_ptr + head.to(tl.int64) * num_rows + token, mask=ok, other=0.0)
    q_at = token * stride_q[0] + head * stride_q[1]
    q = load_rows(q_ptr, q_at, ok, 1, SIZES.DI, SIZES.BLOCK_DI)
    tokens = (first_q + query).to(tl.int64)
    return IndexQueries(query, tokens, query < num_q, token, inner, ok, lse, q)


@triton.jit
def block_scores(index, key_head, rows, key_row, SIZES: tl.constexpr):
    """Scores of a block; for the arguments see ``load_index_queries`` and ``block_mass``.

    Returns:
        Logarithm of the score ``[QUERIES]`` and, by index head, ``[QUERIES * BLOCK_IH]``, weight of
        the head in the score and row of its largest product.
    """
    _, k_ptr, _, _, stride_k, scale, _ = index
    ROWS: tl.constexpr = SIZES.QUERIES * SIZES.BLOCK_IH
    m = tl.full([ROWS], -float("inf"), tl.float32)
    m_at = tl.zeros([ROWS], tl.int32)
    k_ptr += key_head * stride_k[1]
    for part in tl.static_range(SIZES.BLOCK_SIZE // SIZES.KEYS):
        n = tl.arange(0, SIZES.KEYS)
        row = key_row + part * SIZES.KEYS + n
        k = load_rows(k_ptr, row, n >= 0, stride_k[0], SIZES.DI, SIZES.BLOCK_DI)
        s = tl.dot(rows.q, tl.trans(k), input_precision="ieee") * scale
        m, m_at = find_largest(s, row, m, m_at)
    m -= rows.lse
    score = log_sum(tl.reshape(m, [SIZES.QUERIES, SIZES.BLOCK_IH]), 1)
    return score, tl.exp2(m - spread(score, SIZES)), m_at


@kernel(do_not_specialize=VARYING)
def index_loss_all_kernel(
    q_idx_ptr,
    k_idx_ptr,
    q_ptr,
    k_ptr,
    lse_ptr,
    lse_idx_ptr,
    loss_ptr,
    count_ptr,
    dq_ptr,
    norm_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_rows,
    stride_q_idx,
    stride_k_idx,
    stride_q,
    stride_k,
    index_scale,
    softmax_scale,
    num_init,
    num_local,
    SIZES: tl.constexpr,
):
    """Write loss and number of ranked blocks ``[T, Hkv]``, and what the gradient needs.

    These are the unscaled gradient of the index queries for each KV head, fp32
    ``[T, Hkv, IH, Di]``, and the logarithms of the sums of masses and of scores over the ranked
    blocks, base 2, fp32 ``[2, Hkv, T]``. Program (i, h) handles the i-th tile of queries from the
    end and KV head h, in a loop over the blocks. Sums over blocks are kept relative to the largest
    term, as in online softmax.
    """
    HKV: tl.constexpr = SIZES.HKV
    HKI: tl.constexpr = SIZES.HKI
    QUERIES: tl.constexpr = SIZES.QUERIES
    BLOCK_SIZE: tl.constexpr = SIZES.BLOCK_SIZE
    BLOCK_DI: tl.constexpr = SIZES.BLOCK_DI
    ROWS: tl.constexpr = QUERIES * SIZES.BLOCK_IH
    head_kv = tl.program_id(1)
    key_head = head_kv // (HKV // HKI)
    attention = (q_ptr, k_ptr, lse_ptr, stride_q, stride_k, softmax_scale * LOG2_E, num_rows)
    scale = index_scale * LOG2_E
    index = (q_idx_ptr, k_idx_ptr, lse_idx_ptr, stride_q_idx, stride_k_idx, scale, num_rows)
    k_head = k_idx_ptr + key_head * stride_k_idx[1]
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, QUERIES)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        rows = load_index_queries(index, key_head, first_q, tile * QUERIES, num_q, SIZES)
        token, ok = rows.token, rows.ok
        own = (num_tokens - num_q + rows.query) // BLOCK_SIZE
        # Largest logarithm, and sums relative to it, of masses p and of scores a.
        p_max = tl.full([QUERIES], -1e30, tl.float32)
        a_max = tl.full([QUERIES], -1e30, tl.float32)
        p_sum = tl.zeros([QUERIES], tl.float32)
        a_sum = tl.zeros([QUERIES], tl.float32)
        difference = tl.zeros([QUERIES], tl.float32)  # of the logarithms, weighted by mass
        p_key = tl.zeros([ROWS, BLOCK_DI], tl.float32)
        a_key = tl.zeros([ROWS, BLOCK_DI], tl.float32)
        last = (num_tokens - num_q + tl.minimum((tile + 1) * QUERIES, num_q) - 1) // BLOCK_SIZE
        for j in tl.range(num_init, last - num_local + 1):
            key_row = first_key + j * BLOCK_SIZE
            mass = block_mass(attention, head_kv, token, ok, key_row, SIZES)
            score, weight, at = block_scores(index, key_head, rows, key_row, SIZES)
            ranked = j <= own - num_local
            new_p = tl.maximum(p_max, tl.where(ranked, mass, -float("inf")))
            new_a = tl.maximum(a_max, tl.where(ranked, score, -float("inf")))
            p = tl.exp2(tl.where(ranked, mass - new_p, -float("inf")))
            a = tl.exp2(tl.where(ranked, score - new_a, -float("inf")))
            p_less, a_less = tl.exp2(p_max - new_p), tl.exp2(a_max - new_a)
            p_max, a_max = new_p, new_a
            p_sum = p_sum * p_less + p
            a_sum = a_sum * a_less + a
            difference = difference * p_less + p * (mass - score)
            k = load_rows(  # keys of the largest products [ROWS, BLOCK_DI]
                k_head, at, rows.row_ok, stride_k_idx[0], SIZES.DI, SIZES.BLOCK_DI
            ).to(tl.float32)
            p_key = (
                p_key * spread(p_less, SIZES)[:, None] + (spread(p, SIZES) * weight)[:, None] * k
            )
            a_key = (
                a_key * spread(a_less, SIZES)[:, None] + (spread(a, SIZES) * weight)[:, None] * k
            )
        none = p_sum == 0
        p_sum = tl.where(none, 1.0, p_sum)
        a_sum = tl.where(none, 1.0, a_sum)
        p_log, a_log = p_max + tl.log2(p_sum), a_max + tl.log2(a_sum)
        loss = tl.where(none, 0.0, (difference / p_sum - p_log + a_log) * LN_2)
        tl.store(loss_ptr + token * HKV + head_kv, loss, mask=ok)
        count = tl.maximum(own - num_local + 1 - num_init, 0)
        tl.store(count_ptr + token * HKV + head_kv, count, mask=ok)
        norm_at = head_kv.to(tl.int64) * num_rows + token
        tl.store(norm_ptr + norm_at, p_log, mask=ok)
        norm_at += tl.full([], HKV, tl.int64) * num_rows
        tl.store(norm_ptr + norm_at, a_log, mask=ok)
        dq = a_key / spread(a_sum, SIZES)[:, None] - p_key / spread(p_sum, SIZES)[:, None]
        out = (rows.row_token * HKV + head_kv) * SIZES.IH + rows.inner
        d = tl.arange(0, BLOCK_DI)
        inside = rows.row_ok[:, None] & (d < SIZES.DI)[None, :]
        tl.store(dq_ptr + out[:, None] * SIZES.DI + d[None, :], dq, mask=inside)


@kernel(do_not_specialize=VARYING)
def index_loss_dk_kernel(
    q_idx_ptr,
    k_idx_ptr,
    q_ptr,
    k_ptr,
    lse_ptr,
    lse_idx_ptr,
    norm_ptr,
    dout_ptr,
    dk_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_rows,
    stride_q_idx,
    stride_k_idx,
    stride_q,
    stride_k,
    index_scale,
    softmax_scale,
    num_init,
    num_local,
    SIZES: tl.constexpr,
):
    """Write the gradient of the index keys ``[S, Hki, Di]``.

    Program (i, h) handles the i-th block of index key head h, in a loop over its KV heads and the
    queries that rank the block.
    """
    HKV: tl.constexpr = SIZES.HKV
    HKI: tl.constexpr = SIZES.HKI
    SHARED: tl.constexpr = HKV // HKI
    QUERIES: tl.constexpr = SIZES.QUERIES
    BLOCK_SIZE: tl.constexpr = SIZES.BLOCK_SIZE
    BLOCK_DI: tl.constexpr = SIZES.BLOCK_DI
    key_head = tl.program_id(1)
    attention = (q_ptr, k_ptr, lse_ptr, stride_q, stride_k, softmax_scale * LOG2_E, num_rows)
    scale = index_scale * LOG2_E
    index = (q_idx_ptr, k_idx_ptr, lse_idx_ptr, stride_q_idx, stride_k_idx, scale, num_rows)
    sequence, j = find_tile(cu_k_ptr, tl.program_id(0), num_sequences, len_k, BLOCK_SIZE)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        offset = num_tokens - num_q
        key_row = first_key + j * BLOCK_SIZE
        dk = tl.zeros([BLOCK_SIZE, BLOCK_DI], tl.float32)
        first = tl.maximum((j + num_local) * BLOCK_SIZE - offset, 0)
        end = num_q if j >= num_init else first
        for shared in tl.range(0, SHARED):
            head_kv = key_head * SHARED + shared
            for start in tl.range(first, end, QUERIES):
                rows = load_index_queries(index, key_head, first_q, start, num_q, SIZES)
                token, ok, q_idx = rows.token, rows.ok, rows.q
                mass = block_mass(attention, head_kv, token, ok, key_row, SIZES)
                score, weight, at = block_scores(index, key_head, rows, key_row, SIZES)
                norm_at = head_kv.to(tl.int64) * num_rows + token
                p_log = tl.load(norm_ptr + norm_at, mask=ok, other=0.0)
                norm_at += tl.full([], HKV, tl.int64) * num_rows
                a_log = tl.load(norm_ptr + norm_at, mask=ok, other=0.0)
                rest = tl.where(ok, tl.exp2(score - a_log) - tl.exp2(mass - p_log), 0.0)
                # Gradient of the products [ROWS, BLOCK_SIZE], one in a row.
                n = key_row + tl.arange(0, BLOCK_SIZE)
                ds = (spread(rest, SIZES) * weight)[:, None]
                ds = tl.where(at[:, None] == n[None, :], ds, 0.0).to(q_idx.dtype)
                dk = tl.dot(tl.trans(ds), q_idx, dk, input_precision="ieee")
        dk *= index_scale * tl.load(dout_ptr)
        inside = tl.arange(0, BLOCK_SIZE)
        out = (key_row + inside).to(tl.int64) * HKI + key_head
        d = tl.arange(0, BLOCK_DI)
        mask = (j * BLOCK_SIZE + inside < num_tokens)[:, None] & (d < SIZES.DI)[None, :]
        tl.store(dk_ptr + out[:, None] * SIZES.DI + d[None, :], dk, mask=mask)
