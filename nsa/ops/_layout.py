"""Sizes of tiles, grids and heads, for the host.

Nothing here needs Triton, whose functions of these names cost microseconds a call outside kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    """Numbers and sizes of heads, constants that attention kernels are compiled for.

    Attributes:
        HQ: query heads.
        G: query heads of a KV head.
        D: size of a head of queries and keys.
        DV: size of a head of values.
        BLOCK_D: columns of a tile of queries or keys.
        BLOCK_DV: columns of a tile of values.
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
    """Columns of a tile that holds heads of this size."""
    return max(16, next_power_of_2(size))


@dataclass(frozen=True)
class Gated:
    """A branch's part in the backward of the gated sum; without gates the branch stands alone.

    Attributes:
        gates: ``[T, Hq, 3]``, contiguous, order (cmp, slc, win).
        dgates: their gradients, in the same form: each branch writes its own.
        adds: whether dq holds the gradient from branches before, to which this one's is added.
    """

    gates: Tensor | None = None
    dgates: Tensor | None = None
    adds: bool = False

    def pointers(self, lse: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gates, their gradients and the gated ``lse`` as kernels take them; None without gates."""
        if self.gates is None or self.dgates is None:
            return None
        return self.gates, self.dgates, lse


def cdiv(number: int, size: int) -> int:
    """Parts of ``size`` that hold ``number``, at least 0."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, itself at least 1."""
    return 1 << (number - 1).bit_length()


def rows(x: Tensor) -> Tensor:
    """``x [N, H, D]`` as kernels read it: heads contiguous, those of a row within 2^31 elements.

    Kernels count rows in 64 bits and heads in 32: heads lie far apart only where they are the outer
    dimension in memory.
    """
    near = (x.shape[1] - 1) * x.stride(1) + x.shape[2] <= 2**31
    return x if near and x.stride(2) == 1 else x.contiguous()


def by_head(lse: Tensor) -> Tensor:
    """lse ``[T, Hq]`` as kernels read it, ``[Hq, T]``; they wrote it so, then nothing is copied."""
    return lse.t().contiguous()
