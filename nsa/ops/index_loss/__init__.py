"""Loss that trains an index head to select the blocks with the largest attention mass."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops._backend import choose_backend
from nsa.ops._checks import check_block_indices, check_heads, scale_of
from nsa.ops._operator import Call
from nsa.ops._sequences import open_sequences, pack
from nsa.ops.index_loss.ops import run_operator
from nsa.ops.index_loss.recall import BlockRecall, block_recall
from nsa.ops.index_loss.reference import index_loss_reference
from nsa.ops.index_loss.types import IndexLoss, IndexLossInputs, Ranked
from nsa.stages import SELECTION, in_stage

__all__ = [
    "BlockRecall",
    "IndexLoss",
    "IndexLossInputs",
    "Ranked",
    "block_recall",
    "index_loss",
    "run_index_loss",
]


def index_loss(
    q_idx: Tensor,
    k_idx: Tensor,
    q: Tensor,
    k: Tensor,
    block_indices: Tensor | None,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    backend: str = "auto",
) -> IndexLoss:
    """Divergence of an index head's block scores from the attention mass of the blocks.

    For each query and KV head, the blocks to rank are the attended ones that are not forced. The
    target is their attention mass in the selected branch, averaged over the query heads of the
    group; the prediction is their index score, the sum over the index heads of ``exp(m - L)``.
    m is the largest ``q_idx.k_idx * Di ** -0.5`` of a token ``<= t`` of the block, and L the
    log-sum-exp of these products over the forced blocks. Both are normalized over the blocks to
    rank, and the loss is the Kullback-Leibler divergence of the prediction from the target.

    Only ``q_idx`` and ``k_idx`` have gradients: through m, to the first token with the largest
    product, and not through L. Sums have a fixed order.

    Args:
        q_idx: rotated index queries, packed ``[T, Hi, Di]`` or dense ``[B, T, Hi, Di]``.
        k_idx: rotated index keys ``[S, Hki, Di]`` or ``[B, S, Hki, Di]``. Hki is Hkv, or 1 for one
            key head that all KV heads share; each key head has Hi / Hki index query heads.
        q: rotated queries of the selected branch, ``[T, Hq, D]`` or ``[B, T, Hq, D]``.
        k: rotated keys of the selected branch, ``[S, Hkv, D]`` or ``[B, S, Hkv, D]``.
        block_indices: blocks that the selected branch attends to, as in
            :func:`nsa.selected_attention`. None means all blocks up to the query's own: the target
            is then the mass of dense attention, at the cost of dense attention.
        config: the sparse pattern; block size, forced blocks, head counts and sizes are used.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the keys; None means those of the queries.
        max_seqlen_q: upper bound on the query lengths; for None see
            :func:`nsa.native_sparse_attention`.
        max_seqlen_k: upper bound on the key lengths, in tokens.
        softmax_scale: factor on ``q.k``; None means ``D ** -0.5``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        Sum of the divergences, and number of pairs of query and KV head with a block to rank.

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    backend = choose_backend(backend, q)
    check_heads("q", q, config.num_heads, config.head_dim, q)
    check_heads("k", k, config.num_kv_heads, config.head_dim, q)
    (num_heads, index_dim), key_heads = q_idx.shape[-2:], k_idx.shape[-2]
    allowed = {1, config.num_kv_heads}
    check(key_heads in allowed, "k_idx", "have 1 head or as many as k", key_heads)
    fits = num_heads > 0 and num_heads % key_heads == 0
    check(fits, "q_idx", f"have a multiple of the heads of k_idx ({key_heads})", num_heads)
    check_heads("q_idx", q_idx, num_heads, index_dim, q)
    check_heads("k_idx", k_idx, key_heads, index_dim, q)
    for name, x, like in (("q_idx", q_idx, q), ("k_idx", k_idx, k)):
        rule = f"have the tokens of {name[0]} {tuple(like.shape[:-2])}"
        check(x.shape[:-2] == like.shape[:-2], name, rule, tuple(x.shape[:-2]))
    if block_indices is not None:
        check_block_indices(block_indices, config)
        if block_indices.shape[:-2] != q.shape[:-2]:
            rule = f"have the queries of q {tuple(q.shape[:-2])}"
            fail("block_indices", rule, tuple(block_indices.shape[:-2]))
    sequences = open_sequences(
        q, tuple(k.shape[:-2]), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend
    )
    call = Call(config, sequences, scale_of(config, softmax_scale))
    ids = None if block_indices is None else pack(block_indices)
    inputs = IndexLossInputs(pack(q_idx), pack(k_idx), pack(q), pack(k), ids)
    return run_index_loss(inputs, call, backend)


@in_stage(SELECTION)
def run_index_loss(inputs: IndexLossInputs, call: Call, backend: str) -> IndexLoss:
    """See :func:`index_loss`; inputs are packed and validated, the backend is chosen."""
    if backend == "triton":
        return run_operator(inputs, call)
    with torch.autocast(inputs.q.device.type, enabled=False):
        return index_loss_reference(inputs, call)
