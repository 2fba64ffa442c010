"""A decode step: new tokens go into the cache, and their queries read it, on kernels of its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Tokens of a sequence in one step, at most.
MOST_QUERIES = 8


class CacheTensors(NamedTuple):
    """A layer's part of the decode cache; Tensors of a disabled branch are None.

    Attributes:
        k_slc: pages of the selected branch ``[pages * l', Hkv, D]``.
        v_slc: the same of values ``[pages * l', Hkv, Dv]``.
        k_win: ring of the window of every sequence ``[B * ring, Hkv, D]``.
        v_win: the same of values.
        k_raw: ring of the tokens that the next compressed block may need ``[B * ring, Hkv, D]``.
        v_raw: the same of values; None where only scores need compressed keys.
        k_cmp: pages of compressed keys ``[pages * l' / d, Hkv, D]``, rotated.
        v_cmp: the same of values.
        table: pages of every sequence, int32 ``[B, most pages]``.
        lengths: tokens cached of every sequence, int32 ``[B]``.
        counters: int32 zeros ``[2, B * Hq * most queries]``.
    """

    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    k_raw: Tensor | None
    v_raw: Tensor | None
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    table: Tensor
    lengths: Tensor
    counters: Tensor

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.lengths.shape[0]


class NewTokens(NamedTuple):
    """New tokens of a step, ``[B * queries, Hkv, size]`` each, contiguous, in the cache's order."""

    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    k_raw: Tensor | None
    v_raw: Tensor | None
