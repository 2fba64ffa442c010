"""Inputs, results and algorithms of the selected branch.

Nothing here needs Triton: shapes of outputs depend on the algorithm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops._layout import rows

ALGORITHMS = ("auto", "tiled", "gathered")

# Queries of a tile: as many as a query mask has bits.
MAX_QUERIES = 32
# Selections scatter when the list of a tile holds on average more than so many times n blocks.
SCATTER_THRESHOLD = 2.75


def queries_of_tile(group_size: int) -> int:
    """Whole queries of a tile of 64 rows, each of ``group_size`` heads."""
    return min(max(64 // group_size, 1), MAX_QUERIES)


def always_tiled(
    algorithm: str, group_size: int, n: int, len_q: int, len_k: int, block_size: int
) -> bool:
    """Whether the tiled algorithm runs whatever the selection is.

    Args:
        algorithm: ``tiled``, ``gathered``, or ``auto``: tiled where lists are short by the shapes
            alone, and otherwise what suits the selection, decided on the device.
        group_size: query heads of a KV head.
        n: slots of a query.
        len_q: at least the longest sequence in queries.
        len_k: the same in key tokens.
        block_size: tokens of a block.
    """
    queries = queries_of_tile(group_size)
    blocks = -(-len_k // block_size)
    # Queries of all positions see half of the blocks on average.
    longest = min(queries * n, blocks if len_q < len_k else (blocks + 1) // 2)
    return algorithm == "tiled" or (algorithm == "auto" and longest <= SCATTER_THRESHOLD * n)


class SelectedInputs(NamedTuple):
    """Queries ``[T, Hq, D]``, keys ``[S, Hkv, D]``, values ``[S, Hkv, Dv]`` and selected blocks.

    The last are ``[T, Hkv, n]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_indices: Tensor

    def read(self) -> SelectedInputs:
        """Return the inputs in the layout that kernels read."""
        q, k, v = (rows(x) for x in self[:3])
        return SelectedInputs(q, k, v, self.block_indices)


class SelectedResults(NamedTuple):
    """Results of the forward.

    Attributes:
        out: ``[T, Hq, Dv]``.
        lse: fp32 ``[T, Hq]``.
        order: int32 ``[T * Hkv * n]`` of the inverse index, or empty where the algorithm is tiled.
            Lengths of sequences decide too whether it is read, but not its shape: what is compiled
            for one length serves all.
        tile_stats: int64 ``[2]``: blocks of the tiles' lists and their number, 0 at first. With the
            gathered algorithm they are 1 and 0 from the start and stay so: selections count as
            scattered.
    """

    out: Tensor
    lse: Tensor
    order: Tensor
    tile_stats: Tensor

    @classmethod
    def new(cls, q: Tensor, v: Tensor, block_indices: Tensor, algorithm: str) -> SelectedResults:
        """Memory for the results; only shapes and devices are read."""
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        count = 0 if algorithm == "tiled" else block_indices.numel()
        order = block_indices.new_empty(count, dtype=torch.int32)
        tile_stats = block_indices.new_zeros(2, dtype=torch.int64)
        if algorithm == "gathered":
            tile_stats[0].fill_(1)
        return cls(out, lse, order, tile_stats)
