"""Backward of range attention: dQ over the keys of a tile of queries, dK and dV over the queries of a block of keys.

Nothing is added up with atomics: the queries of a key block are cut into chunks, whose partial sums
a second kernel adds in order.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.range_attention import high, key_steps, load_keys, name_of, visible
from nsa.ops._triton.tiles import (
    LOG2_E,
    VARYING,
    find_tile,
    gated_lse,
    load_column,
    load_rows,
    sequence_rows,
    store_rows,
)


@triton.jit
def range_dq_step(
    q, dout, lse, delta, k_source, v_source, n, dq, edge, visible_end, size, scale, head, first_key, num_keys,
    stride_k, stride_kh, stride_v, stride_vh, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, LAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the share of ``BLOCK_N`` keys from n on, masked at an ``edge``, to dQ ``[BLOCK_M, BLOCK_D]``."""
    k = load_keys(
        k_source, head, n, first_key, num_keys, stride_k, stride_kh, D, BLOCK_N, BLOCK_D, LAST, TMA
    )
    v = load_keys(
        v_source,
        head,
        n,
        first_key,
        num_keys,
        stride_v,
        stride_vh,
        DV,
        BLOCK_N,
        BLOCK_DV,
        LAST,
        TMA,
    )
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    p = tl.exp2(s * scale - lse[:, None])
    if edge:
        key = n + tl.arange(0, BLOCK_N)[None, :]
        p = tl.where(visible(visible_end[:, None], key, size, WINDOW), p, 0.0)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision="ieee")


@kernel(do_not_specialize=VARYING, repr=name_of("range_dq_kernel"))
def range_dq_kernel(
    q_ptr, k_source, v_source, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, gates_ptr, dgates_ptr, gated_lse_ptr, cu_q_ptr,
    cu_k_ptr, cu_key_ptr, len_q, len_k, len_key, num_sequences, num_rows, stride_q, stride_qh, stride_k, stride_kh, stride_v,
    stride_vh, stride_do, stride_doh, softmax_scale, size, stride,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of rows, queries by heads of one group, added to what is there if ``ADD``.

    Writes delta, the row sums of ``out * dout``, for the kernel of dK and dV. With gates, ``dout``
    is the gradient of the branches' gated sum: delta is then the gradient of this branch's gate.
    The gate itself goes into lse, which is written anew: lower by the gate's logarithm, it makes
    every probability the gated one, at no cost in the loops.
    """
    BRANCH: tl.constexpr = 2 if WINDOW else 0
    head_kv = tl.program_id(1)
    sequence, tile = find_tile(
        cu_q_ptr, tl.num_programs(0) - 1 - tl.program_id(0), num_sequences, len_q, BLOCK_M, G
    )
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
        r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row = r // G
        ok = row < num_q
        t = num_tokens - num_q + row
        head = head_kv * G + r % G
        token = (first_q + row).to(tl.int64)
        out_row = token * HQ + head
        q = load_rows(q_ptr, token * stride_q + head * stride_qh, ok, 1, D, BLOCK_D, True)
        dout = load_rows(dout_ptr, token * stride_do + head * stride_doh, ok, 1, DV, BLOCK_DV, True)
        out = load_rows(out_ptr, out_row, ok, DV, DV, BLOCK_DV, True)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        statistic = head.to(tl.int64) * num_rows + first_q + row
        tl.store(delta_ptr + statistic, delta, mask=ok)
        lse = tl.load(lse_ptr + statistic, mask=ok, other=float("inf"))
        if gates_ptr is not None:
            lse = gated_lse(lse, gates_ptr, dgates_ptr, out_row * 3 + BRANCH, delta, ok)
            tl.store(gated_lse_ptr + statistic, lse, mask=ok)
        lse *= LOG2_E
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        scale = softmax_scale * LOG2_E

        t_first = num_tokens - num_q + tile * BLOCK_M // G
        t_last = num_tokens - num_q + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // G, num_q - 1)
        visible_end = high(t, size, stride, WINDOW)
        start, middle, tail, last, end = key_steps(
            t_first, t_last, num_keys, size, stride, BLOCK_N, WINDOW
        )
        for n in tl.range(start, last, BLOCK_N, num_stages=STAGES):
            dq = range_dq_step(
                q, dout, lse, delta, k_source, v_source, n, dq, (n < middle) | (n >= tail), visible_end, size, scale, head_kv,
                first_key, num_keys, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, WINDOW, False,
                TMA,
            )  # fmt: skip
        # One step at most; as a branch it would cost hundreds of bytes of stack where heads are
        # large.
        for n in tl.range(last, end, BLOCK_N, num_stages=1):
            dq = range_dq_step(
                q, dout, lse, delta, k_source, v_source, n, dq, True, visible_end, size, scale, head_kv, first_key, num_keys,
                stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, WINDOW, True, TMA,
            )  # fmt: skip
        dq *= softmax_scale
        if ADD:
            dq += load_rows(dq_ptr, out_row, ok, D, D, BLOCK_D, True).to(tl.float32)
        store_rows(dq_ptr, out_row, ok, D, dq, D, BLOCK_D)


@triton.jit
def query_range(n, num_q, num_tokens, size, stride, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Query rows that see the keys ``n .. n + BLOCK_N``: first, first and last that see all of them, and end."""
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


@triton.jit
def range_dkv_step(
    q_source, dout_source, lse_ptr, delta_ptr, k, v, dk, dv, row, row_end, num_q, head, offset, first_q, num_rows, n,
    size, stride, scale, stride_q, stride_qh, stride_do, stride_doh, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    LAST: tl.constexpr, KEYS_AS_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the share of ``BLOCK_M`` queries of one head, from ``row`` on, to dK and dV."""
    q = load_keys(
        q_source, head, row, first_q, num_q, stride_q, stride_qh, D, BLOCK_M, BLOCK_D, LAST, TMA
    )
    dout = load_keys(
        dout_source,
        head,
        row,
        first_q,
        num_q,
        stride_do,
        stride_doh,
        DV,
        BLOCK_M,
        BLOCK_DV,
        LAST,
        TMA,
    )
    m = tl.arange(0, BLOCK_M)
    statistic = head.to(tl.int64) * num_rows + first_q + row
    inside = row + m < row_end if MASKED else None
    lse = load_column(lse_ptr + statistic + m, inside, float("inf")) * LOG2_E
    delta = load_column(delta_ptr + statistic + m, inside, 0.0)
    t = offset + row + m
    key = n + tl.arange(0, BLOCK_N)
    # Small heads leave registers for both products of inputs at once: the second runs while the
    # first is exponentiated.
    EARLY: tl.constexpr = BLOCK_D + BLOCK_DV <= 128
    if KEYS_AS_ROWS:
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BLOCK_N, BLOCK_M]
        if EARLY:
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        p = tl.exp2(s * scale - lse[None, :])
        if MASKED:
            p = tl.where(
                visible(high(t, size, stride, WINDOW)[None, :], key[:, None], size, WINDOW), p, 0.0
            )
        if not EARLY:
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if EARLY:
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            p = tl.where(
                visible(high(t, size, stride, WINDOW)[:, None], key[None, :], size, WINDOW), p, 0.0
            )
        if not EARLY:
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        dv = tl.dot(tl.trans(p.to(dout.dtype)), dout, dv, input_precision="ieee")
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    return dk, dv


@kernel(do_not_specialize=VARYING, repr=name_of("range_dkv_kernel"))
def range_dkv_kernel(
    q_source, k_ptr, v_ptr, dout_source, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, cu_key_ptr, len_q,
    len_k, len_key, num_sequences, num_rows, chunk_rows, num_rows_key, stride_q, stride_qh, stride_k, stride_kh, stride_v,
    stride_vh, stride_do, stride_doh, softmax_scale, size, stride,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, KEYS_AS_ROWS: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys from one chunk of queries; with one chunk final, otherwise fp32 partial sums."""
    head_kv = tl.program_id(1)
    chunk = tl.program_id(2)
    HKV: tl.constexpr = HQ // G
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
            k = load_rows(k_ptr + head_kv * stride_kh, key_row, key_ok, stride_k, D, BLOCK_D, True)
            v = load_rows(
                v_ptr + head_kv * stride_vh, key_row, key_ok, stride_v, DV, BLOCK_DV, True
            )
            offset = num_tokens - num_q
            scale = softmax_scale * LOG2_E
            # Tiles of queries, each visited once for every head: masked, whole, masked, past the
            # sequence.
            end = tl.maximum(end, first)
            tiles = (end - first + BLOCK_M - 1) // BLOCK_M
            last = tl.minimum(tiles, (num_q - first) // BLOCK_M)
            middle = tl.minimum((all_first - first + BLOCK_M - 1) // BLOCK_M, last)
            tail = tl.minimum(tl.maximum((all_end - first) // BLOCK_M, middle), last)
            for i in tl.range(0, middle * G, num_stages=EDGE):
                dk, dv = range_dkv_step(
                    q_source, dout_source, lse_ptr, delta_ptr, k, v, dk, dv, first + i // G * BLOCK_M, end, num_q,
                    head_kv * G + i % G,
                    offset, first_q, num_rows, n, size, stride, scale, stride_q, stride_qh, stride_do, stride_doh, D, DV,
                    BLOCK_M,
                    BLOCK_N, BLOCK_D, BLOCK_DV, WINDOW, True, False, KEYS_AS_ROWS, TMA,
                )  # fmt: skip
            for i in tl.range(middle * G, tail * G, num_stages=STAGES):
                dk, dv = range_dkv_step(
                    q_source, dout_source, lse_ptr, delta_ptr, k, v, dk, dv, first + i // G * BLOCK_M, end, num_q,
                    head_kv * G + i % G,
                    offset, first_q, num_rows, n, size, stride, scale, stride_q, stride_qh, stride_do, stride_doh, D, DV,
                    BLOCK_M,
                    BLOCK_N, BLOCK_D, BLOCK_DV, WINDOW, False, False, KEYS_AS_ROWS, TMA,
                )  # fmt: skip
            if not WINDOW:
                last = tail  # only the tile past the chunk's end is left, if any
            for i in tl.range(tail * G, last * G, num_stages=EDGE):
                dk, dv = range_dkv_step(
                    q_source, dout_source, lse_ptr, delta_ptr, k, v, dk, dv, first + i // G * BLOCK_M, end, num_q,
                    head_kv * G + i % G,
                    offset, first_q, num_rows, n, size, stride, scale, stride_q, stride_qh, stride_do, stride_doh, D, DV,
                    BLOCK_M,
                    BLOCK_N, BLOCK_D, BLOCK_DV, WINDOW, True, False, KEYS_AS_ROWS, TMA,
                )  # fmt: skip
            for i in tl.range(last * G, tiles * G, num_stages=1):
                dk, dv = range_dkv_step(
                    q_source, dout_source, lse_ptr, delta_ptr, k, v, dk, dv, first + i // G * BLOCK_M, end, num_q,
                    head_kv * G + i % G,
                    offset, first_q, num_rows, n, size, stride, scale, stride_q, stride_qh, stride_do, stride_doh, D, DV,
                    BLOCK_M,
                    BLOCK_N, BLOCK_D, BLOCK_DV, WINDOW, True, True, KEYS_AS_ROWS, TMA,
                )  # fmt: skip
            out_row = (chunk.to(tl.int64) * num_rows_key + key_row) * HKV + head_kv
            store_rows(dk_ptr, out_row, key_ok, D, dk * softmax_scale, D, BLOCK_D)
            store_rows(dv_ptr, out_row, key_ok, DV, dv, DV, BLOCK_DV)


@kernel(do_not_specialize=VARYING, repr=name_of("range_reduce_kernel"))
def range_reduce_kernel(
    dk_part_ptr, dv_part_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, cu_key_ptr, len_q, len_k, len_key, num_sequences,
    chunk_rows, num_rows_key, size, stride, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of one block of keys, dK or dV, in the order of the chunks; chunks without a query wrote none."""
    head_kv = tl.program_id(1)
    sequence, tile = find_tile(cu_key_ptr, tl.program_id(0), num_sequences, len_key, BLOCK_N)
    if sequence < num_sequences:
        _, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
        n = tile * BLOCK_N
        first, _, _, end = query_range(n, num_q, num_tokens, size, stride, BLOCK_N, WINDOW)
        key = n + tl.arange(0, BLOCK_N)
        key_ok = key < num_keys
        row = (first_key + key).to(tl.int64) * HKV + head_kv
        rows_of_chunk = num_rows_key.to(tl.int64) * HKV
        if tl.program_id(2) == 0:
            sum_parts(
                dk_part_ptr,
                dk_ptr,
                row,
                key_ok,
                first,
                end,
                chunk_rows,
                rows_of_chunk,
                D,
                BLOCK_N,
                BLOCK_D,
            )
        else:
            sum_parts(
                dv_part_ptr,
                dv_ptr,
                row,
                key_ok,
                first,
                end,
                chunk_rows,
                rows_of_chunk,
                DV,
                BLOCK_N,
                BLOCK_DV,
            )


@triton.jit
def sum_parts(
    part_ptr, out_ptr, row, row_ok, first, end, chunk_rows, rows_of_chunk, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the sum of the rows of the chunks that have queries from ``first`` to ``end``; 0 where there is none."""
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if first < end:
        part = row + (first // chunk_rows).to(tl.int64) * rows_of_chunk
        for _ in tl.range(first // chunk_rows, (end - 1) // chunk_rows + 1):
            total += load_rows(part_ptr, part, row_ok, D, D, BLOCK_D, True)
            part += rows_of_chunk
    store_rows(out_ptr, row, row_ok, D, total, D, BLOCK_D)
