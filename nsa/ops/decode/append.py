"""Kernel that appends new tokens to a decode cache and compresses the blocks that they complete.

``nsa.cache`` documents the cache layout.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from nsa.ops._plan import Constants
from nsa.ops._triton.kernel import kernel, let_next_start, wait_for_inputs
from nsa.ops._triton.tiles import load_fp32, partner_column, rotation
from nsa.ops.decode.layout import CAPACITIES, complete_blocks, compressed_rows, page_rows


class Stream(NamedTuple):
    """Keys or values of one branch that are appended to the cache.

    Attributes:
        ring: rows of their ring buffer; 0 if they are stored in pages.
        heads: number of heads.
        size: head size.
        block: head size padded to a power of two.
        compresses: index of the compressed rows computed from them, or -1.
        rotary: number of rotated columns of the compressed rows.
        hidden: hidden size of phi ``mlp``.
    """

    ring: int
    heads: int
    size: int
    block: int
    compresses: int
    rotary: int
    hidden: int


@dataclass(frozen=True)
class AppendPlan(Constants):
    """Compile-time constants of the append kernel.

    Attributes:
        streams: streams in the order of the tensors.
        phi: the compression function.
        block_l: tokens of a compression block, padded to a power of two.
        block_queries: tokens of a step, padded to a power of two.
        block_hidden: hidden units of phi ``mlp`` per iteration.
    """

    streams: tuple[Stream, ...]
    phi: str
    block_l: int
    block_queries: int
    block_hidden: int


@triton.jit
def append_rows(
    new_ptr,
    cache_ptr,
    table_ptr,
    b,
    head,
    cached,
    table_width,
    P: tl.constexpr,
    PLAN: tl.constexpr,
    K: tl.constexpr,
):
    """Copy the new rows of stream K to the cache."""
    SIZE: tl.constexpr = PLAN.streams[K].size
    RING: tl.constexpr = PLAN.streams[K].ring
    HEADS: tl.constexpr = PLAN.streams[K].heads
    i = tl.arange(0, PLAN.block_queries)
    ok = (i < P.QUERIES) & (head < HEADS)
    if RING == 0:
        row = page_rows(table_ptr, b, table_width, cached + i, ok, P.BLOCK_SIZE)
    else:
        row = b.to(tl.int64) * RING + (cached + i) % RING
    d = tl.arange(0, PLAN.streams[K].block)[None, :]
    mask = ok[:, None] & (d < SIZE)
    source = (b * P.QUERIES + i).to(tl.int64) * HEADS + head
    x = tl.load(new_ptr + source[:, None] * SIZE + d, mask=mask)  # [block_queries, BLOCK_D]
    tl.store(cache_ptr + (row * HEADS + head)[:, None] * SIZE + d, x, mask=mask)


@triton.jit
def raw_rows(
    new_ptr,
    ring_ptr,
    b,
    head,
    position,
    ok,
    cached,
    P: tl.constexpr,
    PLAN: tl.constexpr,
    K: tl.constexpr,
):
    """Raw rows ``[N, BLOCK_D]`` fp32 at the positions, new or from the ring; 0 where not ok."""
    SIZE: tl.constexpr = PLAN.streams[K].size
    RING: tl.constexpr = PLAN.streams[K].ring
    d = tl.arange(0, PLAN.streams[K].block)[None, :]
    new = (b * P.QUERIES + position - cached).to(tl.int64) * P.HKV + head
    old = (b.to(tl.int64) * RING + position % RING) * P.HKV + head
    mask = ok[:, None] & (d < SIZE)
    is_new = (position >= cached)[:, None]
    x = load_fp32(new_ptr + new[:, None] * SIZE + d, mask & is_new)
    return x + load_fp32(ring_ptr + old[:, None] * SIZE + d, mask & (position < cached)[:, None])


@triton.jit
def perceptron(source, phi_ptrs, head, block, P: tl.constexpr, PLAN: tl.constexpr, K: tl.constexpr):
    """Output ``[BLOCK_D]`` fp32 of phi ``mlp``, which is added to the mean of a block."""
    SIZE: tl.constexpr = PLAN.streams[K].size
    HIDDEN: tl.constexpr = PLAN.streams[K].hidden
    FIRST: tl.constexpr = 3 * PLAN.streams[K].compresses
    new_ptr, ring_ptr, b, cached = source
    d = tl.arange(0, PLAN.streams[K].block)
    column = d < SIZE
    y = tl.zeros(d.shape, tl.float32)
    for h0 in tl.range(0, HIDDEN, PLAN.block_hidden):
        h = h0 + tl.arange(0, PLAN.block_hidden)
        mask = column[:, None] & (h < HIDDEN)[None, :]
        hidden = tl.zeros(h.shape, tl.float32)
        for i in tl.range(0, P.L):
            position = block * P.STRIDE + i + tl.zeros([1], tl.int32)
            x = raw_rows(new_ptr, ring_ptr, b, head, position, position >= 0, cached, P, PLAN, K)
            row = (head * P.L + i) * SIZE + d
            x = tl.sum(x, 0) + load_fp32(phi_ptrs[FIRST] + row, column)
            weights = phi_ptrs[FIRST + 1] + row.to(tl.int64)[:, None] * HIDDEN + h[None, :]
            hidden += tl.sum(x[:, None] * load_fp32(weights, mask), 0)
        hidden *= tl.sigmoid(hidden)
        weights = phi_ptrs[FIRST + 2] + (head * HIDDEN + h)[None, :] * SIZE + d[:, None]
        y += tl.sum(hidden[None, :] * load_fp32(weights, mask), 1)
    return y


@kernel(do_not_specialize=CAPACITIES)
def decode_append_kernel(
    table_ptr,
    lengths_ptr,
    new_ptrs,
    cache_ptrs,
    compressed_ptrs,
    phi_ptrs,
    frequency_ptr,
    table_width,
    magnitude,
    position_offset,
    P: tl.constexpr,
    PLAN: tl.constexpr,
):
    """Program (b, h, k) appends the new tokens of sequence b, head h, stream k.

    ``lengths_ptr`` contains the number of tokens of each sequence cached before the step.
    """
    # The scan reads before it waits what this kernel waits for.
    wait_for_inputs(AT_ONCE=False)
    let_next_start()
    b = tl.program_id(0)
    head = tl.program_id(1)
    cached = tl.load(lengths_ptr + b)
    for k in tl.static_range(len(PLAN.streams)):
        if tl.program_id(2) == k:
            append_rows(
                new_ptrs[k], cache_ptrs[k], table_ptr, b, head, cached, table_width, P, PLAN, k
            )
            TARGET: tl.constexpr = PLAN.streams[k].compresses
            if TARGET >= 0:
                SIZE: tl.constexpr = PLAN.streams[k].size
                ROTARY: tl.constexpr = PLAN.streams[k].rotary
                d = tl.arange(0, PLAN.streams[k].block)
                first = complete_blocks(cached, P)
                source = (new_ptrs[k], cache_ptrs[k], b, cached)
                for block in tl.range(first, complete_blocks(cached + P.QUERIES, P)):
                    i = tl.arange(0, PLAN.block_l)
                    position = block * P.STRIDE + i
                    # [block_l, BLOCK_D] fp32
                    x = raw_rows(
                        new_ptrs[k], cache_ptrs[k], b, head, position, i < P.L, cached, P, PLAN, k
                    )
                    if PLAN.phi == "linear":
                        mask = (i < P.L)[:, None] & (d < SIZE)[None, :]
                        at = ((head * P.L + i) * SIZE)[:, None] + d[None, :]
                        x *= load_fp32(phi_ptrs[TARGET] + at, mask)
                        y = tl.sum(x, 0)
                    else:
                        y = tl.sum(x, 0) * (1.0 / P.L)
                    if PLAN.phi == "mlp":
                        y += perceptron(source, phi_ptrs, head, block, P, PLAN, k)
                    if ROTARY > 0:
                        place = block * P.STRIDE + position_offset + tl.zeros([1], tl.int32)
                        same, other = rotation(
                            frequency_ptr, place, d, magnitude, ROTARY
                        )  # [1, BLOCK_D] each
                        y = y * tl.sum(same, 0) + tl.gather(
                            y, partner_column(d, ROTARY), 0
                        ) * tl.sum(other, 0)
                    row = compressed_rows(table_ptr, b, table_width, block, True, P)
                    target = compressed_ptrs[TARGET] + (row * P.HKV + head) * SIZE + d
                    tl.store(target, y, mask=d < SIZE)
