"""Backward of the selected branch: dQ over the lists of tiles, dK and dV over the queries that chose a block.

dK and dV of a block come from the queries that the inverse index names, a chunk of them a program; rows are queries by heads.
Partial sums of the chunks are added in order by a second kernel: no atomics, the same bits in every run.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.range_attention import load_keys
from nsa.ops._triton.tiles import LOG2_E, VARYING, find_tile, load_rows, load_tile, sequence_rows, store_rows
from nsa.ops.selected.triton_fwd import chosen_keys, list_entry


@triton.jit
def selected_dq_step(
    q, dout, lse, delta, k_source, v_source, block, word, i, dq, query, t, scale, head, first_key, num_keys,
    stride_k, stride_kh, stride_v, stride_vh, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr, LAST: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Add the share of one step of the list to dQ ``[BLOCK_M, BLOCK_D]``."""
    n, seen = chosen_keys(block, word, i, query, t, BLOCK_SIZE, BLOCK_N, CAUSAL)
    k = load_keys(k_source, head, n, first_key, num_keys, stride_k, stride_kh, D, BLOCK_N, BLOCK_D, LAST, TMA)
    v = load_keys(v_source, head, n, first_key, num_keys, stride_v, stride_vh, DV, BLOCK_N, BLOCK_DV, LAST, TMA)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    p = tl.where(seen, tl.exp2(s * scale - lse[:, None]), 0.0)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=[*VARYING, "num_lists"])
def selected_dq_kernel(
    q_ptr, k_source, v_source, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, block_ptr, word_ptr, count_ptr, cu_q_ptr,
    cu_k_ptr, len_q, len_k, num_sequences, num_lists, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh,
    stride_do, stride_doh, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries; writes delta ``[T, Hq]``, the row sums of ``out * dout``, for the kernel of dK and dV."""
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head_kv = tl.program_id(1)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        r = tl.arange(0, BLOCK_M)
        query = r // G
        row = tile * BLOCK_Q + query
        ok = (query < BLOCK_Q) & (row < num_q)
        query = tl.minimum(query, 31)
        t = num_tokens - num_q + row
        head = head_kv * G + r % G
        token = (first_q + row).to(tl.int64)
        out_row = token * HQ + head
        q = load_rows(q_ptr, token * stride_q + head * stride_qh, ok, 1, D, BLOCK_D, True)
        dout = load_rows(dout_ptr, token * stride_do + head * stride_doh, ok, 1, DV, BLOCK_DV, True)
        out = load_rows(out_ptr, out_row, ok, DV, DV, BLOCK_DV, True)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        tl.store(delta_ptr + out_row, delta, mask=ok)
        lse = tl.load(lse_ptr + out_row, mask=ok, other=float("inf")) * LOG2_E
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        scale = softmax_scale * LOG2_E
        STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_N
        item = head_kv.to(tl.int64) * num_lists + number
        block_ptr += item * (BLOCK_Q * N)
        word_ptr += item * (BLOCK_Q * N)
        past = tl.load(count_ptr + item * 3) * STEPS
        inside = tl.load(count_ptr + item * 3 + 1) * STEPS
        end = tl.load(count_ptr + item * 3 + 2) * STEPS
        if end > 0:
            next_block, next_word = list_entry(block_ptr, word_ptr, 0, end, STEPS)
        else:
            next_block, next_word = 0, 0
        for i in tl.range(0, past, num_stages=STAGES):
            block, word = next_block, next_word
            next_block, next_word = list_entry(block_ptr, word_ptr, i + 1, end, STEPS)
            dq = selected_dq_step(
                q, dout, lse, delta, k_source, v_source, block, word, i, dq, query, t, scale, head_kv, first_key,
                num_tokens, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV, False,
                False, TMA,
            )  # fmt: skip
        for i in tl.range(past, inside, num_stages=EDGE):
            block, word = next_block, next_word
            next_block, next_word = list_entry(block_ptr, word_ptr, i + 1, end, STEPS)
            dq = selected_dq_step(
                q, dout, lse, delta, k_source, v_source, block, word, i, dq, query, t, scale, head_kv, first_key,
                num_tokens, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV, True,
                False, TMA,
            )  # fmt: skip
        for i in tl.range(inside, end, num_stages=1):
            block, word = next_block, next_word
            next_block, next_word = list_entry(block_ptr, word_ptr, i + 1, end, STEPS)
            dq = selected_dq_step(
                q, dout, lse, delta, k_source, v_source, block, word, i, dq, query, t, scale, head_kv, first_key,
                num_tokens, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV, True,
                True, TMA,
            )  # fmt: skip
        store_rows(dq_ptr, out_row, ok, D, dq * softmax_scale, D, BLOCK_D)


@triton.jit
def selected_dkv_step(
    q_ptr, dout_ptr, lse_ptr, delta_ptr, query_ptr, k, v, dk, dv, r, num_rows, offset, n, scale, head_kv,
    stride_q, stride_qh, stride_do, stride_doh, HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr,
    KEYS_AS_ROWS: tl.constexpr,
):  # fmt: skip
    """Add the share of the rows (queries of the index by heads) ``r .. r + BLOCK_M`` to dK and dV."""
    index = r + tl.arange(0, BLOCK_M)
    ok = index < num_rows
    token = tl.load(query_ptr + index // G, mask=ok, other=0)
    head = head_kv * G + index % G
    row = token.to(tl.int64)
    q = load_tile(q_ptr, row * stride_q + head * stride_qh, ok, D, BLOCK_D, True)
    dout = load_tile(dout_ptr, row * stride_do + head * stride_doh, ok, DV, BLOCK_DV, True)
    lse = tl.load(lse_ptr + row * HQ + head, mask=ok, other=float("inf")) * LOG2_E
    delta = tl.load(delta_ptr + row * HQ + head, mask=ok, other=0.0)
    t = offset + token
    key = n + tl.arange(0, BLOCK_N)
    EARLY: tl.constexpr = BLOCK_D + BLOCK_DV <= 128
    if KEYS_AS_ROWS:
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BLOCK_N, BLOCK_M]
        if EARLY:
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        p = tl.exp2(s * scale - lse[None, :])
        if CAUSAL:
            p = tl.where(key[:, None] <= t[None, :], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        if not EARLY:
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if EARLY:
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        p = tl.exp2(s * scale - lse[:, None])
        if CAUSAL:
            p = tl.where(key[None, :] <= t[:, None], p, 0.0)
        dv = tl.dot(tl.trans(p.to(dout.dtype)), dout, dv, input_precision="ieee")
        if not EARLY:
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=[*VARYING, "num_blocks"])
def selected_dkv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, query_ptr, start_ptr, item_ptr, chunk_start_ptr,
    cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_blocks, stride_q, stride_qh, stride_k, stride_kh,
    stride_v, stride_vh, stride_do, stride_doh, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEYS_AS_ROWS: tl.constexpr, STAGES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """fp32 partial dK and dV ``[l', D]`` of one block from one chunk of the queries that chose it.

    ``item_ptr`` names the block and head of each chunk, ``chunk_start_ptr`` the first chunk of each.
    """
    chunk = tl.program_id(0)
    HKV: tl.constexpr = HQ // G
    item = tl.load(item_ptr + chunk)
    if item < HKV * num_blocks:
        head_kv = item // num_blocks
        sequence, block = find_tile(cu_k_ptr, item % num_blocks, num_sequences, len_k, BLOCK_SIZE)
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        place = (chunk - tl.load(chunk_start_ptr + item)) * CHUNK
        begin = tl.load(start_ptr + item) + place
        rows = tl.minimum(tl.load(start_ptr + item + 1) - begin, CHUNK) * G
        query_ptr += begin
        n = block * BLOCK_SIZE + tl.program_id(1) * BLOCK_N
        key = n + tl.arange(0, BLOCK_N)
        key_ok = key < num_tokens
        key_row = (first_key + key).to(tl.int64)
        k = load_rows(k_ptr + head_kv * stride_kh, key_row, key_ok, stride_k, D, BLOCK_D, True)
        v = load_rows(v_ptr + head_kv * stride_vh, key_row, key_ok, stride_v, DV, BLOCK_DV, True)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        offset = num_tokens - num_q - first_q
        scale = softmax_scale * LOG2_E
        # Queries come in order: at most the first l' of a block lie inside it.
        inside = tl.minimum(tl.cdiv(tl.maximum(BLOCK_SIZE - place, 0) * G, BLOCK_M) * BLOCK_M, rows)
        for r in tl.range(0, inside, BLOCK_M, num_stages=EDGE):
            dk, dv = selected_dkv_step(
                q_ptr, dout_ptr, lse_ptr, delta_ptr, query_ptr, k, v, dk, dv, r, rows, offset, n, scale, head_kv, stride_q,
                stride_qh, stride_do, stride_doh, HQ, G, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True, KEYS_AS_ROWS,
            )  # fmt: skip
        for r in tl.range(inside, rows, BLOCK_M, num_stages=STAGES):
            dk, dv = selected_dkv_step(
                q_ptr, dout_ptr, lse_ptr, delta_ptr, query_ptr, k, v, dk, dv, r, rows, offset, n, scale, head_kv, stride_q,
                stride_qh, stride_do, stride_doh, HQ, G, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, KEYS_AS_ROWS,
            )  # fmt: skip
        out_row = chunk.to(tl.int64) * BLOCK_SIZE + (key - block * BLOCK_SIZE)
        store_rows(dk_ptr, out_row, key_ok, D, dk, D, BLOCK_D)
        store_rows(dv_ptr, out_row, key_ok, DV, dv, DV, BLOCK_DV)


@triton.jit(do_not_specialize=[*VARYING, "num_blocks"])
def selected_reduce_kernel(
    dk_part_ptr, dv_part_ptr, dk_ptr, dv_ptr, chunk_start_ptr, cu_k_ptr, len_k, num_sequences, num_blocks,
    softmax_scale, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block: the partial sums of its chunks in order, 0 for a block that nobody chose."""
    head = tl.program_id(1)
    sequence, block = find_tile(cu_k_ptr, tl.program_id(0), num_sequences, len_k, BLOCK_SIZE)
    if sequence < num_sequences:
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        item = head * num_blocks + tl.program_id(0)
        inside = tl.arange(0, BLOCK_SIZE)
        ok = block * BLOCK_SIZE + inside < num_tokens
        dk = tl.zeros([BLOCK_SIZE, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_SIZE, BLOCK_DV], tl.float32)
        for chunk in tl.range(tl.load(chunk_start_ptr + item), tl.load(chunk_start_ptr + item + 1)):
            part = chunk * BLOCK_SIZE + inside
            dk += load_rows(dk_part_ptr, part, ok, D, D, BLOCK_D, True)
            dv += load_rows(dv_part_ptr, part, ok, DV, DV, BLOCK_DV, True)
        row = (first_key + block * BLOCK_SIZE + inside).to(tl.int64) * HKV + head
        store_rows(dk_ptr, row, ok, D, dk * softmax_scale, D, BLOCK_D)
        store_rows(dv_ptr, row, ok, DV, dv, DV, BLOCK_DV)
