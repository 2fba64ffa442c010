"""Backward of the gathered algorithm; dK and dV of both algorithms; merge of dQ."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.gathered_rows import (
    SEGMENT,
    find_chunk,
    load_order,
    load_vector,
    locate_rows,
)
from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.selected_index_kernels import selections_scatter
from nsa.ops._triton.tiles import (
    LOG2_E,
    find_tile,
    key_gradient,
    load_rows,
    load_tile,
    of_keys,
    of_queries,
    products,
    sequence_rows,
    store_rows,
)
from nsa.ops.selected.gathered import load_slots, slot_rows


@triton.jit
def finish_keys(
    dk,
    dv,
    targets,
    key_block,
    key_blocks,
    row,
    ok,
    segments,
    softmax_scale,
    HEADS: tl.constexpr,
):
    """Add a segment's dK and dV of a key block to the sums of earlier segments.

    If the key block has no selections in later segments, this writes the final result.

    dk and dv are unscaled fp32 gradients of the keys in rows ``row`` of dK and dV ``[S * Hkv, D]``
    with mask ``ok``. ``targets`` are pointers to the sums of dK and dV (None if there is one
    segment), to dK and dV, and to begin and length, see ``Chunks``.
    """
    D: tl.constexpr = HEADS.D
    DV: tl.constexpr = HEADS.DV
    sums, grads, begin_ptr, length_ptr = targets
    segment, last_segment = segments
    final = True
    if sums is not None:
        dk_sum_ptr, dv_sum_ptr = sums
        # The selections of a key block are contiguous, segment by segment.
        begin = tl.load(begin_ptr + segment * key_blocks + key_block)
        end = begin + tl.load(length_ptr + segment * key_blocks + key_block)
        if begin > tl.load(begin_ptr + key_block):
            dk += load_rows(dk_sum_ptr, row, ok, D, D, HEADS.BLOCK_D)
            dv += load_rows(dv_sum_ptr, row, ok, DV, DV, HEADS.BLOCK_DV)
        at_last = last_segment * key_blocks + key_block
        final = end == tl.load(begin_ptr + at_last) + tl.load(length_ptr + at_last)
        if not final:
            store_rows(dk_sum_ptr, row, ok, dk, D)
            store_rows(dv_sum_ptr, row, ok, dv, DV)
    if final:
        dk_ptr, dv_ptr = grads
        store_rows(dk_ptr, row, ok, dk * softmax_scale, D)
        store_rows(dv_ptr, row, ok, dv, DV)


@triton.jit
def add_gradients(
    dk,
    dv,
    q,
    dout,
    lse,
    delta,
    k,
    v,
    key,
    t,
    causal,
    scale,
    KEYS_AS_ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add the contribution of rows ``[BLOCK_M]`` at positions t to keys ``[BLOCK_N]``.

    Returns:
        dK ``[BLOCK_N, BLOCK_D]`` and dV ``[BLOCK_N, BLOCK_DV]``, fp32, and the gradient of the
        scores, ``[BLOCK_N, BLOCK_M]`` if KEYS_AS_ROWS, otherwise ``[BLOCK_M, BLOCK_N]``.
    """
    s = products(q, k, KEYS_AS_ROWS)  # fp32, same layout as ds
    if EARLY:
        dp = products(dout, v, KEYS_AS_ROWS)
    # Probabilities, recomputed from lse.
    p = tl.exp2(s * scale - of_queries(lse, KEYS_AS_ROWS))
    if causal:
        p = tl.where(of_keys(key, KEYS_AS_ROWS) <= of_queries(t, KEYS_AS_ROWS), p, 0.0)
    # Gradients of values, scores and keys.
    dv = key_gradient(dv, p.to(dout.dtype), dout, KEYS_AS_ROWS)
    if not EARLY:
        dp = products(dout, v, KEYS_AS_ROWS)
    ds = (p * (dp - of_queries(delta, KEYS_AS_ROWS))).to(q.dtype)
    return key_gradient(dk, ds, q, KEYS_AS_ROWS), dv, ds


@triton.jit
def query_gradient(ds, k, KEYS_AS_ROWS: tl.constexpr):
    """Unscaled dQ ``[BLOCK_M, BLOCK_D]`` fp32 from the gradient of the scores."""
    # sm_90 tensor cores need at least 64 rows: use the columns of dQ as rows.
    if KEYS_AS_ROWS and ds.shape[1] < 64:
        return tl.trans(tl.dot(tl.trans(k), ds, input_precision="ieee"))
    else:
        ds = tl.trans(ds) if KEYS_AS_ROWS else ds
        return tl.dot(ds, k, input_precision="ieee")


@kernel(do_not_specialize=SEGMENT)
def selected_gather_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    part_ptr,
    partial,
    sums,
    grads,
    tile_stats_ptr,
    chunks,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_blocks,
    segment,
    segment_rows,
    chunk_size,
    last_segment,
    stride_q,
    stride_k,
    stride_v,
    stride_do,
    softmax_scale,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """dK and dV and, with ``part_ptr``, dQ ``[G, D]`` of every (query, slot).

    Program (i, p) handles part p of the block of the segment's i-th chunk of selections, in a loop
    over the rows of the chunk (queries by heads). If a key block has a single chunk, dK and dV are
    stored by ``finish_keys``; otherwise unscaled fp32 sums are stored in ``partial`` for
    ``selected_reduce_kernel``. With ``tile_stats_ptr`` the kernel runs only if selections scatter
    (with dQ), or only if they do not (without dQ).
    """
    DQ: tl.constexpr = part_ptr is not None
    if tile_stats_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED) != DQ:
            return
    G: tl.constexpr = HEADS.G
    D: tl.constexpr = HEADS.D
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    KEYS_AS_ROWS: tl.constexpr = TILE.keys_as_rows
    HKV: tl.constexpr = HEADS.HQ // G
    PARTS: tl.constexpr = BLOCKS.SIZE // BLOCK_N
    SMALL: tl.constexpr = BLOCK_D + BLOCK_DV <= 128
    # Small tiles leave registers for both input matmuls at once: the second runs during the
    # exponentiation of the first.
    EARLY: tl.constexpr = SMALL or BLOCK_M * (BLOCK_D + BLOCK_DV) <= 64 * 128
    # Load selections one step ahead of their rows, as in the forward. Large heads leave no
    # registers for them, but a deep pipeline requires it.
    AHEAD: tl.constexpr = SMALL or TILE.stages > 2
    # Either the loop is split where the mask ends, with the pipeline depth set on each loop, or one
    # loop applies the mask conditionally. Small heads without dQ are faster with the split loop:
    # 0.98 ms against 1.07 (seed shape, 32 sequences of 2,048 tokens, H200).
    SPLIT: tl.constexpr = SMALL and not DQ
    STAGES: tl.constexpr = TILE.stages if SPLIT else None
    sequences = (cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences)
    chunk = find_chunk(
        chunks, sequences, num_blocks, segment, segment_rows, chunk_size, HKV, BLOCKS
    )
    head_kv = chunk.head_kv
    if chunk.count > 0:
        first_q, num_q = sequence_rows(cu_q_ptr, chunk.sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, chunk.sequence, len_k)
        part = tl.program_id(1)
        n = chunk.block * BLOCKS.SIZE + part * BLOCK_N
        key = n + tl.arange(0, BLOCK_N)
        key_ok = key < num_tokens
        key_row = (first_key + key).to(tl.int64)
        # Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV].
        k_ptr += head_kv * stride_k[1]
        k = load_rows(k_ptr, key_row, key_ok, stride_k[0], D, BLOCK_D)
        v_ptr += head_kv * stride_v[1]
        v = load_rows(v_ptr, key_row, key_ok, stride_v[0], HEADS.DV, BLOCK_DV)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        first_row = segment.to(tl.int64) * segment_rows
        first = chunk.first_selection
        offset = (num_tokens - num_q - first_q + first_row).to(tl.int32)
        order_ptr = chunks[0] + chunk.begin
        num_rows = chunk.count * G
        # Queries are ordered, one per position: so many leading ones see only a part of the block.
        after = (chunk.block + 1) * BLOCKS.SIZE - 1
        hidden = tl.minimum(tl.maximum(after - chunk.t, 0), chunk.count)
        ahead = load_order(order_ptr, 0, num_rows, first, G, BLOCK_M, SPLIT)
        masked = tl.minimum(tl.cdiv(hidden * G, BLOCK_M) * BLOCK_M, num_rows) if SPLIT else 0
        scale = softmax_scale * LOG2_E
        bounds = (0, masked, num_rows)
        for past in tl.static_range(0 if SPLIT else 1, 2):
            for r in tl.range(bounds[past], bounds[past + 1], BLOCK_M, num_stages=STAGES):
                if AHEAD:
                    selection = ahead
                    ahead = load_order(order_ptr, r + BLOCK_M, num_rows, first, G, BLOCK_M, SPLIT)
                else:
                    selection = load_order(order_ptr, r, num_rows, first, G, BLOCK_M, SPLIT)
                rows = locate_rows(selection, r, num_rows, G, HKV * BLOCKS.N, BLOCK_M)
                token = first_row + rows.query
                head_q = head_kv * G + rows.head
                at = token * HEADS.HQ + head_q
                q_at = token * stride_q[0] + head_q * stride_q[1]
                q = load_tile(q_ptr, q_at, rows.ok, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
                dout_at = token * stride_do[0] + head_q * stride_do[1]
                # [BLOCK_M, BLOCK_DV]
                dout = load_tile(dout_ptr, dout_at, rows.ok, HEADS.DV, BLOCK_DV)
                lse = load_vector(lse_ptr + at, rows.ok, float("inf"), SPLIT) * LOG2_E
                delta = load_vector(delta_ptr + at, rows.ok, 0.0, SPLIT)
                causal = past == 0 if SPLIT else r < hidden * G
                t = offset + rows.query
                dk, dv, ds = add_gradients(
                    dk, dv, q, dout, lse, delta, k, v, key, t, causal, scale, KEYS_AS_ROWS, EARLY
                )
                if DQ:
                    dq = query_gradient(ds, k, KEYS_AS_ROWS)  # [BLOCK_M, BLOCK_D] fp32
                    slot = (rows.selection * PARTS + part) * G + rows.head
                    store_rows(part_ptr, slot, rows.ok, dq * softmax_scale, D)
        if chunk.alone:
            targets = (sums, grads, chunks[1], chunks[2])
            row, key_blocks = key_row * HKV + head_kv, HKV * num_blocks
            block, segments = chunk.key_block, (segment, last_segment)
            finish_keys(
                dk, dv, targets, block, key_blocks, row, key_ok, segments, softmax_scale, HEADS
            )
        else:
            dk_part_ptr, dv_part_ptr = partial
            inside = key - chunk.block * BLOCKS.SIZE
            out_row = tl.program_id(0).to(tl.int64) * BLOCKS.SIZE + inside
            store_rows(dk_part_ptr, out_row, key_ok, dk, D)
            store_rows(dv_part_ptr, out_row, key_ok, dv, HEADS.DV)


@kernel(do_not_specialize=SEGMENT)
def selected_reduce_kernel(
    begin_ptr,
    length_ptr,
    start_ptr,
    partial,
    sums,
    grads,
    tile_stats_ptr,
    cu_k_ptr,
    len_k,
    num_sequences,
    num_blocks,
    segment,
    last_segment,
    softmax_scale,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DQ: tl.constexpr,
):
    """Sum the dK and dV of a segment's chunks, in order.

    Program (i, h, p) handles the p-th ``BLOCK_K`` keys of block i of KV head h, and adds
    ``BLOCK_C`` chunks at a time. A key block with one chunk is complete already; one that no query
    selected is set to 0.
    """
    if tile_stats_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED) != DQ:
            return
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    HKV: tl.constexpr = HEADS.HQ // HEADS.G
    dk_part_ptr, dv_part_ptr = partial
    key_blocks = HKV * num_blocks
    head = tl.program_id(1)
    key_block = head * num_blocks + tl.program_id(0)
    at = segment * key_blocks + key_block
    first = tl.load(start_ptr + segment * key_blocks)
    begin = tl.load(start_ptr + at) - first
    end = tl.load(start_ptr + at + 1) - first
    at_last = last_segment * key_blocks + key_block
    selections_end = tl.load(begin_ptr + at_last) + tl.load(length_ptr + at_last)
    selected = tl.load(begin_ptr + key_block) < selections_end
    if (end > begin + 1) | ((segment == last_segment) & (not selected)):
        sequence, block = find_tile(cu_k_ptr, tl.program_id(0), num_sequences, len_k, BLOCKS.SIZE)
        if sequence < num_sequences:
            first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
            inside = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
            ok = block * BLOCKS.SIZE + inside < num_tokens
            dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
            for chunk in tl.range(begin, end, BLOCK_C):
                chunks = chunk + tl.arange(0, BLOCK_C)
                part = chunks[None, :] * BLOCKS.SIZE + inside[:, None]  # [BLOCK_K, BLOCK_C]
                there = ok[:, None] & (chunks < end)[None, :]
                dk += tl.sum(load_slots(dk_part_ptr, part, there, HEADS.D, BLOCK_D), 1)
                dv += tl.sum(load_slots(dv_part_ptr, part, there, HEADS.DV, BLOCK_DV), 1)
            row = (first_key + block * BLOCKS.SIZE + inside).to(tl.int64) * HKV + head
            targets = (sums, grads, begin_ptr, length_ptr)
            segments = (segment, last_segment)
            finish_keys(
                dk, dv, targets, key_block, key_blocks, row, ok, segments, softmax_scale, HEADS
            )


@kernel(do_not_specialize=SEGMENT)
def selected_merge_dq_kernel(
    part_ptr,
    key_ptr,
    dq_ptr,
    tile_stats_ptr,
    num_rows,
    segment,
    segment_rows,
    absent,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STEPS: tl.constexpr,
    ADD: tl.constexpr,
):
    """dQ of a segment, accumulated if ``ADD``: the sum over the slots, in fp32.

    Programs handle the same rows as in ``selected_merge_out_kernel``.
    """
    D: tl.constexpr = HEADS.D
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    if selections_scatter(tile_stats_ptr, BLOCKS.SCATTERED):
        for step in tl.range(0, STEPS, num_stages=1):
            r = (tl.program_id(0) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
            first_row = segment.to(tl.int64) * segment_rows
            row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HEADS.HQ
            dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for first in tl.range(0, BLOCKS.N * PARTS, BLOCK_S):
                part, ok = slot_rows(
                    key_ptr, r, row_ok, first, first_row, absent, HEADS, BLOCKS.N, PARTS, BLOCK_S
                )
                dq += tl.sum(load_slots(part_ptr, part, ok, D, BLOCK_D), 1)
            row = first_row * HEADS.HQ + r
            if ADD:
                dq += load_rows(dq_ptr, row, row_ok, D, D, BLOCK_D).to(tl.float32)
            store_rows(dq_ptr, row, row_ok, dq, D)
