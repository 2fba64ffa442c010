"""Selected branch: dQ of a tile of queries over the blocks of its list. dK and dV: see ``triton_gather.py``."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.range_attention import load_keys
from nsa.ops._triton.tiles import (
    LOG2_E,
    VARYING,
    find_tile,
    gated_lse,
    load_rows,
    sequence_rows,
    store_rows,
)
from nsa.ops.selected.index_kernels import choices_scatter
from nsa.ops.selected.tiled_fwd import hide_keys, list_entry


@triton.jit
def selected_dq_step(
    q, dout, lse, delta, k_source, v_source, n, word, causal, dq, query, t, scale, head, first_key, num_keys,
    stride_k, stride_kh, stride_v, stride_vh, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the share of ``BLOCK_N`` keys from n on to dQ ``[BLOCK_M, BLOCK_D]``."""
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
    p = hide_keys(tl.exp2(s * scale - lse[:, None]), ((word >> query) & 1) != 0, t, n, causal, 0.0)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision="ieee")


@kernel(do_not_specialize=[*VARYING, "num_lists"])
def selected_dq_kernel(
    q_ptr, k_source, v_source, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, gates_ptr, dgates_ptr, gated_lse_ptr, block_ptr,
    word_ptr, count_ptr, union_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_lists, stride_q, stride_qh, stride_k,
    stride_kh, stride_v, stride_vh, stride_do, stride_doh, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ADD: tl.constexpr, LIMIT_4: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of ``ROWS`` rows, see the forward, added to what is there if ``ADD``; nothing where choices scatter.

    Writes delta ``[T, Hq]``, the row sums of ``out * dout``, for the kernels after it. With gates,
    ``dout`` is the gradient of the branches' gated sum; see ``range_dq_kernel``.
    """
    if union_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if choices_scatter(union_ptr, N, LIMIT_4):
            return
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head_kv = tl.program_id(1)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, ROWS, G)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        m = tl.arange(0, BLOCK_M)
        r = tile * ROWS + m
        row = r // G
        ok = (m < ROWS) & (row < num_q)
        query = tl.minimum(row - tile * ROWS // G, 31)
        t = num_tokens - num_q + row
        head = head_kv * G + r % G
        token = (first_q + row).to(tl.int64)
        out_row = token * HQ + head
        dout = load_rows(dout_ptr, token * stride_do + head * stride_doh, ok, 1, DV, BLOCK_DV, True)
        out = load_rows(out_ptr, out_row, ok, DV, DV, BLOCK_DV, True)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        tl.store(delta_ptr + out_row, delta, mask=ok)
        lse = tl.load(lse_ptr + out_row, mask=ok, other=float("inf"))
        if gates_ptr is not None:
            lse = gated_lse(lse, gates_ptr, dgates_ptr, out_row * 3 + 1, delta, ok)
            tl.store(gated_lse_ptr + out_row, lse, mask=ok)
        lse *= LOG2_E
        q = load_rows(q_ptr, token * stride_q + head * stride_qh, ok, 1, D, BLOCK_D, True)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        scale = softmax_scale * LOG2_E
        STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_N
        item = head_kv.to(tl.int64) * num_lists + number
        block_ptr += item * (BLOCK_Q * N)
        word_ptr += item * (BLOCK_Q * N)
        past = tl.load(count_ptr + item * 4) * STEPS
        inside = tl.load(count_ptr + item * 4 + 1) * STEPS
        end = tl.load(count_ptr + item * 4 + 2) * STEPS
        if end > 0:
            next_block, next_word = list_entry(block_ptr, word_ptr, 0, end, 0, STEPS)
        else:
            next_block, next_word = 0, 0
        for i in tl.range(0, inside, num_stages=STAGES):
            n, word = next_block * BLOCK_SIZE + i % STEPS * BLOCK_N, next_word
            next_block, next_word = list_entry(block_ptr, word_ptr, i + 1, end, 0, STEPS)
            dq = selected_dq_step(
                q, dout, lse, delta, k_source, v_source, n, word, i >= past, dq, query, t, scale, head_kv, first_key,
                num_tokens, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, False, TMA,
            )  # fmt: skip
        for i in tl.range(inside, end, num_stages=1):
            n, word = next_block * BLOCK_SIZE + i % STEPS * BLOCK_N, next_word
            next_block, next_word = list_entry(block_ptr, word_ptr, i + 1, end, 0, STEPS)
            dq = selected_dq_step(
                q, dout, lse, delta, k_source, v_source, n, word, True, dq, query, t, scale, head_kv, first_key,
                num_tokens, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, True, TMA,
            )  # fmt: skip
        dq *= softmax_scale
        if ADD:
            dq += load_rows(dq_ptr, out_row, ok, D, D, BLOCK_D, True).to(tl.float32)
        store_rows(dq_ptr, out_row, ok, D, dq, D, BLOCK_D)


@kernel(do_not_specialize=VARYING)
def selected_delta_kernel(
    out_ptr, dout_ptr, lse_ptr, delta_ptr, gates_ptr, dgates_ptr, gated_lse_ptr, union_ptr, cu_q_ptr, len_q, num_sequences,
    stride_do, stride_doh, HQ: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
    LIMIT_4: tl.constexpr,
):  # fmt: skip
    """What ``selected_dq_kernel`` writes beside dQ, where choices scatter: delta and, with gates, their gradient and lse."""
    if not choices_scatter(union_ptr, N, LIMIT_4):
        return
    num_q = len_q * num_sequences if cu_q_ptr is None else tl.load(cu_q_ptr + num_sequences)
    num_tiles = tl.cdiv(num_q.to(tl.int64) * HQ, BLOCK_R)
    for tile in tl.range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        r = tile * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
        token = r // HQ
        head = (r % HQ).to(tl.int32)
        ok = token < num_q
        dout = load_rows(dout_ptr, token * stride_do + head * stride_doh, ok, 1, DV, BLOCK_DV, True)
        out = load_rows(out_ptr, r, ok, DV, DV, BLOCK_DV, True)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        tl.store(delta_ptr + r, delta, mask=ok)
        if gates_ptr is not None:
            lse = tl.load(lse_ptr + r, mask=ok, other=float("inf"))
            tl.store(
                gated_lse_ptr + r,
                gated_lse(lse, gates_ptr, dgates_ptr, r * 3 + 1, delta, ok),
                mask=ok,
            )
