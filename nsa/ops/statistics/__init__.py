"""Statistics of a layer's gates and selected blocks, added up on the device while it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import BRANCHES, NSAConfig
from nsa.errors import fail
from nsa.ops._sequences import Sequences
from nsa.ops.statistics.ops import add_statistics_op
from nsa.ops.statistics.reference import LARGE, MAXIMA, UNIT, Statistics, new_statistics
from nsa.stages import TELEMETRY, in_stage

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
    """Add what one call of whole attention did, without waiting for the device.

    Args:
        statistics: int64 ``[len(Statistics._fields)]`` of :func:`new_statistics`; its first element
            switches.
        gates: ``[T, Hq, 3]``.
        block_indices: int32 ``[T, Hkv, n]``; None without the selected branch.
        tile_stats: int64 ``[2]``, blocks in the lists of all tiles and number of tiles, by which
            the algorithm of the selected branch was chosen; None if it was fixed to be tiled.
        threshold: the gathered algorithm ran if the lists have more blocks than this on average.
        config: the sparse pattern.
        sequences: where the sequences lie.
        backend: ``reference`` or ``triton``.

    Raises:
        ValueError: ``statistics`` has another shape or dtype, or lies on another device.
    """
    form = (torch.int64, (len(Statistics._fields),), gates.device)
    found = (statistics.dtype, tuple(statistics.shape), statistics.device)
    if found != form:
        fail("add_statistics", "statistics", f"be {form}", found)
    columns = [BRANCHES.index(name) for name in config.branches]
    where = (*sequences.kernel_arguments(), config.block_size, threshold, columns, backend)
    add_statistics_op(statistics, gates.detach(), block_indices, tile_stats, *where)
