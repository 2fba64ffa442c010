"""Range attention (window and compressed branch): every query sees one range of keys.

A query at position t sees the keys ``[low(t), high(t))`` of its sequence. ``WINDOW``: tokens
``[max(0, t - w + 1), t + 1)``; otherwise the compressed blocks ``[0, num_cmp(t))``. All heads of a
group are rows of one tile and share its loads, see ``QueryTile``; a tile may end between the heads
of a query. Keys at the edges of a tile's range are masked, those in the middle are not.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import (
    LOG2_E,
    VARYING,
    Span,
    find_tile,
    key_gradient,
    load_column,
    load_keys,
    load_rows,
    load_statistics,
    load_tile,
    of_keys,
    of_queries,
    products,
    query_tile,
    sequence_rows,
    softmax_result,
    softmax_start,
    softmax_step,
    store_rows,
)


def name_of(kernel: str) -> Callable[[Any], str]:
    """Name a compiled kernel with its branch as a suffix, to tell them apart in a profile."""
    return lambda given: f"{kernel}_{'window' if given.constants['WINDOW'] else 'compressed'}"


@triton.jit
def low(t, size, WINDOW: tl.constexpr):
    """First visible key of a query at t."""
    if WINDOW:
        return tl.maximum(t - size + 1, 0)
    else:
        return t * 0


@triton.jit
def high(t, size, stride, WINDOW: tl.constexpr):
    """One past the last visible key of a query at t."""
    # num_cmp(t) = (t + 1 - l) // d + 1, written so that no operand of the division is negative.
    if WINDOW:
        return t + 1
    else:
        return tl.maximum(t + 1 - size + stride, 0) // stride


@triton.jit
def visible(end, key, size, WINDOW: tl.constexpr):
    """Whether a query with ``end = high(t)`` sees a key; ``end`` and ``key`` are broadcast."""
    if WINDOW:
        # One unsigned comparison: keys at or after end wrap around to very large numbers.
        return (end - 1 - key).to(tl.uint32, bitcast=True) < size
    else:
        return key < end


@triton.jit
def key_steps(t_first, t_last, num_keys, size, stride, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Bounds of the key loop for a query tile: start, middle, tail, last, end.

    Steps from start to middle and from tail to last need a mask, those in between do not; a step
    from last to end reaches past the sequence.
    """
    end = high(t_last, size, stride, WINDOW)
    last = tl.minimum(end, num_keys // BLOCK_N * BLOCK_N)
    start = tl.minimum(low(t_first, size, WINDOW) // BLOCK_N * BLOCK_N, last)
    middle = tl.minimum((low(t_last, size, WINDOW) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, last)
    unmasked_end = high(t_first, size, stride, WINDOW) // BLOCK_N * BLOCK_N
    tail = tl.minimum(tl.maximum(unmasked_end, middle), last)
    return start, middle, tail, last, end


@kernel(do_not_specialize=VARYING, repr=name_of("range_fwd_kernel"))
def range_fwd_kernel(
    q_ptr,
    k_source,
    v_source,
    out_ptr,
    lse_ptr,
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
    stride_v,
    softmax_scale,
    size,
    stride,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write out ``[T, Hq, Dv]`` and lse ``[Hq, T]``.

    Program (i, h) computes the i-th tile of rows from the end, queries by query heads of KV head h,
    in a loop over the keys visible to any of its queries.
    """
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    head_kv = tl.program_id(1)
    # The last tiles see the most keys, so they start first.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_M, HEADS.G)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
        keys = Span(head_kv, first_key, num_keys)
        rows = query_tile(tile, head_kv, first_q, num_q, num_tokens, HEADS.G, BLOCK_M, BLOCK_M)
        q_at = rows.token * stride_q[0] + rows.head * stride_q[1]
        q = load_tile(q_ptr, q_at, rows.ok, HEADS.D, HEADS.BLOCK_D)  # [BLOCK_M, BLOCK_D]
        row_max, total, acc = softmax_start(BLOCK_M, HEADS.BLOCK_DV)
        scale = softmax_scale * LOG2_E
        visible_end = high(rows.t, size, stride, WINDOW)  # [BLOCK_M]
        start, middle, tail, last, end = key_steps(
            rows.t_first, rows.t_last, num_keys, size, stride, BLOCK_N, WINDOW
        )
        # The step past the sequence, at most one, is a loop as well: for large heads a branch
        # would cost hundreds of bytes of stack.
        bounds = (start, last, end)
        for past_end in tl.static_range(2):
            for n in tl.range(
                bounds[past_end],
                bounds[past_end + 1],
                BLOCK_N,
                num_stages=1 if past_end else TILE.stages,
            ):
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
                masked = True if past_end else (n < middle) | (n >= tail)
                if masked:
                    key = n + tl.arange(0, BLOCK_N)[None, :]
                    seen = visible(visible_end[:, None], key, size, WINDOW)
                    s = tl.where(seen, s, -float("inf"))
                row_max, total, acc = softmax_step(s, v, row_max, total, acc, scale)

        # Normalize and store.
        out, lse = softmax_result(row_max, total, acc)
        store_rows(out_ptr, rows.token * HEADS.HQ + rows.head, rows.ok, out, HEADS.DV)
        lse_of_head = lse_ptr + rows.head.to(tl.int64) * num_rows
        tl.store(lse_of_head + first_q + rows.row, lse, mask=rows.ok)


@kernel(do_not_specialize=VARYING, repr=name_of("range_dq_kernel"))
def range_dq_kernel(
    q_ptr,
    k_source,
    v_source,
    out_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    gated,
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
    stride_v,
    stride_do,
    softmax_scale,
    size,
    stride,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write dQ ``[T, Hq, D]``, accumulated if ``ADD``; programs compute the tiles of the forward.

    Also writes delta and, with gates, the gated lse, ``[Hq, T]`` each, for the dK and dV kernel;
    see ``load_statistics``.
    """
    D: tl.constexpr = HEADS.D
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    BRANCH: tl.constexpr = 2 if WINDOW else 0
    head_kv = tl.program_id(1)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_M, HEADS.G)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
        keys = Span(head_kv, first_key, num_keys)
        rows = query_tile(tile, head_kv, first_q, num_q, num_tokens, HEADS.G, BLOCK_M, BLOCK_M)
        q_at = rows.token * stride_q[0] + rows.head * stride_q[1]
        dout_at = rows.token * stride_do[0] + rows.head * stride_do[1]
        q = load_tile(q_ptr, q_at, rows.ok, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        dout = load_tile(
            dout_ptr, dout_at, rows.ok, HEADS.DV, HEADS.BLOCK_DV
        )  # [BLOCK_M, BLOCK_DV]
        out_row = rows.token * HEADS.HQ + rows.head
        at = rows.head.to(tl.int64) * num_rows + first_q + rows.row
        delta, lse = load_statistics(
            out_ptr,
            lse_ptr + at,
            delta_ptr,
            gated,
            dout,
            out_row,
            at,
            rows.ok,
            BRANCH,
            HEADS.DV,
            HEADS.BLOCK_DV,
        )
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        scale = softmax_scale * LOG2_E
        visible_end = high(rows.t, size, stride, WINDOW)  # [BLOCK_M]
        start, middle, tail, last, end = key_steps(
            rows.t_first, rows.t_last, num_keys, size, stride, BLOCK_N, WINDOW
        )
        # As in the forward: the step past the sequence, at most one, is a separate loop.
        bounds = (start, last, end)
        for past_end in tl.static_range(2):
            for n in tl.range(
                bounds[past_end],
                bounds[past_end + 1],
                BLOCK_N,
                num_stages=1 if past_end else TILE.stages,
            ):
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
                masked = True if past_end else (n < middle) | (n >= tail)
                if masked:
                    key = n + tl.arange(0, BLOCK_N)[None, :]
                    p = tl.where(visible(visible_end[:, None], key, size, WINDOW), p, 0.0)
                ds = (p * (dp - delta[:, None])).to(k.dtype)
                dq = tl.dot(ds, k, dq, input_precision="ieee")
        dq *= softmax_scale
        if ADD:
            dq += load_rows(dq_ptr, out_row, rows.ok, D, D, BLOCK_D).to(tl.float32)
        store_rows(dq_ptr, out_row, rows.ok, dq, D)


@triton.jit
def query_range(n, num_q, num_tokens, size, stride, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Query rows that see any of the keys ``n .. n + BLOCK_N``.

    Returns:
        The first row, the first that sees all keys, one past the last that does, and the end.
    """
    offset = num_tokens - num_q  # position of query row 0
    if WINDOW:
        first = n
        end = tl.minimum(n + BLOCK_N - 1 + size, num_tokens)
        all_first = n + BLOCK_N - 1
        all_end = tl.minimum(n + size, num_tokens)
    else:
        first = n * stride + size - 1
        end = num_tokens
        all_first = first + (BLOCK_N - 1) * stride
        all_end = num_tokens
    first = tl.maximum(first - offset, 0)
    end = tl.maximum(end - offset, first)
    all_first = tl.minimum(tl.maximum(all_first - offset, first), end)
    all_end = tl.minimum(tl.maximum(all_end - offset, all_first), end)
    return first, all_first, all_end, end


@kernel(do_not_specialize=VARYING, repr=name_of("range_dkv_kernel"))
def range_dkv_kernel(
    q_source,
    k_ptr,
    v_ptr,
    dout_source,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_key_ptr,
    len_q,
    len_k,
    len_key,
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
    stride,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """dK and dV: final ``[N, Hkv, D]`` with one chunk, else fp32 sums ``[chunks, N, Hkv, D]``.

    Program (i, h, c) computes the i-th block of keys of KV head h, in a loop over the queries of
    chunk c that see any of them, head by head.
    """
    D: tl.constexpr = HEADS.D
    DV: tl.constexpr = HEADS.DV
    TMA: tl.constexpr = TILE.tma
    G: tl.constexpr = HEADS.G
    HKV: tl.constexpr = HEADS.HQ // G
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    KEYS_AS_ROWS: tl.constexpr = TILE.keys_as_rows
    # Small heads leave registers for both input matmuls at once: the second runs during the
    # exponentiation of the first.
    EARLY: tl.constexpr = BLOCK_D + BLOCK_DV <= 128
    head_kv = tl.program_id(1)
    chunk = tl.program_id(2)
    sequence, tile = find_tile(cu_key_ptr, tl.program_id(0), num_sequences, len_key, BLOCK_N)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
        n = tile * BLOCK_N
        first, all_first, all_end, end = query_range(
            n, num_q, num_tokens, size, stride, BLOCK_N, WINDOW
        )
        first = tl.maximum(first, chunk * chunk_rows)
        end = tl.minimum(end, (chunk + 1) * chunk_rows)
        all_first = tl.minimum(tl.maximum(all_first, first), end)
        all_end = tl.minimum(tl.maximum(all_end, all_first), end)
        key = n + tl.arange(0, BLOCK_N)
        key_ok = key < num_keys
        key_row = (first_key + key).to(tl.int64)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        if (first < end) | (tl.num_programs(2) == 1):
            # Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV].
            k_ptr += head_kv * stride_k[1]
            k = load_rows(k_ptr, key_row, key_ok, stride_k[0], D, BLOCK_D)
            v_ptr += head_kv * stride_v[1]
            v = load_rows(v_ptr, key_row, key_ok, stride_v[0], DV, BLOCK_DV)
            offset = num_tokens - num_q
            scale = softmax_scale * LOG2_E
            # Query tiles, each processed once per head: masked, unmasked, masked, and past the end
            # of the sequence.
            end = tl.maximum(end, first)
            tiles = (end - first + BLOCK_M - 1) // BLOCK_M
            last = tl.minimum(tiles, (num_q - first) // BLOCK_M)
            middle = tl.minimum((all_first - first + BLOCK_M - 1) // BLOCK_M, last)
            tail = tl.minimum(tl.maximum((all_end - first) // BLOCK_M, middle), last)
            if not WINDOW:
                last = tail  # only the tile past the chunk's end remains, if any
            bounds = (0, middle, tail, last, tiles)
            stages: tl.constexpr = (TILE.edge_stages, TILE.stages, TILE.edge_stages, 1)
            for part in tl.static_range(4):
                for i in tl.range(bounds[part] * G, bounds[part + 1] * G, num_stages=stages[part]):
                    row = first + i // G * BLOCK_M
                    head = head_kv * G + i % G
                    queries = Span(head, first_q, num_q)
                    # Load queries [BLOCK_M, BLOCK_D] and dout [BLOCK_M, BLOCK_DV].
                    q = load_keys(
                        q_source, queries, row, stride_q, D, BLOCK_D, BLOCK_M, part == 3, TMA
                    )
                    dout = load_keys(
                        dout_source, queries, row, stride_do, DV, BLOCK_DV, BLOCK_M, part == 3, TMA
                    )
                    m = tl.arange(0, BLOCK_M)
                    at = head.to(tl.int64) * num_rows + first_q + row
                    inside = row + m < end if part != 1 else None
                    lse = load_column(lse_ptr + at + m, inside, float("inf")) * LOG2_E  # [BLOCK_M]
                    delta = load_column(delta_ptr + at + m, inside, 0.0)  # [BLOCK_M]
                    t = offset + row + m
                    # Scores and their gradients: [BLOCK_N, BLOCK_M] fp32 if KEYS_AS_ROWS,
                    # otherwise [BLOCK_M, BLOCK_N].
                    s = products(q, k, KEYS_AS_ROWS)
                    if EARLY:
                        dp = products(dout, v, KEYS_AS_ROWS)
                    # Probabilities, recomputed from lse.
                    p = tl.exp2(s * scale - of_queries(lse, KEYS_AS_ROWS))
                    if part != 1:
                        visible_end = of_queries(high(t, size, stride, WINDOW), KEYS_AS_ROWS)
                        seen = visible(visible_end, of_keys(key, KEYS_AS_ROWS), size, WINDOW)
                        p = tl.where(seen, p, 0.0)
                    if not EARLY:
                        dp = products(dout, v, KEYS_AS_ROWS)
                    # Gradients of values, scores and keys.
                    dv = key_gradient(dv, p.to(dout.dtype), dout, KEYS_AS_ROWS)
                    ds = (p * (dp - of_queries(delta, KEYS_AS_ROWS))).to(q.dtype)
                    dk = key_gradient(dk, ds, q, KEYS_AS_ROWS)
            out_row = (chunk.to(tl.int64) * num_rows_key + key_row) * HKV + head_kv
            store_rows(dk_ptr, out_row, key_ok, dk * softmax_scale, D)
            store_rows(dv_ptr, out_row, key_ok, dv, DV)


@kernel(do_not_specialize=VARYING, repr=name_of("range_reduce_kernel"))
def range_reduce_kernel(
    dk_part_ptr,
    dv_part_ptr,
    dk_ptr,
    dv_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_key_ptr,
    len_q,
    len_k,
    len_key,
    num_sequences,
    chunk_rows,
    num_rows_key,
    size,
    stride,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Sum the chunks of dK and dV in order; chunks without a query wrote nothing.

    Program (i, h, 0) computes dK of the i-th block of keys of KV head h, program (i, h, 1) its dV.
    """
    HKV: tl.constexpr = HEADS.HQ // HEADS.G
    head_kv = tl.program_id(1)
    sequence, tile = find_tile(cu_key_ptr, tl.program_id(0), num_sequences, len_key, BLOCK_N)
    if sequence < num_sequences:
        _, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
        n = tile * BLOCK_N
        first, _, _, end = query_range(n, num_q, num_tokens, size, stride, BLOCK_N, WINDOW)
        key = n + tl.arange(0, BLOCK_N)
        ok = key < num_keys
        row = (first_key + key).to(tl.int64) * HKV + head_kv
        step = num_rows_key.to(tl.int64) * HKV
        where = (row, ok, first, end, chunk_rows, step)
        if tl.program_id(2) == 0:
            sum_chunks(dk_part_ptr, dk_ptr, where, HEADS.D, BLOCK_N, HEADS.BLOCK_D)
        else:
            sum_chunks(dv_part_ptr, dv_ptr, where, HEADS.DV, BLOCK_N, HEADS.BLOCK_DV)


@triton.jit
def sum_chunks(
    part_ptr, out_ptr, where, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store the sum of the rows over the chunks of queries first to end, 0 without any.

    ``where``: rows ``[BLOCK_N]``, their mask, first and end, queries per chunk, and the stride
    between chunks in rows.
    """
    row, ok, first, end, chunk_rows, step = where
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if first < end:
        part = row + (first // chunk_rows).to(tl.int64) * step
        for _ in tl.range(first // chunk_rows, (end - 1) // chunk_rows + 1):
            total += load_rows(part_ptr, part, ok, D, D, BLOCK_D)
            part += step
    store_rows(out_ptr, row, ok, total, D)
