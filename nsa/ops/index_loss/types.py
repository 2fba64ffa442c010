"""Inputs and results of the loss of an index head."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Ranked = Literal["selected", "all"]  # blocks that a loss ranks


class IndexLossInputs(NamedTuple):
    """Inputs of the loss.

    Attributes:
        q_idx: index queries ``[T, Hi, Di]``.
        k_idx: index keys ``[S, Hki, Di]``, one head per KV head or one for all. The Hi / Hki index
            queries of a key head belong to it, in order.
        q: queries of the selected branch ``[T, Hq, D]``.
        k: keys of the selected branch ``[S, Hkv, D]``.
        block_indices: blocks that the selected branch attends to, ``[T, Hkv, n]``; None means all.
        lse: log-sum-exp of the selected branch ``[T, Hq]``, which spares kernels the forced blocks;
            no query selects a block twice then.
        order: order of its inverse index ``[T * Hkv * n]``, if it has been sorted; see
            :func:`nsa.ops._triton.selected_index.is_always_tiled`.
    """

    q_idx: Tensor
    k_idx: Tensor
    q: Tensor
    k: Tensor
    block_indices: Tensor | None
    lse: Tensor | None = None
    order: Tensor | None = None


class IndexLoss(NamedTuple):
    """Loss of an index head over all queries and KV heads that have a block to rank.

    Attributes:
        total: sum of the divergences, nats, fp32 scalar (fp64 for fp64 inputs).
        num_terms: number of pairs of query and KV head in the sum, int64 scalar. The loss is the
            quotient of the sums of both over micro-batches and ranks.
    """

    total: Tensor
    num_terms: Tensor
