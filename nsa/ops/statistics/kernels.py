"""Kernel of the statistics of a layer's gates and selected blocks."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import VARYING, find_tile, load_fp32, sequence_rows
from nsa.ops.statistics import reference

LARGE = tl.constexpr(reference.LARGE)
UNIT = tl.constexpr(reference.UNIT)


@triton.jit
def add(pointer, x):
    """Atomically add an integer to a statistic; the sum does not depend on the order."""
    tl.atomic_add(pointer, x, sem="relaxed")


@kernel(do_not_specialize=[*VARYING, "threshold"])
def add_statistics_kernel(
    statistics_ptr,
    gates_ptr,
    indices_ptr,
    tile_stats_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    threshold,
    AT: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST_ENTROPY: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PAD_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Add the statistics of one call if they are enabled.

    Program i handles the i-th tile of ``BLOCK_Q`` queries with all their heads; program 0 also
    counts the algorithm that ran. ``AT`` contains the index of each statistic.
    """
    if tl.load(statistics_ptr + AT.on) != 0:
        number = tl.program_id(0)
        if number == 0:
            algorithm = AT.tiled
            if tile_stats_ptr is not None:
                num_blocks = tl.load(tile_stats_ptr).to(tl.float64)
                limit = tl.load(tile_stats_ptr + 1).to(tl.float64) * threshold
                algorithm = tl.where(num_blocks > limit, AT.gathered, AT.tiled)
            add(statistics_ptr + algorithm, tl.full([], 1, tl.int64))
        sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_Q)
        if sequence < num_sequences:
            first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
            _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
            first = first_q + tile * BLOCK_Q
            count = tl.minimum(num_q - tile * BLOCK_Q, BLOCK_Q)
            e = tl.arange(0, BLOCK_G)  # queries by heads
            gates_ok = e < count * HQ
            gates_at = gates_ptr + (first.to(tl.int64) * HQ + e) * 3
            total = 0.0
            for k in tl.static_range(len(COLUMNS)):
                gate = load_fp32(gates_at + COLUMNS[k], gates_ok)
                gate = tl.where(gate == gate, gate, 0.0)
                total += gate
                pointer = statistics_ptr + AT.gate_cmp + COLUMNS[k]
                add(pointer, tl.sum((gate * UNIT).to(tl.int64)))
            entropy = 0.0
            for k in tl.static_range(len(COLUMNS)):
                gate = load_fp32(gates_at + COLUMNS[k], gates_ok)
                share = tl.where(gate > 0, gate / tl.where(total > 0, total, 1.0), 1.0)
                entropy -= share * tl.log2(share)
            add(statistics_ptr + AT.entropy, tl.sum((entropy / MOST_ENTROPY * UNIT).to(tl.int64)))
            add(statistics_ptr + AT.gates, (count * HQ).to(tl.int64))
            if indices_ptr is not None:
                row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
                slot = tl.arange(0, PAD_N)
                ok = (row < num_q)[:, None] & (slot < N)[None, :]  # [BLOCK_Q, PAD_N]
                t = (num_tokens - num_q + row)[:, None]
                token = (first_q + row).to(tl.int64)
                keys = tl.full([], 0, tl.int64)
                distance_2 = keys
                selections = keys
                num_shared = keys
                num_preceded = keys
                most = keys
                large_less_fewest = keys
                counts = (row < num_q) & (num_tokens - num_q + row + 1 >= N * BLOCK_SIZE)
                has_before = (row > 0) & (row < num_q)
                for head in tl.range(0, HKV):
                    at = indices_ptr + (token * HKV + head) * N
                    block = tl.load(at[:, None] + slot[None, :], mask=ok, other=-1).to(tl.int32)
                    selected = ok & (block >= 0) & (block <= t // BLOCK_SIZE)
                    start = block * BLOCK_SIZE
                    last = tl.minimum(start + BLOCK_SIZE - 1, t)
                    num_keys = tl.where(selected, last - start + 1, 0)
                    shared = tl.zeros(ok.shape, tl.int1)
                    for other in tl.range(0, N):
                        before = tl.load(at - HKV * N + other, mask=has_before, other=-1).to(
                            tl.int32
                        )
                        shared = shared | (block == before[:, None])
                    preceded = selected & has_before[:, None]
                    keys_of_query = tl.sum(num_keys, 1).to(tl.int64)
                    keys += tl.sum(keys_of_query)
                    most = tl.maximum(most, tl.max(tl.where(counts, keys_of_query, 0)))
                    less = tl.where(counts, LARGE - keys_of_query, 0)
                    large_less_fewest = tl.maximum(large_less_fewest, tl.max(less))
                    distance_2 += tl.sum(num_keys.to(tl.int64) * (2 * t - start - last))
                    selections += tl.sum(tl.max(selected.to(tl.int32), 1))
                    num_shared += tl.sum((preceded & shared).to(tl.int32))
                    num_preceded += tl.sum(preceded.to(tl.int32))
                add(statistics_ptr + AT.keys, keys)
                add(statistics_ptr + AT.distance_2, distance_2)
                add(statistics_ptr + AT.selections, selections)
                add(statistics_ptr + AT.shared, num_shared)
                add(statistics_ptr + AT.preceded_blocks, num_preceded)
                tl.atomic_max(statistics_ptr + AT.most_keys, most, sem="relaxed")
                tl.atomic_max(
                    statistics_ptr + AT.large_less_fewest_keys, large_less_fewest, sem="relaxed"
                )
