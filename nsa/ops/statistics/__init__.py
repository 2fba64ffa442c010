"""Statistics of a layer's gates and selected blocks, accumulated on the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa.config import BRANCHES, NSAConfig
from nsa.errors import fail
from nsa.ops._layout import next_power_of_2
from nsa.ops._plan import once
from nsa.ops._register import register
from nsa.ops._sequences import Sequences
from nsa.ops.statistics.reference import (
    AT,
    LARGE,
    MAXIMA,
    UNIT,
    Statistics,
    add_statistics_reference,
    new_statistics,
)
from nsa.stages import TELEMETRY, in_stage

if TYPE_CHECKING:
    from nsa.ops._triton.kernel import Launch

# Maximum number of gates and selected blocks per tile, and minimum number of queries.
TILE_GATES = 512
TILE_BLOCKS = 512
MIN_QUERIES = 8


def _add_statistics(
    statistics: Tensor,
    gates: Tensor,
    block_indices: Tensor | None,
    tile_stats: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    len_q: int,
    len_k: int,
    num_sequences: int,
    block_size: int,
    threshold: float,
    columns: list[int],
    backend: str,
) -> None:
    if gates.shape[0] == 0:  # empty calls do not count
        return
    offsets = None if cu_q is None or cu_k is None else (cu_q, cu_k)
    sequences = Sequences(offsets, num_sequences, len_q, len_k, gates.device)
    if backend == "reference":
        if statistics.device.type != "cpu" or statistics[AT.on]:  # no synchronization on a CPU
            given = (gates, block_indices, sequences, block_size, columns)
            add_statistics_reference(statistics, *given)
        return
    if block_indices is not None:
        block_indices = block_indices.contiguous() if block_indices.numel() else None

    def plan() -> Launch:
        from nsa.ops._triton.kernel import Launch
        from nsa.ops._triton.tuning import MOST_REGISTERS
        from nsa.ops.statistics.kernels import add_statistics_kernel

        num_q, num_heads, _ = gates.shape
        num_kv_heads, n = (1, 1) if block_indices is None else block_indices.shape[1:]
        pad_n = next_power_of_2(n)
        most_queries = min(TILE_GATES // num_heads, TILE_BLOCKS // pad_n)
        block_q = max(MIN_QUERIES, next_power_of_2(most_queries + 1) // 2)
        return Launch(
            add_statistics_kernel,
            (max(sequences.num_tiles(num_q, block_q, sequences.len_q), 1),),
            AT=AT,
            COLUMNS=tuple(columns),
            MOST_ENTROPY=math.log2(max(len(columns), 2)),
            HQ=num_heads,
            HKV=num_kv_heads,
            N=n,
            BLOCK_SIZE=block_size,
            BLOCK_Q=block_q,
            PAD_N=pad_n,
            BLOCK_G=next_power_of_2(block_q * num_heads),
            num_warps=4,
            maxnreg=MOST_REGISTERS,
        )

    tensors = (statistics, gates.contiguous(), block_indices, tile_stats)
    once(plan)(*tensors, *sequences.arguments(), threshold)


# Opaque to compilers on both backends, so that code that is usually disabled is not fused into code
# that always runs.
add_statistics_op = register(
    "add_statistics",
    "(Tensor(a!) statistics, Tensor gates, Tensor? block_indices, Tensor? tile_stats, "
    "Tensor? cu_q, Tensor? cu_k, SymInt len_q, SymInt len_k, SymInt num_sequences, "
    "int block_size, float threshold, int[] columns, str backend) -> ()",
    _add_statistics,
    lambda *_: None,
)


__all__ = ["LARGE", "MAXIMA", "UNIT", "Statistics", "add_statistics", "new_statistics"]


@in_stage(TELEMETRY)
def add_statistics(
    statistics: Tensor,
    gates: Tensor,
    block_indices: Tensor | None,
    tile_stats: Tensor | None,
    threshold: float,
    config: NSAConfig,
    sequences: Sequences,
    backend: str,
) -> None:
    """Accumulate the statistics of one attention call, without synchronizing.

    Args:
        statistics: int64 ``[len(Statistics._fields)]`` from :func:`new_statistics`; its first
            element enables it.
        gates: ``[T, Hq, 3]``.
        block_indices: int32 ``[T, Hkv, n]``; None without the selected branch.
        tile_stats: int64 ``[2]``, total list length and number of tiles, which determined the
            algorithm of the selected branch; None if it was always tiled.
        threshold: the gathered algorithm ran if the mean list length exceeds this.
        config: the sparse pattern.
        sequences: the sequence layout.
        backend: ``reference`` or ``triton``.

    Raises:
        ValueError: ``statistics`` has another shape or dtype, or is on another device.
    """
    form = (torch.int64, (len(Statistics._fields),), gates.device)
    found = (statistics.dtype, tuple(statistics.shape), statistics.device)
    if found != form:
        fail("statistics", f"be {form}", found)
    columns = [BRANCHES.index(name) for name in config.branches]
    where = (*sequences.arguments(), config.block_size, threshold, columns, backend)
    add_statistics_op(statistics, gates.detach(), block_indices, tile_stats, *where)
