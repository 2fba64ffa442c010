"""Decode step: append new tokens to the cache and attend to it, with dedicated kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Maximum number of tokens per sequence in one step.
MOST_QUERIES = 8


class CacheTensors(NamedTuple):
    """One layer's decode cache. Tensors of a disabled branch are None.

    Attributes:
        k_slc: key pages of the selected branch ``[pages * l', Hkv, D]``.
        v_slc: value pages of the selected branch ``[pages * l', Hkv, Dv]``.
        k_win: key ring buffer of the window of every sequence ``[B * ring, Hkv, D]``.
        v_win: value ring buffer of the window.
        k_raw: ring buffer of the tokens that the next compressed block may need
            ``[B * ring, Hkv, D]``.
        v_raw: ring buffer of their values; None if compressed keys are only scored.
        k_idx: pages of index keys ``[pages * l', Hkv or 1, index_dim]``; None without an index.
        k_cmp: pages of compressed keys ``[pages * l' / d, Hkv, D]``, rotated.
        v_cmp: pages of compressed values.
        table: page indices of every sequence, int32 ``[B, max pages]``.
        lengths: cached tokens of every sequence, int32 ``[B]``.
        counters: int32 zeros ``[2, B * Hq * max queries]``.
    """

    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    k_raw: Tensor | None
    v_raw: Tensor | None
    k_idx: Tensor | None
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    table: Tensor
    lengths: Tensor
    counters: Tensor

    @property
    def num_sequences(self) -> int:
        """Number of sequences B."""
        return self.lengths.shape[0]


class NewTokens(NamedTuple):
    """New tokens of a step, ``[B * queries, heads, size]`` each, contiguous, in cache order."""

    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    k_raw: Tensor | None
    v_raw: Tensor | None
    k_idx: Tensor | None
