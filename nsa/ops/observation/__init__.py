"""What the gates of a layer do and which blocks it selects, summed up on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import BRANCHES, NSAConfig
from nsa.errors import check
from nsa.ops._sequences import Sequences
from nsa.ops.observation.ops import observe_op
from nsa.ops.observation.reference import LARGE, MOST, SUMS, UNIT, new_sums
from nsa.stages import TELEMETRY, in_stage

__all__ = ["LARGE", "MOST", "SUMS", "UNIT", "check_sums", "new_sums", "observe"]


@in_stage(TELEMETRY)
def observe(
    gates: Tensor,
    block_indices: Tensor | None,
    tile_stats: Tensor | None,
    sums: Tensor,
    config: NSAConfig,
    sequences: Sequences,
    scattered: float,
    backend: str,
) -> None:
    """Add what one call of whole attention did to ``sums``, if they are switched on.

    Args:
        gates: ``[T, Hq, 3]``.
        block_indices: int32 ``[T, Hkv, n]``; None without the selected branch.
        tile_stats: int64 ``[2]``, blocks of the tiles' lists and their number, by which the
            algorithm of the selected branch was chosen; None where it was fixed beforehand to be
            tiled.
        sums: int64 ``[len(SUMS)]`` of :func:`new_sums`; its first element switches.
        config: the sparse pattern.
        sequences: where the sequences lie.
        scattered: the gathered algorithm ran if the mean list of a tile has more blocks.
        backend: ``reference`` or ``triton``.
    """
    columns = [BRANCHES.index(name) for name in config.branches]
    where = (*sequences.kernel_arguments(), config.block_size, scattered, columns, backend)
    observe_op(gates.detach(), block_indices, tile_stats, sums, *where)


def check_sums(function: str, sums: Tensor, like: Tensor) -> None:
    """Sums as :func:`new_sums` makes them, on the device of ``like``."""
    fits = (
        tuple(sums.shape) == (len(SUMS),)
        and sums.dtype == torch.int64
        and sums.device == like.device
    )
    check(
        fits,
        function,
        "sums",
        f"be int64 [{len(SUMS)}] on {like.device}",
        f"{sums.dtype} {tuple(sums.shape)}",
    )
