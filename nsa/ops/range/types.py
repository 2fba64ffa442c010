"""Inputs and results of attention over the window and over compressed keys (Eq. 5)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RangeInputs(NamedTuple):
    """Queries ``[T, Hq, D]``, keys ``[N, Hkv, D]`` and values ``[N, Hkv, Dv]``."""

    q: Tensor
    k: Tensor
    v: Tensor


class RangeResults(NamedTuple):
    """out ``[T, Hq, Dv]`` and lse fp32 ``[T, Hq]``, a view of ``[Hq, T]``, as kernels read it."""

    out: Tensor
    lse: Tensor

    @classmethod
    def new(cls, q: Tensor, v: Tensor) -> RangeResults:
        """Allocate the results for these queries and values."""
        num_q, num_heads, _ = q.shape
        out = q.new_empty(num_q, num_heads, v.shape[-1])
        return cls(out, q.new_empty(num_heads, num_q, dtype=torch.float32).t())
