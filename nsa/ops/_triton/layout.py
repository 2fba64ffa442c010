"""What attention kernels are told besides sequences: sizes of heads, and gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nsa.ops._triton.sizes import next_power_of_2


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
        """Of queries ``[T, Hq, D]`` and values ``[N, Hkv, Dv]``."""
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
