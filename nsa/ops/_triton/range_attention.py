"""Attention in which every query sees one range of keys: the window branch and the compressed branch.

A query at position t sees the keys ``[low(t), high(t))`` of its sequence. ``WINDOW``: tokens
``[max(0, t - w + 1), t + 1)``; otherwise the compressed blocks ``[0, num_cmp(t))``. All heads of a
group are rows of one tile and share the loads: row r of a sequence is query ``r // G``, head ``r %
G``, and a tile may end between the heads of a query. Keys at the edges of a tile's range are
masked, those in the middle are not.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import (
    LN_2,
    LOG2_E,
    VARYING,
    find_tile,
    load_rows,
    sequence_rows,
    softmax_step,
    store_rows,
)


def name_of(kernel: str) -> Callable[[Any], str]:
    """How a compiled kernel is called: with its branch at the end, so that a profile tells them apart."""
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
    """Whether a query that sees keys up to ``end``, see ``high``, sees a key; for tensors of both that broadcast."""
    if WINDOW:
        # one comparison: keys from end on give very large numbers
        return (end - 1 - key).to(tl.uint32, bitcast=True) < size
    else:
        return key < end


@triton.jit
def load_keys(source, head, n, first_key, num_keys, stride_row, stride_head, D: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_D: tl.constexpr, LAST: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Rows ``n .. n + BLOCK_N`` of one head, ``[BLOCK_N, BLOCK_D]``.

    ``LAST``: the tile reaches past the sequence. Rows there belong to another one: whatever they
    hold must not come in, so they are 0. Elsewhere the test is left out, for it would send a tile
    through registers on its way to the tensor cores.
    """
    index = n + tl.arange(0, BLOCK_N)
    if TMA:
        x = source.load([first_key + n, head, 0]).reshape(BLOCK_N, BLOCK_D)
        if LAST:
            x = tl.where((index < num_keys)[:, None], x, 0.0)
        return x
    else:
        return load_rows(
            source + head * stride_head,
            first_key + index,
            index < num_keys,
            stride_row,
            D,
            BLOCK_D,
            LAST,
        )


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
    tail = tl.minimum(
        tl.maximum(high(t_first, size, stride, WINDOW) // BLOCK_N * BLOCK_N, middle), last
    )
    return start, middle, tail, last, end


@triton.jit
def range_step(
    q, k_source, v_source, n, row_max, total, acc, edge, visible_end, size, scale, head, first_key, num_keys,
    stride_k, stride_kh, stride_v, stride_vh, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, LAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One step of the forward loop: ``BLOCK_N`` keys from n on, masked at an ``edge``."""
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
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
    if edge:
        key = n + tl.arange(0, BLOCK_N)[None, :]
        s = tl.where(visible(visible_end[:, None], key, size, WINDOW), s, -float("inf"))
    return softmax_step(s, v, row_max, total, acc, scale)


@kernel(do_not_specialize=VARYING, repr=name_of("range_fwd_kernel"))
def range_fwd_kernel(
    q_ptr, k_source, v_source, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, cu_key_ptr, len_q, len_k, len_key, num_sequences,
    num_rows, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, softmax_scale, size, stride,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out, and lse ``[Hq, T]``, of one tile of ``BLOCK_M`` rows, queries by heads of one group."""
    head_kv = tl.program_id(1)
    # The last tiles see the most keys: they start first.
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
        q_row = (first_q + row).to(tl.int64) * stride_q + head * stride_qh
        q = load_rows(q_ptr, q_row, ok, 1, D, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
        row_max = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        scale = softmax_scale * LOG2_E

        t_first = num_tokens - num_q + tile * BLOCK_M // G
        t_last = num_tokens - num_q + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // G, num_q - 1)
        visible_end = high(t, size, stride, WINDOW)
        start, middle, tail, last, end = key_steps(
            t_first, t_last, num_keys, size, stride, BLOCK_N, WINDOW
        )
        for n in tl.range(start, last, BLOCK_N, num_stages=STAGES):
            row_max, total, acc = range_step(
                q, k_source, v_source, n, row_max, total, acc, (n < middle) | (n >= tail), visible_end, size, scale, head_kv,
                first_key, num_keys, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, WINDOW, False,
                TMA,
            )  # fmt: skip
        # One step at most; as a branch it would cost hundreds of bytes of stack where heads are
        # large.
        for n in tl.range(last, end, BLOCK_N, num_stages=1):
            row_max, total, acc = range_step(
                q, k_source, v_source, n, row_max, total, acc, True, visible_end, size, scale, head_kv, first_key, num_keys,
                stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, WINDOW, True, TMA,
            )  # fmt: skip

        empty = total == 0
        out_row = (first_q + row).to(tl.int64) * HQ + head
        out = tl.where(empty[:, None], 0.0, acc * (1.0 / tl.where(empty, 1.0, total))[:, None])
        store_rows(out_ptr, out_row, ok, DV, out, DV, BLOCK_DV)
        lse = tl.where(
            empty, -float("inf"), (row_max + tl.log2(tl.where(empty, 1.0, total))) * LN_2
        )
        tl.store(lse_ptr + head.to(tl.int64) * num_rows + first_q + row, lse, mask=ok)
