"""Selection of the blocks that a query attends to in full."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._checks import check_heads, scale_of
from nsa.ops._operator import Call, FlatCall, open_flat, schema_of
from nsa.ops._register import register
from nsa.ops._sequences import compressed_key_shape, open_sequences, pack
from nsa.ops.selection.reference import (
    SelectionInputs,
    blocks_to_ranges,
    new_selection,
    select_blocks_reference,
)
from nsa.stages import SELECTION, in_stage

__all__ = ["SelectionInputs", "blocks_to_ranges", "run_select_blocks", "select_blocks"]


def _run(*flat: Any) -> Tensor:
    from nsa.ops.selection.launch import run_selection

    inputs, call = open_flat(SelectionInputs, 3, flat)
    out = new_selection(inputs.q, call.config)
    run_selection(inputs, call, out)
    return out


def _fake(*flat: Any) -> Tensor:
    inputs, call = open_flat(SelectionInputs, 3, flat)
    return new_selection(inputs.q, call.config)


select_blocks_op = register(
    "select_blocks", f"({schema_of(SelectionInputs, FlatCall)}) -> Tensor", _run, _fake
)


@torch.no_grad()
def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Select n blocks for every query and KV head (Eqs. 8 to 12, arXiv:2502.11089).

    Blocks ``0 .. t // l'`` are ranked by scores, summed over the heads of a group. With
    ``config.scores`` ``compressed`` they are the probabilities of the compressed branch,
    distributed over the tokens that compression and selection blocks share; with ``token_max`` they
    are the largest weight of a token of the block, relative to all weights in forced blocks; with
    ``index`` the same of index queries and keys; with ``random`` they are hashes of position, KV
    head and block. The first ``num_init_blocks`` and the last ``num_local_blocks`` are always
    selected. All query heads of a group share the selection; it has no gradient.

    Args:
        q: the queries of the compressed branch, packed ``[T, Hq, D]`` or dense ``[B, T, Hq, D]``;
            with ``index`` the rotated index queries, with other scores those of the selected
            branch.
        k_cmp: compressed, rotated keys ``[C, Hkv, D]``; with other scores the rotated keys of the
            selected branch, ``[S, Hkv, D]`` or ``[B, S, Hkv, D]``. Index keys and queries have the
            shapes described for :func:`nsa.native_sparse_attention`.
        lse: result of :func:`nsa.compressed_attention` for the same queries and keys, ``[T, Hq]``
            or ``[B, T, Hq]``; None with other scores.
        config: the sparse pattern.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the key tokens; None means those of the queries.
        max_seqlen_q: upper bound on the query lengths; for None see
            :func:`nsa.native_sparse_attention`.
        max_seqlen_k: upper bound on the key lengths, in tokens.
        softmax_scale: factor on the scores; None means ``D ** -0.5``, with ``index``
            ``index_dim ** -0.5``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        int32 ``[T, Hkv, n]`` (``[B, T, Hkv, n]`` for a dense batch): block ids inside the sequence,
        ascending, unique, padded with -1 at the end.

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    backend, heads = choose_backend(backend, q), config.scoring
    if config.scores != "compressed":
        check(lse is None, "lse", f"be None with scores {config.scores}", "a tensor")
        check_heads("q", q, heads.num_heads, heads.head_dim, q)
        check_heads("k_cmp", k_cmp, heads.num_kv_heads, heads.head_dim, q)
        key_shape = tuple(k_cmp.shape[:-2])
    else:
        offsets = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        key_shape = compressed_key_shape(q, k_cmp, config, offsets)
        shape = None if lse is None else tuple(lse.shape)
        check(shape == q.shape[:-1], "lse", f"have shape {tuple(q.shape[:-1])}", shape)
    sequences = open_sequences(
        q, key_shape, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend
    )
    if lse is not None:
        lse = lse.reshape(-1, config.num_heads)
        sequences = sequences.with_blocks(config)
    call = Call(config, sequences, scale_of(heads, softmax_scale))
    inputs = SelectionInputs(pack(q), pack(k_cmp), lse)
    return sequences.restore(run_select_blocks(inputs, call, backend))


@in_stage(SELECTION)
@torch.no_grad()
def run_select_blocks(inputs: SelectionInputs, call: Call, backend: str) -> Tensor:
    """See :func:`select_blocks`; inputs are packed and validated, the backend is chosen."""
    if backend == "triton":
        blocks: Tensor = select_blocks_op(*inputs, *call.flat())
        return blocks
    with torch.autocast(inputs.q.device.type, enabled=False):
        return select_blocks_reference(inputs, call)
