"""Pieces of the decode kernels: sizes, rows of the cache, partial results and their gated sum."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.tiles import LOG2_E

# Arguments that Triton must not look at: it would compile anew for some values.
CAPACITIES = ["table_width", "most_blocks", "chunks", "position_offset"]


class Pattern(NamedTuple):
    """Numbers of heads and sizes of the sparse pattern, as constants.

    Attributes:
        HKV: KV heads.
        G: query heads of each.
        QUERIES: tokens of a sequence in a step.
        L: tokens of a compression block.
        STRIDE: tokens from one compression block to the next.
        BLOCK_SIZE: tokens of a selection block, and of a page.
        WINDOW: tokens that the window sees.
        RING: tokens that the ring of the window holds.
        N: blocks that a query selects.
    """

    HKV: int
    G: int
    QUERIES: int
    L: int
    STRIDE: int
    BLOCK_SIZE: int
    WINDOW: int
    RING: int
    N: int


class Splits(NamedTuple):
    """Programs that share the keys of a query, by branch; 0 for a disabled branch.

    Attributes:
        cmp: of the compressed keys.
        win: of the window.
        slc: of the selected blocks.
    """

    cmp: int
    win: int
    slc: int


@triton.jit
def page_rows(table_ptr, b, table_width, row, ok, PER_PAGE: tl.constexpr):
    """Index int64 of rows ``[N]`` of sequence b in a pool with ``PER_PAGE`` rows a page."""
    page = tl.load(table_ptr + b * table_width + row // PER_PAGE, mask=ok, other=0)
    return page.to(tl.int64) * PER_PAGE + row % PER_PAGE


@triton.jit
def compressed_rows(table_ptr, b, table_width, block, ok, P: tl.constexpr):
    """Index of compressed blocks ``[N]``, which are in the page of their last token."""
    row = block + P.L // P.STRIDE - 1
    return page_rows(table_ptr, b, table_width, row, ok, P.BLOCK_SIZE // P.STRIDE)


@triton.jit
def complete_blocks(tokens, P: tl.constexpr):
    """Compression blocks that lie wholly in the first ``tokens`` tokens."""
    return tl.maximum(tokens - P.L + P.STRIDE, 0) // P.STRIDE


@triton.jit
def query_rows(row, b, head, cached, P: tl.constexpr):
    """Rows ``query * G + head of the group`` ``[M]`` of a step.

    Gives whether they exist, their place among queries by query heads ``[T * Hq]`` and their
    positions.
    """
    query = row // P.G
    ok = query < P.QUERIES
    place = (b * P.QUERIES + query).to(tl.int64) * (P.HKV * P.G) + head * P.G + row % P.G
    return ok, place, cached + query


@triton.jit
def count_reads(reads_ptr, group, keys, BRANCH: tl.constexpr):
    """Add keys that a program has loaded to int64 ``[B * Hkv, 3]``, if asked for."""
    if reads_ptr is not None:
        tl.atomic_add(reads_ptr + group * 3 + BRANCH, keys.to(tl.int64))


@triton.jit
def is_last(counter_ptr, programs):
    """Whether this program is the last of ``programs`` to arrive; the counter is 0 again then.

    What the others have written before is visible to the last.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def store_partial(out_ptr, lse_ptr, at, ok, out, lse, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Write a program's share of a branch: out ``[M, BLOCK_DV]`` and lse ``[M]`` at rows ``at``."""
    tl.store(lse_ptr + at, lse, mask=ok)
    d = tl.arange(0, BLOCK_DV)
    tl.store(out_ptr + at[:, None] * DV + d[None, :], out, mask=ok[:, None] & (d < DV)[None, :])


@triton.jit
def load_gate(gates_ptr, place, ok, BRANCH: tl.constexpr):
    """Gates ``[M]`` of a branch for query heads at ``place`` among all."""
    return tl.load(gates_ptr + place * 3 + BRANCH, mask=ok, other=0.0).to(tl.float32)


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
        x = tl.load(
            out_ptr + at[:, :, None] * HEADS.DV + d[None, None, :],
            mask=mask[:, :, None] & (d < HEADS.DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        weight = tl.exp2(lse - new_largest[None, :])
        scale = tl.exp2(largest - new_largest)
        acc = acc * scale[:, None] + tl.sum(x * weight[:, :, None], 0)
        total = total * scale + tl.sum(weight, 0)
        largest = new_largest
    gate = load_gate(gates_ptr, place, ok, BRANCH)
    return acc * (gate / tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def gated_sum(
    shares,
    rows,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CMP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Gated sum ``[M, BLOCK_DV]`` of the compressed branch and the window."""
    ROWS: tl.constexpr = P.QUERIES * P.G
    _, _, row, _ = rows
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    out = tl.zeros([row.shape[0], BLOCK_DV], tl.float32)
    if SPLITS.cmp * HAS_CMP > 0:
        out += gated_branch(shares, rows, 0, 0, SPLITS.cmp, ROWS, HEADS, BLOCK_S)
    if SPLITS.win > 0:
        out += gated_branch(shares, rows, SPLITS.cmp, 2, SPLITS.win, ROWS, HEADS, BLOCK_S)
    return out
