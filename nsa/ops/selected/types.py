"""Inputs, results and algorithm choice of the selected branch.

Independent of Triton, because the shapes of outputs depend on the algorithm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops._layout import rows

ALGORITHMS = ("auto", "tiled", "gathered")


class SelectedInputs(NamedTuple):
    """Queries ``[T, Hq, D]``, keys ``[S, Hkv, D]``, values ``[S, Hkv, Dv]`` and selected blocks.

    ``block_indices`` are ``[T, Hkv, n]``.
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
        order: int32 ``[T * Hkv * n]`` of the inverse index, or empty if the algorithm is ``tiled``.
            Sequence lengths also determine whether it is read, but not its shape, so that code
            compiled for one length works for all.
        tile_stats: int64 ``[2]``: total list length and number of tiles, initially 0. With the
            gathered algorithm they are constant 1 and 0: selections always count as scattered.
    """

    out: Tensor
    lse: Tensor
    order: Tensor
    tile_stats: Tensor

    @classmethod
    def new(cls, q: Tensor, v: Tensor, block_indices: Tensor, algorithm: str) -> SelectedResults:
        """Allocate the results; only shapes and devices are read."""
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        count = 0 if algorithm == "tiled" else block_indices.numel()
        order = block_indices.new_empty(count, dtype=torch.int32)
        tile_stats = block_indices.new_zeros(2, dtype=torch.int64)
        if algorithm == "gathered":
            tile_stats[0].fill_(1)
        return cls(out, lse, order, tile_stats)
