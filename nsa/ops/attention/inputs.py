"""What the fused operator reads and gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BranchInputs(NamedTuple):
    """What the three branches and their gated sum are computed of; None: of a branch that is off.

    Attributes:
        q: rotated queries ``[T, Hq, D]``.
        q_cmp: queries of the compressed branch and of the scores; None means ``q``.
        k_cmp: compressed keys, rotated, ``[C, Hkv, D]``; None where no blocks are scored.
        v_cmp: compressed values ``[C, Hkv, Dv]``.
        k_slc: rotated keys of the selected branch ``[S, Hkv, D]``.
        v_slc: values of the selected branch ``[S, Hkv, Dv]``.
        k_win: rotated keys of the window ``[S, Hkv, D]``.
        v_win: values of the window ``[S, Hkv, Dv]``.
        gates: ``[T, Hq, 3]``.
    """

    q: Tensor
    q_cmp: Tensor | None
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    gates: Tensor

    @property
    def scoring_queries(self) -> Tensor:
        """Queries of the compressed branch and of the scores."""
        return self.q if self.q_cmp is None else self.q_cmp


class AttentionResult(NamedTuple):
    """What attention gives besides gradients.

    Attributes:
        out: ``[T, Hq, Dv]``.
        block_indices: the selected blocks, int32 ``[T, Hkv, n]``; None without the selected branch.
        tile_stats: int64 ``[2]``: the counters by which its algorithm was chosen, 0 where shapes
            alone chose it; None without the branch, and for the reference.
    """

    out: Tensor
    block_indices: Tensor | None
    tile_stats: Tensor | None
