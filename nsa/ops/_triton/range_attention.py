"""Attention in which every query sees one range of keys: the window and the compressed branch.

A query at position t sees the keys ``[low(t), high(t))`` of its sequence. ``WINDOW``: tokens
``[max(0, t - w + 1), t + 1)``; otherwise the compressed blocks ``[0, num_cmp(t))``. All heads of a
group are rows of one tile and share the loads, see ``QueryTile``; a tile may end between the heads
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
    load_rows,
    load_tile,
    query_tile,
    sequence_rows,
    softmax_result,
    softmax_start,
    softmax_step,
    store_rows,
)


def name_of(kernel: str) -> Callable[[Any], str]:
    """Name a compiled kernel with its branch at the end, so that a profile tells them apart."""
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
    """Whether a query that sees keys up to ``end``, see ``high``, sees a key; both broadcast."""
    if WINDOW:
        # One comparison: keys from end on give very large numbers.
        return (end - 1 - key).to(tl.uint32, bitcast=True) < size
    else:
        return key < end


@triton.jit
def load_keys(
    source,
    span,
    n,
    stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAST_END: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows ``n .. n + BLOCK_N`` of a span, ``[BLOCK_N, BLOCK_D]``, by pointers or a descriptor.

    ``PAST_END``: the tile reaches past the sequence. Rows there belong to another one and may hold
    anything, so they are set to 0. Elsewhere the test is left out: it would send a tile through
    registers on its way to the tensor cores.
    """
    index = n + tl.arange(0, BLOCK_N)
    if TMA:
        x = source.load([span.first + n, span.head, 0]).reshape(BLOCK_N, BLOCK_D)
        if PAST_END:
            x = tl.where((index < span.count)[:, None], x, 0.0)
        return x
    else:
        source += span.head * stride[1]
        ok = index < span.count
        return load_rows(source, span.first + index, ok, stride[0], D, BLOCK_D, PAST_END)


@triton.jit
def key_steps(t_first, t_last, num_keys, size, stride, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Where the loop over the keys of a tile of queries is cut: start, middle, tail, last, end.

    Blocks from start to middle and from tail to last need a mask, those between do not; one from
    last to end reaches past the sequence.
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
    """out ``[T, Hq, Dv]`` and lse ``[Hq, T]``.

    Program (i, h) owns the i-th tile of rows from the end, queries by query heads of KV head h, and
    loops over the keys that one of its queries sees.
    """
    D: tl.constexpr = HEADS.D
    DV: tl.constexpr = HEADS.DV
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    TMA: tl.constexpr = TILE.tma
    head_kv = tl.program_id(1)
    # The last tiles see the most keys: they start first.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_M, HEADS.G)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
        keys = Span(head_kv, first_key, num_keys)
        rows = query_tile(tile, head_kv, first_q, num_q, num_tokens, HEADS.G, BLOCK_M, BLOCK_M)
        q_at = rows.token * stride_q[0] + rows.head * stride_q[1]
        q = load_tile(q_ptr, q_at, rows.ok, D, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
        row_max, total, acc = softmax_start(BLOCK_M, BLOCK_DV)
        scale = softmax_scale * LOG2_E
        visible_end = high(rows.t, size, stride, WINDOW)  # [BLOCK_M]
        start, middle, tail, last, end = key_steps(
            rows.t_first, rows.t_last, num_keys, size, stride, BLOCK_N, WINDOW
        )
        # The step that reaches past the sequence, one at most, is a loop too: as a branch it would
        # cost hundreds of bytes of stack where heads are large.
        bounds = (start, last, end)
        for past_end in tl.static_range(2):
            for n in tl.range(
                bounds[past_end],
                bounds[past_end + 1],
                BLOCK_N,
                num_stages=1 if past_end else TILE.stages,
            ):
                # [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_DV]
                k = load_keys(k_source, keys, n, stride_k, D, BLOCK_D, BLOCK_N, past_end, TMA)
                v = load_keys(v_source, keys, n, stride_v, DV, BLOCK_DV, BLOCK_N, past_end, TMA)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
                masked = True if past_end else (n < middle) | (n >= tail)
                if masked:
                    key = n + tl.arange(0, BLOCK_N)[None, :]
                    seen = visible(visible_end[:, None], key, size, WINDOW)
                    s = tl.where(seen, s, -float("inf"))
                row_max, total, acc = softmax_step(s, v, row_max, total, acc, scale)

        out, lse = softmax_result(row_max, total, acc)
        store_rows(out_ptr, rows.token * HEADS.HQ + rows.head, rows.ok, DV, out, DV, BLOCK_DV)
        lse_of_head = lse_ptr + rows.head.to(tl.int64) * num_rows
        tl.store(lse_of_head + first_q + rows.row, lse, mask=rows.ok)
