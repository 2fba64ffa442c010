"""Kernel and launcher of what gates do and which blocks are chosen."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.layout import Layout
from nsa.ops._triton.sizes import next_power_of_2
from nsa.ops._triton.tiles import VARYING, find_tile, sequence_rows
from nsa.ops._triton.tuning import MOST_REGISTERS
from nsa.ops.observation import reference

ON = tl.constexpr(reference.ON)
GATES = tl.constexpr(reference.GATES)
ENTROPY = tl.constexpr(reference.ENTROPY)
NUM_GATES = tl.constexpr(reference.NUM_GATES)
KEYS = tl.constexpr(reference.KEYS)
DISTANCE_2 = tl.constexpr(reference.DISTANCE_2)
CHOICES = tl.constexpr(reference.CHOICES)
SHARED = tl.constexpr(reference.SHARED)
NUM_SHARED = tl.constexpr(reference.NUM_SHARED)
TILED = tl.constexpr(reference.TILED)
GATHERED = tl.constexpr(reference.GATHERED)
MOST_KEYS = tl.constexpr(reference.MOST)
FEWEST_KEYS = tl.constexpr(reference.FEWEST)
LARGE = tl.constexpr(reference.LARGE)
UNIT = tl.constexpr(reference.UNIT)
LOG2_OF = {
    1: 1.0,
    2: 1.0,
    3: math.log2(3),
}  # largest entropy of so many gates, bits; a single one has none

# Gates and chosen blocks of a tile, at most, and its queries, at least.
TILE_GATES = 512
TILE_BLOCKS = 512
MIN_QUERIES = 8


@triton.jit
def add_sum(sums_ptr, place: tl.constexpr, x):
    """Add a whole number, or the sum of several, to one of the sums."""
    tl.atomic_add(sums_ptr + place, x, sem="relaxed")


@triton.jit
def observe_gates(
    gates_ptr,
    sums_ptr,
    first,
    count,
    CMP: tl.constexpr,
    SLC: tl.constexpr,
    WIN: tl.constexpr,
    MOST: tl.constexpr,
    HQ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over the gates of ``count`` queries from ``first`` on, all heads."""
    e = tl.arange(0, BLOCK)
    ok = e < count * HQ
    at = gates_ptr + (first.to(tl.int64) * HQ + e) * 3
    total = tl.zeros([BLOCK], tl.float32)
    for column in tl.static_range(3):
        if (column == 0 and CMP) or (column == 1 and SLC) or (column == 2 and WIN):
            gate = tl.load(at + column, mask=ok, other=0.0).to(tl.float32)
            gate = tl.where(gate == gate, gate, 0.0)
            total += gate
            add_sum(sums_ptr, GATES + column, tl.sum((gate * UNIT).to(tl.int64)))
    entropy = tl.zeros([BLOCK], tl.float32)
    for column in tl.static_range(3):
        if (column == 0 and CMP) or (column == 1 and SLC) or (column == 2 and WIN):
            gate = tl.load(at + column, mask=ok, other=0.0).to(tl.float32)
            share = tl.where(gate > 0, gate / tl.where(total > 0, total, 1.0), 1.0)
            entropy -= share * tl.log2(share)
    add_sum(sums_ptr, ENTROPY, tl.sum((entropy / MOST * UNIT).to(tl.int64)))
    add_sum(sums_ptr, NUM_GATES, (count * HQ).to(tl.int64))


@kernel(do_not_specialize=[*VARYING, "scattered"])
def observe_kernel(
    gates_ptr,
    indices_ptr,
    tile_stats_ptr,
    sums_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    scattered,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CMP: tl.constexpr,
    SLC: tl.constexpr,
    WIN: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PAD_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Sums over one tile of queries, added where they are switched on."""
    if tl.load(sums_ptr + ON) != 0:
        number = tl.program_id(0)
        if number == 0:
            algorithm = TILED
            if tile_stats_ptr is not None:
                blocks = tl.load(tile_stats_ptr).to(tl.float64)
                most_blocks = tl.load(tile_stats_ptr + 1).to(tl.float64) * scattered
                algorithm = tl.where(blocks > most_blocks, GATHERED, TILED)
            tl.atomic_add(sums_ptr + algorithm, tl.full([], 1, tl.int64), sem="relaxed")
        sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_Q)
        if sequence < num_sequences:
            first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
            _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
            count = tl.minimum(num_q - tile * BLOCK_Q, BLOCK_Q)
            first = first_q + tile * BLOCK_Q
            observe_gates(gates_ptr, sums_ptr, first, count, CMP, SLC, WIN, MOST, HQ, BLOCK_G)
            if indices_ptr is not None:
                row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
                slot = tl.arange(0, PAD_N)
                ok = (row < num_q)[:, None] & (slot < N)[None, :]
                t = (num_tokens - num_q + row)[:, None]
                token = (first_q + row).to(tl.int64)
                keys = tl.full([], 0, tl.int64)
                distance_2 = keys
                choices = keys
                found = keys
                preceded = keys
                most = keys
                fewest = keys  # LARGE less them
                counts = (row < num_q) & (num_tokens - num_q + row + 1 >= N * BLOCK_SIZE)
                for head in tl.range(0, HKV):
                    at = indices_ptr + (token * HKV + head) * N
                    block = tl.load(at[:, None] + slot[None, :], mask=ok, other=-1).to(tl.int32)
                    chosen = ok & (block >= 0) & (block <= t // BLOCK_SIZE)
                    start = block * BLOCK_SIZE
                    last = tl.minimum(start + BLOCK_SIZE - 1, t)
                    num_keys = tl.where(chosen, last - start + 1, 0)
                    shared = tl.zeros([BLOCK_Q, PAD_N], tl.int1)
                    has_before = (row > 0) & (row < num_q)
                    for other in tl.range(0, N):
                        before = tl.load(at - HKV * N + other, mask=has_before, other=-1).to(
                            tl.int32
                        )
                        shared = shared | (block == before[:, None])
                    counted = chosen & has_before[:, None]
                    of_query = tl.sum(num_keys, 1).to(tl.int64)
                    keys += tl.sum(of_query)
                    most = tl.maximum(most, tl.max(tl.where(counts, of_query, 0)))
                    fewest = tl.maximum(fewest, tl.max(tl.where(counts, LARGE - of_query, 0)))
                    distance_2 += tl.sum(num_keys.to(tl.int64) * (2 * t - start - last))
                    choices += tl.sum(tl.max(chosen.to(tl.int32), 1))
                    found += tl.sum((counted & shared).to(tl.int32))
                    preceded += tl.sum(counted.to(tl.int32))
                add_sum(sums_ptr, KEYS, keys)
                add_sum(sums_ptr, DISTANCE_2, distance_2)
                add_sum(sums_ptr, CHOICES, choices)
                add_sum(sums_ptr, SHARED, found)
                add_sum(sums_ptr, NUM_SHARED, preceded)
                tl.atomic_max(sums_ptr + MOST_KEYS, most, sem="relaxed")
                tl.atomic_max(sums_ptr + FEWEST_KEYS, fewest, sem="relaxed")


def observe_kernels(
    gates: Tensor,
    block_indices: Tensor | None,
    tile_stats: Tensor | None,
    sums: Tensor,
    layout: Layout,
    block_size: int,
    scattered: float,
    columns: list[int],
) -> None:
    """See :func:`nsa.ops.observation.observe`."""
    num_q, num_heads = gates.shape[:2]
    num_kv_heads, n = (1, 1) if block_indices is None else block_indices.shape[1:]
    indices = (
        None if block_indices is None or block_indices.numel() == 0 else block_indices.contiguous()
    )
    pad_n = next_power_of_2(n)
    block_q = max(
        MIN_QUERIES, next_power_of_2(min(TILE_GATES // num_heads, TILE_BLOCKS // pad_n) + 1) // 2
    )
    observe_kernel[(max(layout.num_tiles(num_q, block_q, layout.len_q), 1),)](
        gates.contiguous(),
        indices,
        tile_stats,
        sums,
        *layout.arguments(),
        scattered,
        HQ=num_heads,
        HKV=num_kv_heads,
        N=n,
        BLOCK_SIZE=block_size,
        CMP=0 in columns,
        SLC=1 in columns,
        WIN=2 in columns,
        MOST=LOG2_OF[len(columns)],
        BLOCK_Q=block_q,
        PAD_N=pad_n,
        BLOCK_G=next_power_of_2(block_q * num_heads),
        num_warps=4,
        maxnreg=MOST_REGISTERS,
    )
