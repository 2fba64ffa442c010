"""Kernel of a decode step over the selected blocks, whose last programs merge all branches."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
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
    is_last,
    page_rows,
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
):
    """out and lse of a program's share of the selected blocks of one query."""
    b, head, t, table_width = where
    SHARE: tl.constexpr = (P.N + SPLITS.slc - 1) // SPLITS.slc
    STEPS: tl.constexpr = P.BLOCK_SIZE // BLOCK_N
    row_max, total, acc = softmax_start(q.shape[0], HEADS.BLOCK_DV)
    keys = 0
    begin = tl.program_id(1) * SHARE
    end = tl.minimum(begin + SHARE, P.N)
    for i in tl.range(begin * STEPS, end * STEPS):
        block = tl.load(ids_ptr + i // STEPS)
        if block >= 0:
            first = block * P.BLOCK_SIZE + i % STEPS * BLOCK_N
            p = first + tl.arange(0, BLOCK_N)
            here = p <= t
            at = page_rows(table_ptr, b, table_width, p, here, P.BLOCK_SIZE) * P.HKV + head
            k = load_rows(k_ptr, at, here, HEADS.D, HEADS.D, HEADS.BLOCK_D, True)
            v = load_rows(v_ptr, at, here, HEADS.DV, HEADS.DV, HEADS.BLOCK_DV, True)
            s = tl.where(here[None, :], products(q, k, False), -float("inf"))
            row_max, total, acc = softmax_step(s, v, row_max, total, acc, scale)
            keys += tl.maximum(tl.minimum(t + 1 - first, BLOCK_N), 0)
    if tl.program_id(2) == 0:
        count_reads(reads_ptr, b * P.HKV + head, keys, 1)
    return softmax_result(row_max, total, acc)


@triton.jit
def gated_branch(
    shares,
    rows,
    before,
    BRANCH: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Output ``[M, BLOCK_DV]`` of a branch, times its gates.

    It has ``NUM`` shares, the first of them ``before`` behind the group's first.
    """
    out_ptr, lse_ptr, first = shares
    gates_ptr, place, row, ok = rows
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    d = tl.arange(0, BLOCK_DV)
    largest = tl.full(row.shape, -1e30, tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    acc = tl.zeros([row.shape[0], BLOCK_DV], tl.float32)
    for s0 in tl.range(0, NUM, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        at = (first + before + s).to(tl.int64)[:, None] * ROWS + row[None, :]  # [BLOCK_S, M]
        mask = (s < NUM)[:, None] & ok[None, :]
        lse = tl.load(lse_ptr + at, mask=mask, other=-float("inf"), cache_modifier=".cg") * LOG2_E
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        weight = tl.exp2(lse - new_largest[None, :])
        scale = tl.exp2(largest - new_largest)
        x = tl.load(
            out_ptr + at[:, :, None] * HEADS.DV + d[None, None, :],
            mask=mask[:, :, None] & (d < HEADS.DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc = acc * scale[:, None] + tl.sum(x * weight[:, :, None], 0)
        total = total * scale + tl.sum(weight, 0)
        largest = new_largest
    gate = tl.load(gates_ptr + place * 3 + BRANCH, mask=ok, other=0.0).to(tl.float32)
    return acc * (gate / tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def merge_branches(
    shares,
    rows,
    out_ptr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CMP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write the gated sum of the branches in rows of queries by heads."""
    _, place, row, ok = rows
    ROWS: tl.constexpr = P.QUERIES * P.G
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    out = tl.zeros([row.shape[0], BLOCK_DV], tl.float32)
    if SPLITS.cmp * HAS_CMP > 0:
        out += gated_branch(shares, rows, 0, 0, SPLITS.cmp, ROWS, HEADS, BLOCK_S)
    if SPLITS.slc > 0:
        before = SPLITS.cmp + SPLITS.win
        out += gated_branch(shares, rows, before, 1, SPLITS.slc, ROWS, HEADS, BLOCK_S)
    if SPLITS.win > 0:
        out += gated_branch(shares, rows, SPLITS.cmp, 2, SPLITS.win, ROWS, HEADS, BLOCK_S)
    store_rows(out_ptr, place, ok, HEADS.DV, out, HEADS.DV, HEADS.BLOCK_DV)


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
):
    """The gated sum of the branches ``[T, Hq, Dv]``.

    Program (i, s, m) works on KV head and query i of all sequences, and the m-th ``BLOCK_G`` heads
    of the group, held in ``BLOCK_M`` rows; each s takes a share of the selected blocks, and the
    last to arrive merges the shares of all branches in a fixed order.
    """
    query = tl.program_id(0) % P.QUERIES
    group = tl.program_id(0) // P.QUERIES  # sequence and KV head
    b = group // P.HKV
    head = group % P.HKV
    cached = tl.load(lengths_ptr + b)
    first = group * (SPLITS.cmp + SPLITS.win + SPLITS.slc)
    first_head = tl.program_id(2) * BLOCK_G
    if SPLITS.slc > 0:
        m = tl.arange(0, BLOCK_M)
        row = query * P.G + first_head + m
        _, place, _ = query_rows(row, b, head, cached, P)
        ok = (m < BLOCK_G) & (first_head + m < P.G)
        q = load_rows(q_ptr, place, ok, HEADS.D, HEADS.D, HEADS.BLOCK_D, True)
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
        )
        share = first + SPLITS.cmp + SPLITS.win + tl.program_id(1)
        at = share.to(tl.int64) * (P.QUERIES * P.G) + row
        store_partial(partial_ptr, lse_ptr, at, ok, out, lse, HEADS.DV, HEADS.BLOCK_DV)
    shares = (partial_ptr, lse_ptr, first)
    g = first_head + tl.arange(0, BLOCK_G)
    row = query * P.G + g
    _, place, _ = query_rows(row, b, head, cached, P)
    rows = (gates_ptr, place, row, g < P.G)
    if SPLITS.slc > 1:
        counter = counter_ptr + tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
        if is_last(counter, SPLITS.slc):
            merge_branches(shares, rows, out_ptr, P, HEADS, SPLITS, HAS_CMP, BLOCK_S)
    else:
        tl.debug_barrier()
        merge_branches(shares, rows, out_ptr, P, HEADS, SPLITS, HAS_CMP, BLOCK_S)
