"""Selected branch: a tile of queries against every block that one of them chose.

Row r of a tile is query ``r // G``, head ``r % G``. The loop visits the blocks of the tile's list;
a word beside each block says which queries chose it, and the rows of the others are masked: for
them the step changes nothing, so a row's arithmetic does not depend on what its neighbours chose.
Blocks wholly in the past need no causal test; a block that reaches past the sequence is the last of
the list and is handled apart.

Where choices scatter, most blocks of a list are wanted by one query each, and ``triton_gather.py``
works on those. What stays here are a query's *near* blocks: the first of its sequence, its own and
the one before. Neighbours share them.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.range_attention import load_keys
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
from nsa.ops.selected.index_kernels import choices_scatter


@triton.jit
def list_entry(block_ptr, word_ptr, i, end, skipped, STEPS: tl.constexpr):
    """Block and word of step i of a list. They are loaded a step ahead: a block's number is needed before its keys can be.

    The last of the ``skipped`` blocks stands for the first.
    """
    at = tl.minimum(i, end - 1) // STEPS
    at = tl.where(at < skipped, 0, at)
    return tl.load(block_ptr + at), tl.load(word_ptr + at)


@triton.jit
def hide_keys(x, chosen, t, n, causal, hidden):
    """``x [BLOCK_M, BLOCK_N]`` with ``hidden`` where a row's query did not choose the block and, if ``causal``, after it."""
    x = tl.where(chosen[:, None], x, hidden)
    if causal:
        x = tl.where((n + tl.arange(0, x.shape[1]))[None, :] <= t[:, None], x, hidden)
    return x


@triton.jit
def selected_step(
    q, k_source, v_source, n, word, causal, row_max, total, acc, query, t, near, scale, head, first_key, num_keys,
    stride_k, stride_kh, stride_v, stride_vh, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One step of the forward loop: ``BLOCK_N`` keys from n on."""
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
    chosen = ((word >> query) & 1) != 0
    if near is not None:
        chosen = chosen & ((n >= near) | (n < BLOCK_SIZE))
    return softmax_step(
        hide_keys(s, chosen, t, n, causal, -float("inf")), v, row_max, total, acc, scale
    )


@kernel(do_not_specialize=[*VARYING, "num_lists"])
def selected_fwd_kernel(
    q_ptr, k_source, v_source, out_ptr, lse_ptr, block_ptr, word_ptr, count_ptr, union_ptr, cu_q_ptr, cu_k_ptr,
    len_q, len_k, num_sequences, num_lists, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, LIMIT_4: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out, and lse ``[T, Hq]``, of one tile of ``ROWS`` rows, queries by heads of a group.

    It has a list of at most ``BLOCK_Q * N`` blocks. Where choices scatter, by ``union_ptr``, of the
    near blocks alone.
    """
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
        # [BLOCK_M, BLOCK_D]
        q = load_rows(q_ptr, token * stride_q + head * stride_qh, ok, 1, D, BLOCK_D, True)
        row_max = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        scale = softmax_scale * LOG2_E
        STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_N
        item = head_kv.to(tl.int64) * num_lists + number
        block_ptr += item * (BLOCK_Q * N)
        word_ptr += item * (BLOCK_Q * N)
        past = tl.load(count_ptr + item * 4) * STEPS
        inside = tl.load(count_ptr + item * 4 + 1) * STEPS
        end = tl.load(count_ptr + item * 4 + 2) * STEPS
        begin, skipped, near = 0, 0, None
        if union_ptr is not None:
            near = tl.zeros([BLOCK_M], tl.int32)
            if choices_scatter(union_ptr, N, LIMIT_4):
                near = (t // BLOCK_SIZE - 1) * BLOCK_SIZE
                skipped = tl.load(count_ptr + item * 4 + 3)
                begin = skipped * STEPS
                if skipped > 0:  # noqa: SIM102 (the list may be empty)
                    if tl.load(block_ptr) == 0:
                        begin -= STEPS
        if end > 0:
            next_block, next_word = list_entry(block_ptr, word_ptr, begin, end, skipped, STEPS)
        else:
            next_block, next_word = 0, 0
        for i in tl.range(begin, inside, num_stages=STAGES):
            n, word = next_block * BLOCK_SIZE + i % STEPS * BLOCK_N, next_word
            next_block, next_word = list_entry(block_ptr, word_ptr, i + 1, end, skipped, STEPS)
            row_max, total, acc = selected_step(
                q, k_source, v_source, n, word, i >= past, row_max, total, acc, query, t, near, scale, head_kv, first_key,
                num_tokens, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV, False, TMA,
            )  # fmt: skip
        for i in tl.range(inside, end, num_stages=1):
            n, word = next_block * BLOCK_SIZE + i % STEPS * BLOCK_N, next_word
            next_block, next_word = list_entry(block_ptr, word_ptr, i + 1, end, skipped, STEPS)
            row_max, total, acc = selected_step(
                q, k_source, v_source, n, word, True, row_max, total, acc, query, t, near, scale, head_kv, first_key,
                num_tokens, stride_k, stride_kh, stride_v, stride_vh, D, DV, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV, True, TMA,
            )  # fmt: skip
        empty = total == 0
        out_row = token * HQ + head
        out = tl.where(empty[:, None], 0.0, acc * (1.0 / tl.where(empty, 1.0, total))[:, None])
        store_rows(out_ptr, out_row, ok, DV, out, DV, BLOCK_DV)
        lse = tl.where(
            empty, -float("inf"), (row_max + tl.log2(tl.where(empty, 1.0, total))) * LN_2
        )
        tl.store(lse_ptr + out_row, lse, mask=ok)
