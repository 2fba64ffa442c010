"""Scores of selection blocks and the best n in one pass: no buffer over queries by keys or blocks.

The heads of a group are visited one after the other and their probabilities added into one tile
over the compressed keys of a step's blocks, so the sum over the group (Eq. 10) costs nothing and G
needs no padding. The stencil of Eq. 9 is applied once to the sum: a compression block gives
``min(O, R - m)`` of its overlap to the selection block that it starts in and ``max(m + O - R, 0)``
to the next one, where ``O = l / d``, ``R = l' / d`` and m is its place in the block. The best n so
far are kept sorted as int64 keys, score above inverted id, so that ties go to the lower id; those
of a step are found by a bitonic top-k and merged.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import LOG2_E, VARYING, find_tile
from nsa.ops.selection.scores import (
    load_compressed,
    load_head,
    query_block,
    rank_blocks,
    start_ranking,
    store_selection,
)


@triton.jit
def load_group(q_ptr, lse_ptr, queries, num_rows, head_kv, stride_q, HEADS: tl.constexpr):
    """``load_head`` of every head of a group."""
    G: tl.constexpr = HEADS.G
    heads = ()
    for h in tl.static_range(G):
        head = load_head(q_ptr, lse_ptr, queries, num_rows, head_kv * G + h, stride_q, HEADS)
        heads = heads + (head,)  # noqa: RUF005  Triton has no starred expressions
    return heads


@triton.jit
def probabilities(head, k, scale):
    """Probabilities ``[BLOCK_Q, BLOCK_C]`` fp32 of compressed keys, for what ``load_head`` gave."""
    q, lse = head
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.exp2(s * scale - lse[:, None])


@kernel(do_not_specialize=VARYING)
def select_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
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
):
    """Selected blocks, int32 ``[T, Hkv, n]``.

    Program (i, h) owns the i-th tile of queries from the end and KV head h, and walks over the
    selection blocks, ``TILE.keys`` at a time.
    """
    G: tl.constexpr = HEADS.G
    BLOCK_Q: tl.constexpr = TILE.rows
    BLOCK_J: tl.constexpr = TILE.keys
    R: tl.constexpr = SCORING.BLOCK_SIZE // SCORING.STRIDE
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
        if TILE.keep_queries:
            heads = load_group(q_ptr, lse_ptr, queries, num_rows, head_kv, stride_q, HEADS)
        end = queries.t_last // SCORING.BLOCK_SIZE + 1
        for j0 in tl.range(0, end, BLOCK_J, num_stages=TILE.stages if TILE.keep_queries else 1):
            key = j0 * R + tl.arange(0, R * BLOCK_J)
            k_head = k_ptr + head_kv * stride_k[1]
            k = load_compressed(k_head, queries, key, stride_k, HEADS)
            p = tl.zeros([BLOCK_Q, R * BLOCK_J], tl.float32)
            if TILE.keep_queries:
                for h in tl.static_range(G):
                    p += probabilities(heads[h], k, scale)
            else:
                for h in tl.range(0, G, num_stages=TILE.stages):
                    head = load_head(
                        q_ptr, lse_ptr, queries, num_rows, head_kv * G + h, stride_q, HEADS
                    )
                    p += probabilities(head, k, scale)
            carry, best = rank_blocks(
                p, carry, best, queries, key, j0, jj, None, num_init, num_local, SCORING
            )
        store_selection(out_ptr, best, queries, head_kv, HEADS.HQ // G, SCORING, COUNTS)
