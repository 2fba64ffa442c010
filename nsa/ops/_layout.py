"""Host-side arithmetic of tiles, grids and heads, and the layouts that kernels read.

It does not use Triton: its ``cdiv`` and ``next_power_of_2`` cost microseconds per host call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Rows of the packed weights are padded to a multiple of this: Triton specializes only on strides
# that are multiples of 16, which allow 16-byte loads.
ALIGNMENT = 16


# Queries per tile: the number of bits of a query mask.
MAX_QUERIES = 32


class Heads(NamedTuple):
    """Head counts and sizes, passed to attention kernels as compile-time constants.

    Attributes:
        HQ: number of query heads.
        G: query heads per KV head.
        D: head size of queries and keys.
        DV: head size of values.
        BLOCK_D: columns of a query or key tile.
        BLOCK_DV: columns of a value tile.
    """

    HQ: int
    G: int
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> Heads:
        """Return the sizes for queries ``[T, Hq, D]`` and values ``[N, Hkv, Dv]``."""
        _, num_heads, head_dim = q.shape
        _, num_kv_heads, value_dim = v.shape
        sizes = (head_dim, value_dim, block_of(head_dim), block_of(value_dim))
        return cls(num_heads, num_heads // num_kv_heads, *sizes)


def block_of(size: int) -> int:
    """Number of columns of a tile for heads of this size."""
    return max(16, next_power_of_2(size))


@dataclass(frozen=True)
class Gated:
    """Gates and gradients that a branch uses in the backward pass of the gated sum.

    Attributes:
        gates: ``[T, Hq, 3]``, contiguous, order (cmp, slc, win).
        dgates: gradients of the gates, same shape; each branch writes its own column.
        adds: whether dq already contains the gradient of earlier branches, to be added to.
    """

    gates: Tensor | None = None
    dgates: Tensor | None = None
    adds: bool = False

    def pointers(self, lse: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Kernel arguments: gates, their gradients and the gated ``lse``; None without gates."""
        if self.gates is None or self.dgates is None:
            return None
        return self.gates, self.dgates, lse


def cdiv(number: int, size: int) -> int:
    """Ceiling division, at least 0."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """Smallest power of two that is at least ``number``; ``number`` must be at least 1."""
    return 1 << (number - 1).bit_length()


def rows(x: Tensor) -> Tensor:
    """``x [N, H, D]`` in the layout that kernels read: D contiguous, head offsets below 2^31.

    Kernels use 64-bit row offsets and 32-bit head offsets. Head offsets are that large only if
    heads are the outer dimension in memory.
    """
    near = (x.shape[1] - 1) * x.stride(1) + x.shape[2] <= 2**31
    return x if near and x.stride(2) == 1 else x.contiguous()


def by_head(lse: Tensor) -> Tensor:
    """lse ``[T, Hq]`` as contiguous ``[Hq, T]``; no copy if a kernel wrote it."""
    return lse.t().contiguous()


def padded(rows: int) -> int:
    """Number of rows including padding."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


@torch.no_grad()
def packed(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy weights ``[n, width]`` to one matrix ``[N, width]``, which ends with rows of zeros."""
    rows = [weight.shape[0] for weight in weights]
    used = sum(rows)
    whole = weights[0].new_empty(padded(used), weights[0].shape[1], dtype=dtype)
    torch._foreach_copy_(whole[:used].split(rows), list(weights))
    whole[used:].zero_()
    return whole


def always_tiled(
    algorithm: str,
    group_size: int,
    n: int,
    len_q: int,
    len_k: int,
    block_size: int,
    scatter: float,
) -> bool:
    """Whether the tiled algorithm runs regardless of the selection.

    Args:
        algorithm: ``tiled``, ``gathered``, or ``auto``: tiled if the shapes bound the lists to be
            short, otherwise chosen on the device by the selection.
        group_size: query heads per KV head.
        n: slots of a query.
        len_q: upper bound on the query lengths.
        len_k: upper bound on the key lengths, in tokens.
        block_size: tokens of a block.
        scatter: threshold of the forward, see :func:`nsa.ops._triton.tuning.scatter_of`.
    """
    queries = min(max(64 // group_size, 1), MAX_QUERIES)  # whole ones in a tile of 64 rows
    blocks = -(-len_k // block_size)
    # Averaged over all positions, queries see half of the blocks.
    longest = min(queries * n, blocks if len_q < len_k else (blocks + 1) // 2)
    return algorithm == "tiled" or (algorithm == "auto" and longest <= scatter * n)
