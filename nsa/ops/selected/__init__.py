"""The selected branch: full attention over selected blocks."""

from __future__ import annotations

from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops._backend import choose_backend
from nsa.ops._checks import check_block_indices, check_qkv, scale_of
from nsa.ops._operator import Call, register_attention
from nsa.ops._sequences import open_sequences, pack
from nsa.ops.selected.reference import selected_attention_reference
from nsa.ops.selected.types import (
    ALGORITHMS,
    SelectedInputs,
    SelectedResults,
)
from nsa.stages import SELECTED, in_stage

__all__ = [
    "ALGORITHMS",
    "SelectedInputs",
    "run_selected_attention",
    "selected_attention",
]


def _forward(inputs: SelectedInputs, call: Call) -> SelectedResults:
    from nsa.ops.selected.launch import selected_forward

    results = _new_results(inputs, call)
    selected_forward(inputs, call, results)
    return results


def _backward(
    inputs: SelectedInputs, results: SelectedResults, dout: Tensor, call: Call
) -> SelectedInputs:
    from nsa.ops.selected.launch import selected_backward

    dq, dk, dv = (x.new_empty(x.shape) for x in inputs[:3])
    selected_backward(inputs, call, results, dout, (dq, dk, dv))
    return SelectedInputs(dq, dk, dv, None)  # type: ignore[arg-type]


def _new_results(inputs: SelectedInputs, call: Call) -> SelectedResults:
    q, _, v, block_indices = inputs
    return SelectedResults.new(q, v, block_indices, call.algorithm)


selected_attention_op = register_attention(
    "selected_attention", SelectedInputs, SelectedResults, _forward, _backward, _new_results
)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    algorithm: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention over selected blocks, token-causal (Eq. 5, branch slc, arXiv:2502.11089).

    It works with arbitrary block indices, not only those of :func:`nsa.select_blocks`.

    Args:
        q: rotated queries, packed ``[T, Hq, D]`` or dense ``[B, T, Hq, D]``.
        k: rotated keys ``[S, Hkv, D]`` or ``[B, S, Hkv, D]``.
        v: values ``[S, Hkv, Dv]`` or ``[B, S, Hkv, Dv]``.
        block_indices: int32 or int64 ``[T, Hkv, n]`` or ``[B, T, Hkv, n]``, any n: block ids inside
            the sequence, in any order. Duplicates count once; ids below 0 or above ``t // l'`` are
            ignored.
        config: the sparse pattern; only ``block_size`` and the head counts and sizes are used.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the keys; None means those of the queries.
        max_seqlen_q: upper bound on the query lengths; for None see
            :func:`nsa.native_sparse_attention`.
        max_seqlen_k: upper bound on the key lengths, in tokens.
        softmax_scale: factor on the scores; None means ``D ** -0.5``.
        algorithm: kernel algorithm. ``tiled``: tiles of neighboring queries against all blocks
            that any of them selected; ``gathered``: block by block, the queries that selected it;
            ``auto``: ``tiled`` for short sequences; for long ones the choice depends on the
            selection and is made on the device without synchronizing. Algorithms differ in
            rounding.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        out, like ``q`` with head size Dv, and lse ``[T, Hq]`` (natural logarithm, fp32 or fp64,
        without gradient). A query without a valid block has output 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    backend = choose_backend(backend, q)
    check(algorithm in ALGORITHMS, "algorithm", f"be one of {', '.join(ALGORITHMS)}", algorithm)
    check_qkv(q, k, v, config)
    check_block_indices(block_indices, config)
    if block_indices.shape[:-2] != q.shape[:-2]:
        rule = f"have the queries of q {tuple(q.shape[:-2])}"
        fail("block_indices", rule, tuple(block_indices.shape[:-2]))
    key_shape = tuple(k.shape[:-2])
    sequences = open_sequences(
        q, key_shape, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend
    )
    call = Call(config, sequences, scale_of(config, softmax_scale), algorithm)
    inputs = SelectedInputs(pack(q), pack(k), pack(v), pack(block_indices))
    out, lse = run_selected_attention(inputs, call, backend)
    return sequences.restore(out), sequences.restore(lse)


@in_stage(SELECTED)
def run_selected_attention(
    inputs: SelectedInputs, call: Call, backend: str
) -> tuple[Tensor, Tensor]:
    """See :func:`selected_attention`; inputs are packed and validated, the backend is chosen."""
    if backend == "triton":
        results = selected_attention_op(inputs, call)
        return results.out, results.lse
    return selected_attention_reference(inputs, call)
