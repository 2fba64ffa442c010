"""What the decode kernels are compiled for, and where they find rows of the cache."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

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
    """How many programs share the keys of a query in each branch; 0 where a branch is off.

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
    """Where rows ``[N]`` of sequence b lie in a pool with ``PER_PAGE`` rows a page, int64."""
    page = tl.load(table_ptr + b * table_width + row // PER_PAGE, mask=ok, other=0)
    return page.to(tl.int64) * PER_PAGE + row % PER_PAGE


@triton.jit
def compressed_rows(table_ptr, b, table_width, block, ok, P: tl.constexpr):
    """Where compressed blocks ``[N]`` lie: in the page of their last token."""
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
