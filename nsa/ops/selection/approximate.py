"""Block selection with two stages (``two_stage.py``), fp8 scoring (``fp8.py``) or both."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import LOG2_E, VARYING, find_tile
from nsa.ops.selection.fp8 import load_key_scales, load_scaled_head, scaled_probabilities
from nsa.ops.selection.kernels import (
    load_compressed,
    query_block,
    rank_blocks,
    start_ranking,
    store_selection,
)
from nsa.ops.selection.two_stage import kept_columns


@triton.jit
def load_scaled_group(
    q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, head_kv, stride_q, HEADS: tl.constexpr
):
    """Load every head of a group with ``load_scaled_head``."""
    G: tl.constexpr = HEADS.G
    heads = ()
    for h in tl.static_range(G):
        number = head_kv * G + h
        head = load_scaled_head(
            q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, number, stride_q, HEADS
        )
        heads = heads + (head,)  # noqa: RUF005  Triton has no starred expressions
    return heads


@kernel(do_not_specialize=VARYING)
def select_approximate_kernel(
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
    """Write the selected blocks, int32 ``[T, Hkv, n]``; same program grid as ``select_kernel``.

    ``coarse_ptr``: int32 ``[T, Hkv, NUM_COARSE]``, coarse blocks kept by the first stage, of
    ``FACTOR`` blocks each; one stage if ``FACTOR`` is 0.
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
            heads = load_scaled_group(
                q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, head_kv, stride_q, HEADS
            )
        end = queries.t_last // SCORING.BLOCK_SIZE + 1
        for j0 in tl.range(0, end, BLOCK_J, num_stages=TILE.stages if TILE.keep_queries else 1):
            if FACTOR > 0:
                kept_here = kept_next
                kept_next, place, block = kept_columns(
                    coarse, queries.ok, place, block, j0 + BLOCK_J, BLOCK_J, FACTOR, NUM_COARSE
                )
                wanted = tl.max(tl.max((kept_here | kept_next).to(tl.int32), 1), 0) > 0
                local = queries.t_first // SCORING.BLOCK_SIZE + 1 - num_local
                active = wanted | (j0 < num_init) | (j0 + BLOCK_J > local)
            else:
                kept_here = None
                active = True
            if active:
                key = j0 * R + tl.arange(0, R * BLOCK_J)
                k_head = k_ptr + head_kv * stride_k[1]
                k = load_compressed(k_head, queries, key, stride_k, HEADS)
                k_scale = load_key_scales(k_scale_ptr, queries, key, head_kv, HKV)
                p = tl.zeros([BLOCK_Q, R * BLOCK_J], tl.float32)
                if TILE.keep_queries:
                    for h in tl.static_range(G):
                        p += scaled_probabilities(heads[h], k, k_scale, scale, SCALED)
                else:
                    for h in tl.range(0, G, num_stages=TILE.stages):
                        head = load_scaled_head(
                            q_ptr,
                            q_scale_ptr,
                            lse_ptr,
                            queries,
                            num_rows,
                            head_kv * G + h,
                            stride_q,
                            HEADS,
                        )
                        p += scaled_probabilities(head, k, k_scale, scale, SCALED)
                carry, best = rank_blocks(
                    p, carry, best, queries, key, j0, jj, kept_here, num_init, num_local, SCORING
                )
        store_selection(out_ptr, best, queries, head_kv, HKV, SCORING, COUNTS)
