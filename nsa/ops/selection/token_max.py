"""Selection of blocks by the largest product of the query with one of their tokens.

One pass over the keys. The score of a block needs one exponential per head, not one per token:
``exp(m - L)``, with m the largest product in the block and L the log-sum-exp of the forced blocks,
which ``token_lse_kernel`` computes before. Products need no causal mask: only the query's own block
contains later tokens, and it is forced. So are the tokens after the end of a sequence.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import LOG2_E, VARYING, find_tile
from nsa.ops.selection.fp8 import load_scales
from nsa.ops.selection.kernels import (
    load_compressed,
    load_group,
    load_head,
    merge_scores,
    query_block,
    start_ranking,
    store_selection,
)

# Largest exponent, base 2; see `MAX_EXPONENT` in reference.py.
LIMIT = tl.constexpr(80 * 1.4426950408889634)


@triton.jit
def block_maxima(s, SIZE: tl.constexpr):
    """Largest of each ``SIZE`` products ``[M, N]`` of a query, ``[M, N // SIZE]``."""
    return tl.max(s.reshape(s.shape[0], s.shape[1] // SIZE, SIZE), 2)


@triton.jit
def largest(q, k, SIZE: tl.constexpr):
    """Largest product of each query ``[Q, D]`` with each ``SIZE`` of the keys ``[N, D]``."""
    return block_maxima(tl.dot(q, tl.trans(k), input_precision="ieee"), SIZE)


@triton.jit
def weights(
    head,
    k,
    k_scale,
    k_ptr,
    queries,
    key,
    stride_k,
    scale,
    HEADS: tl.constexpr,
    SCORING: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``exp(m - L)`` ``[BLOCK_Q, PER]`` of a loaded head in the blocks of the keys ``k``.

    If ``k`` contains only the first part of a block, the other parts are loaded.
    """
    COLUMNS: tl.constexpr = k.shape[0]
    q, lse, q_scale = head
    m = largest(q, k, min(COLUMNS, SCORING.BLOCK_SIZE))
    for part in tl.static_range(1, SCORING.BLOCK_SIZE // COLUMNS):
        more = load_compressed(k_ptr, queries, key + part * COLUMNS, stride_k, HEADS)
        m = tl.maximum(m, largest(q, more, COLUMNS))
    if SCALED:
        m = m * q_scale[:, None] * k_scale[None, :]
    return tl.exp2(tl.minimum(m * scale - lse[:, None], LIMIT))


@kernel(do_not_specialize=VARYING)
def select_token_max_kernel(
    q_ptr,
    k_ptr,
    q_scale_ptr,
    k_scale_ptr,
    lse_ptr,
    out_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
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
    COLUMNS: tl.constexpr,
):
    """Write the selected blocks, int32 ``[T, Hkv, n]``.

    Program (i, h) handles the i-th tile of queries from the end and KV head h, in a loop over
    the selection blocks, ``TILE.keys`` at a time. Products cover ``COLUMNS`` tokens: several whole
    blocks, or a part of one.

    Scales: see ``fp8.py``; those of keys are equal within a block.
    """
    G: tl.constexpr = HEADS.G
    HKV: tl.constexpr = HEADS.HQ // G
    BLOCK_Q: tl.constexpr = TILE.rows
    BLOCK_J: tl.constexpr = TILE.keys
    BLOCK_SIZE: tl.constexpr = SCORING.BLOCK_SIZE
    PER: tl.constexpr = max(COLUMNS // BLOCK_SIZE, 1)  # blocks per product
    SCALED: tl.constexpr = q_scale_ptr is not None
    head_kv = tl.program_id(1)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        queries = query_block(
            cu_q_ptr, cu_k_ptr, cu_k_ptr, len_q, len_k, len_k, sequence, tile, SCORING, BLOCK_Q
        )
        scale = softmax_scale * LOG2_E
        jj = tl.arange(0, BLOCK_J)
        _, best = start_ranking(BLOCK_Q, SCORING)
        if TILE.keep_queries:
            heads = load_group(
                q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, head_kv, stride_q, HEADS
            )
        k_head = k_ptr + head_kv * stride_k[1]
        end = queries.t_last // BLOCK_SIZE + 1
        for j0 in tl.range(0, end, BLOCK_J, num_stages=1):
            score = tl.zeros([BLOCK_Q, BLOCK_J // PER, PER], tl.float32)
            for u in tl.range(
                0, BLOCK_J // PER, num_stages=TILE.stages if TILE.keep_queries else 1
            ):
                j = j0 + u * PER
                key = j * BLOCK_SIZE + tl.arange(0, COLUMNS)
                block = j + tl.arange(0, PER)
                k = load_compressed(k_head, queries, key, stride_k, HEADS)
                k_scale = load_scales(
                    k_scale_ptr,
                    queries.first_key + block * BLOCK_SIZE,
                    block * BLOCK_SIZE < queries.num_keys,
                    head_kv,
                    HKV,
                )
                p = tl.zeros([BLOCK_Q, PER], tl.float32)
                if TILE.keep_queries:
                    for h in tl.static_range(G):
                        p += weights(
                            heads[h],
                            k,
                            k_scale,
                            k_head,
                            queries,
                            key,
                            stride_k,
                            scale,
                            HEADS,
                            SCORING,
                            SCALED,
                        )
                else:
                    for h in tl.range(0, G, num_stages=TILE.stages):
                        head = load_head(
                            q_ptr,
                            q_scale_ptr,
                            lse_ptr,
                            queries,
                            num_rows,
                            head_kv * G + h,
                            stride_q,
                            HEADS,
                        )
                        p += weights(
                            head,
                            k,
                            k_scale,
                            k_head,
                            queries,
                            key,
                            stride_k,
                            scale,
                            HEADS,
                            SCORING,
                            SCALED,
                        )
                here = (tl.arange(0, BLOCK_J // PER) == u)[None, :, None]
                score = tl.where(here, p[:, None, :], score)
            score = score.reshape(BLOCK_Q, BLOCK_J)
            best = merge_scores(score, best, queries, j0, jj, None, num_init, num_local, SCORING)
        where = (head_kv, num_init, num_local)
        store_selection(out_ptr, best, queries, where, HKV, SCORING, COUNTS)
