"""Device functions of the decode kernels: cache rows, partial results and their gated sum."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.tiles import LOG2_E

# Arguments that Triton must not specialize on: it would recompile for some values.
CAPACITIES = ["table_width", "most_blocks", "chunks", "position_offset"]


class Pattern(NamedTuple):
    """Head counts and sizes of the sparse pattern, as compile-time constants.

    Attributes:
        HKV: KV heads.
        G: query heads per KV head.
        QUERIES: tokens per sequence in a step.
        L: tokens of a compression block.
        STRIDE: compression stride, in tokens.
        BLOCK_SIZE: tokens of a selection block, and of a page.
        WINDOW: window size, in tokens.
        RING: tokens in the ring buffer of the window.
        N: selected blocks per query.
        BRANCHES: enabled branches.
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
    BRANCHES: int


class Splits(NamedTuple):
    """Number of programs that share the keys of a query, by branch; 0 for a disabled branch.

    Attributes:
        cmp: programs of the compressed branch.
        win: programs of the window.
        slc: programs of the selected branch.
        scored: programs that score tokens; 0 unless scores are ``token_max`` or ``index``.
    """

    cmp: int
    win: int
    slc: int
    scored: int = 0

    @property
    def number(self) -> int:
        """Number of programs with partial outputs."""
        return self.cmp + self.win + self.slc


@triton.jit
def page_rows(table_ptr, b, table_width, row, ok, PER_PAGE: tl.constexpr):
    """Pool index, int64, of rows ``[N]`` of sequence b, with ``PER_PAGE`` rows per page."""
    page = tl.load(table_ptr + b * table_width + row // PER_PAGE, mask=ok, other=0)
    return page.to(tl.int64) * PER_PAGE + row % PER_PAGE


@triton.jit
def compressed_rows(table_ptr, b, table_width, block, ok, P: tl.constexpr):
    """Pool index of compressed blocks ``[N]``, stored in the page of their last token."""
    row = block + P.L // P.STRIDE - 1
    return page_rows(table_ptr, b, table_width, row, ok, P.BLOCK_SIZE // P.STRIDE)


@triton.jit
def complete_blocks(tokens, P: tl.constexpr):
    """Number of compression blocks fully inside the first ``tokens`` tokens."""
    return tl.maximum(tokens - P.L + P.STRIDE, 0) // P.STRIDE


@triton.jit
def query_rows(row, b, head, cached, P: tl.constexpr):
    """Decode rows ``query * G + head of the group`` ``[M]`` of a step.

    Returns:
        Whether each row exists, its index among queries by query heads ``[T * Hq]``, and its
        position.
    """
    query = row // P.G
    ok = query < P.QUERIES
    place = (b * P.QUERIES + query).to(tl.int64) * (P.HKV * P.G) + head * P.G + row % P.G
    return ok, place, cached + query


@triton.jit
def count_reads(reads_ptr, group, keys, COLUMN: tl.constexpr):
    """Add the number of keys loaded by a program to int64 ``[B * Hkv, 4]``; no-op if None."""
    if reads_ptr is not None:
        tl.atomic_add(reads_ptr + group * 4 + COLUMN, keys.to(tl.int64))


@triton.jit
def is_last(counter_ptr, programs):
    """Whether this program is the last of ``programs`` to arrive; resets the counter to 0.

    Everything that the other programs wrote before is visible to the last one.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def store_partial(out_ptr, lse_ptr, at, ok, out, lse, DV: tl.constexpr):
    """Store a program's partial result: out ``[M, BLOCK_DV]`` and lse ``[M]`` at rows ``at``."""
    tl.store(lse_ptr + at, lse, mask=ok)
    d = tl.arange(0, out.shape[1])
    tl.store(out_ptr + at[:, None] * DV + d[None, :], out, mask=ok[:, None] & (d < DV)[None, :])


@triton.jit
def load_gate(gates_ptr, place, ok, BRANCH: tl.constexpr, P: tl.constexpr):
    """Gates ``[M]`` of one branch for the query heads at ``place``; equal ones if None."""
    if gates_ptr is None:
        return tl.full(place.shape, 1.0 / P.BRANCHES, tl.float32)
    else:
        return tl.load(gates_ptr + place * 3 + BRANCH, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def gated_branch(
    parts,
    rows,
    before,
    BRANCH: tl.constexpr,
    NUM: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Output ``[M, BLOCK_DV]`` of a branch, multiplied by its gates.

    It merges ``NUM`` partial results, which begin ``before`` splits after the group's first one.
    """
    out_ptr, lse_ptr, first = parts
    gates_ptr, place, row, ok = rows
    ROWS: tl.constexpr = P.QUERIES * P.G
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
    gate = load_gate(gates_ptr, place, ok, BRANCH, P)
    return acc * (gate / tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def gated_sum(
    parts,
    rows,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CMP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Gated sum ``[M, BLOCK_DV]`` of the compressed branch and the window."""
    _, _, row, _ = rows
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    out = tl.zeros([row.shape[0], BLOCK_DV], tl.float32)
    if SPLITS.cmp * HAS_CMP > 0:
        out += gated_branch(parts, rows, 0, 0, SPLITS.cmp, P, HEADS, BLOCK_S)
    if SPLITS.win > 0:
        out += gated_branch(parts, rows, SPLITS.cmp, 2, SPLITS.win, P, HEADS, BLOCK_S)
    return out
