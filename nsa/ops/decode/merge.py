"""Decode kernel of the selected branch; its last programs merge all branches."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel, let_next_start, wait_for_inputs
from nsa.ops._triton.tiles import (
    LOG2_E,
    load_rows,
    products,
    softmax_result,
    softmax_start,
    softmax_step,
    store_rows,
)
from nsa.ops.decode.layout import (
    CAPACITIES,
    count_reads,
    gated_branch,
    gated_sum,
    is_last,
    load_gate,
    query_rows,
    store_partial,
)


@triton.jit
def selected_split(
    q,
    where,
    ids_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    reads_ptr,
    scale,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
):
    """Partial out and lse over a program's share of the selected blocks of one query."""
    b, head, t, table_width = where
    SHARE: tl.constexpr = (P.N + SPLITS.slc - 1) // SPLITS.slc
    STEPS: tl.constexpr = P.BLOCK_SIZE // BLOCK_N
    row_max, total, acc = softmax_start(q.shape[0], HEADS.BLOCK_DV)
    n = tl.arange(0, BLOCK_IDS)
    found = tl.load(ids_ptr + n, mask=n < P.N, other=-1) >= 0
    begin = tl.program_id(1) * SHARE
    end = tl.minimum(begin + SHARE, tl.sum(found.to(tl.int32), 0))
    keys = 0
    # Page lookups run one step ahead, so that loads of keys and values can be pipelined.
    table_ptr += b * table_width
    block = tl.load(ids_ptr + begin, mask=begin < end, other=0)
    page = tl.load(table_ptr + block, mask=begin < end, other=0)
    for i in tl.range(begin * STEPS, end * STEPS):
        ahead = (i + 1) // STEPS
        next_block = tl.load(ids_ptr + ahead, mask=ahead < end, other=0)
        next_page = tl.load(table_ptr + next_block, mask=ahead < end, other=0)
        row = i % STEPS * BLOCK_N + tl.arange(0, BLOCK_N)
        p = block * P.BLOCK_SIZE + row
        here = p <= t
        at = (page.to(tl.int64) * P.BLOCK_SIZE + row) * P.HKV + head
        k = load_rows(k_ptr, at, here, HEADS.D, HEADS.D, HEADS.BLOCK_D)
        v = load_rows(v_ptr, at, here, HEADS.DV, HEADS.DV, HEADS.BLOCK_DV)
        s = tl.where(here[None, :], products(q, k, False), -float("inf"))
        row_max, total, acc = softmax_step(s, v, row_max, total, acc, scale)
        keys += tl.sum(here.to(tl.int32), 0)
        block = next_block
        page = next_page
    if tl.program_id(2) == 0:
        count_reads(reads_ptr, b * P.HKV + head, keys, 1)
    return softmax_result(row_max, total, acc)


@kernel(do_not_specialize=CAPACITIES)
def decode_merge_kernel(
    q_ptr,
    gates_ptr,
    ids_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    partial_ptr,
    lse_ptr,
    others_ptr,
    counter_ptr,
    out_ptr,
    reads_ptr,
    table_width,
    softmax_scale,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CMP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
):
    """Write the gated sum of the branches ``[T, Hq, Dv]``.

    Program (i, s, m) handles KV head and query i over all sequences and the m-th ``BLOCK_G`` heads
    of the group, padded to ``BLOCK_M`` rows. Each s computes a share of the selected blocks, and
    the last to arrive merges them in a fixed order and adds the other branches from ``others_ptr``.
    Without the selected branch, the partial results of the other branches are merged here.
    """
    wait_for_inputs(AT_ONCE=False)
    query = tl.program_id(0) % P.QUERIES
    group = tl.program_id(0) // P.QUERIES  # index of sequence and KV head
    b = group // P.HKV
    head = group % P.HKV
    cached = tl.load(lengths_ptr + b)
    first = group * SPLITS.number
    ROWS: tl.constexpr = P.QUERIES * P.G
    first_row = query * P.G + tl.program_id(2) * BLOCK_G
    end_row = query * P.G + P.G
    g = tl.arange(0, BLOCK_G)
    row = first_row + g
    _, place, _ = query_rows(row, b, head, cached, P)
    ok = row < end_row
    rows = (gates_ptr, place, row, ok)
    parts = (partial_ptr, lse_ptr, first)
    if SPLITS.slc == 0:
        y = gated_sum(parts, rows, P, HEADS, SPLITS, HAS_CMP, BLOCK_S)
        store_rows(out_ptr, place, ok, y, HEADS.DV)
    else:
        m = tl.arange(0, BLOCK_M)
        row_m = first_row + m
        _, place_m, _ = query_rows(row_m, b, head, cached, P)
        ok_m = (m < BLOCK_G) & (row_m < end_row)
        q = load_rows(q_ptr, place_m, ok_m, HEADS.D, HEADS.D, HEADS.BLOCK_D)
        token = b * P.QUERIES + query
        out, lse = selected_split(
            q,
            (b, head, cached + query, table_width),
            ids_ptr + (token * P.HKV + head) * P.N,
            k_ptr,
            v_ptr,
            table_ptr,
            reads_ptr,
            softmax_scale * LOG2_E,
            P,
            HEADS,
            SPLITS,
            BLOCK_N,
            BLOCK_IDS,
        )
        let_next_start()
        others = others_ptr + group.to(tl.int64) * (ROWS * HEADS.DV)
        if SPLITS.slc == 1:
            y = out * load_gate(gates_ptr, place_m, ok_m, 1, P)[:, None]
            y += load_rows(others, row_m, ok_m, HEADS.DV, HEADS.DV, HEADS.BLOCK_DV)
            store_rows(out_ptr, place_m, ok_m, y, HEADS.DV)
        else:
            before = SPLITS.cmp + SPLITS.win
            at = (first + before + tl.program_id(1)).to(tl.int64) * ROWS + row_m
            store_partial(partial_ptr, lse_ptr, at, ok_m, out, lse, HEADS.DV)
            counter = counter_ptr + tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
            if is_last(counter, SPLITS.slc):
                y = gated_branch(parts, rows, before, 1, SPLITS.slc, P, HEADS, BLOCK_S)
                y += load_rows(others, row, ok, HEADS.DV, HEADS.DV, HEADS.BLOCK_DV)
                store_rows(out_ptr, place, ok, y, HEADS.DV)
