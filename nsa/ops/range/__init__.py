"""Range attention (window and compressed branch): every query sees one range of keys."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import fail
from nsa.ops._backend import choose_backend
from nsa.ops._checks import check_heads, check_qkv, scale_of
from nsa.ops._chunks import Part, concatenated, is_long, parts
from nsa.ops._masked_attention import (
    masked_attention,
    max_compressed,
    visible_compressed,
    visible_window,
)
from nsa.ops._operator import Call, KeyRange, register_attention
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops._sequences import compressed_key_shape, open_sequences, pack
from nsa.ops.range.types import RangeInputs, RangeResults
from nsa.stages import COMPRESSED, WINDOW, in_stage

__all__ = [
    "compressed_attention",
    "run_compressed_attention",
    "run_window_attention",
    "window_attention",
]


def _register(
    name: str, keys_of: Callable[[Call], KeyRange]
) -> Callable[[RangeInputs, Call], RangeResults]:
    """Register ``nsa::<name>`` and its backward; Triton is imported when they first run.

    Args:
        name: name of the operator.
        keys_of: returns the keys visible to a query.
    """

    def fake(inputs: RangeInputs, call: Call) -> RangeResults:
        return RangeResults.new(inputs.q, inputs.v)

    def forward(inputs: RangeInputs, call: Call) -> RangeResults:
        from nsa.ops.range.launch import range_forward

        results = fake(inputs, call)
        range_forward(inputs, keys_of(call), results)
        return results

    def backward(
        inputs: RangeInputs, results: RangeResults, dout: Tensor, call: Call
    ) -> RangeInputs:
        from nsa.ops.range.launch import RangeBackward

        dq = inputs.q.new_empty(inputs.q.shape)
        halves = RangeBackward(inputs, results, dout, dq, keys_of(call))
        halves.query_gradient()
        return RangeInputs(dq, *halves.key_gradients())

    return register_attention(name, RangeInputs, RangeResults, forward, backward, fake)


window_attention_op = _register("window_attention", KeyRange.of_window)
compressed_attention_op = _register("compressed_attention", KeyRange.of_blocks)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention over the tokens ``max(0, t - w + 1) .. t`` (Eq. 5, branch win, arXiv:2502.11089).

    Args:
        q: rotated queries, packed ``[T, Hq, D]`` or dense ``[B, T, Hq, D]``.
        k: rotated keys ``[S, Hkv, D]`` or ``[B, S, Hkv, D]``.
        v: values ``[S, Hkv, Dv]`` or ``[B, S, Hkv, Dv]``.
        config: the sparse pattern; only ``window_size`` and the head counts and sizes are used.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the keys; None means those of the queries.
        max_seqlen_q: upper bound on the query lengths; for None see
            :func:`nsa.native_sparse_attention`.
        max_seqlen_k: upper bound on the key lengths, in tokens.
        softmax_scale: factor on the scores; None means ``D ** -0.5``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        out, like ``q`` with head size Dv, and lse ``[T, Hq]`` (natural logarithm, fp32 or fp64,
        without gradient).

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    backend = choose_backend(backend, q)
    check_qkv(q, k, v, config)
    key_shape = tuple(k.shape[:-2])
    sequences = open_sequences(
        q, key_shape, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend
    )
    call = Call(config, sequences, scale_of(config, softmax_scale))
    out, lse = run_window_attention(RangeInputs(pack(q), pack(k), pack(v)), call, backend)
    return sequences.restore(out), sequences.restore(lse)


@in_stage(WINDOW)
def run_window_attention(inputs: RangeInputs, call: Call, backend: str) -> RangeResults:
    """See :func:`window_attention`; inputs are packed and validated, the backend is chosen."""
    if backend == "triton":
        return window_attention_op(inputs, call)
    q, k, v = inputs
    if is_long(call, q, k, v):

        def window(part: Part) -> RangeResults:
            chunk = RangeInputs(q[part.queries], k[part.keys], v[part.keys])
            return run_window_attention(chunk, part.call, backend)

        return RangeResults(*concatenated(window, parts(call, reach=call.config.window_size)))
    visible = visible_window(call.sequences, call.config)[:, None]
    out, lse = masked_attention(q, k, v, visible, call)
    assert out is not None
    return RangeResults(out, lse)


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor | None,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor]:
    """Attention over the compressed blocks fully in the past (Eqs. 5 and 7, arXiv:2502.11089).

    A query at position t sees block i if ``i * d + l - 1 <= t``.

    Args:
        q: queries, packed ``[T, Hq, D]`` or dense ``[B, T, Hq, D]``.
        k_cmp: compressed, rotated keys ``[C, Hkv, D]`` in the layout of :func:`nsa.compress`, with
            C = ``S // d``.
        v_cmp: compressed values ``[C, Hkv, Dv]``, or None to compute only lse.
        config: the sparse pattern.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the key tokens (not of the blocks); None means
            those of the queries.
        max_seqlen_q: upper bound on the query lengths; for None see
            :func:`nsa.native_sparse_attention`.
        max_seqlen_k: upper bound on the key lengths, in tokens.
        softmax_scale: factor on the scores; None means ``D ** -0.5``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        out, like ``q`` with head size Dv (None without ``v_cmp``), and lse ``[T, Hq]`` (natural
        logarithm, fp32, fp64 for fp64 inputs, without gradient). A query that sees no block has
        output 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    backend = choose_backend(backend, q)
    key_shape = compressed_key_shape(
        q, k_cmp, config, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    )
    if v_cmp is not None:
        check_heads("v_cmp", v_cmp, config.num_kv_heads, config.value_dim, q)
        if v_cmp.shape[:-2] != k_cmp.shape[:-2]:
            fail("v_cmp", f"have {k_cmp.shape[0]} rows as k_cmp", tuple(v_cmp.shape))
    sequences = open_sequences(
        q, key_shape, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend
    )
    call = Call(config, sequences.with_blocks(config), scale_of(config, softmax_scale))
    out, lse = run_compressed_attention(pack(q), k_cmp, v_cmp, call, backend)
    return None if out is None else sequences.restore(out), sequences.restore(lse)


@in_stage(COMPRESSED)
def run_compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor | None, call: Call, backend: str
) -> tuple[Tensor | None, Tensor]:
    """See :func:`compressed_attention`; inputs are packed and validated, the backend is chosen."""
    if backend == "triton":
        # For lse alone the keys serve as values: the branch is disabled then, and speed matters
        # little.
        inputs = RangeInputs(q, k_cmp, k_cmp if v_cmp is None else v_cmp)
        out, lse = compressed_attention_op(inputs, call)
        return None if v_cmp is None else out, lse
    sequences, config = call.sequences, call.config
    if is_long(call, q, k_cmp, v_cmp):
        values = k_cmp if v_cmp is None else v_cmp

        def compressed(part: Part) -> tuple[Tensor | None, Tensor]:
            chunk = q[part.queries], k_cmp[part.blocks], values[part.blocks]
            return run_compressed_attention(*chunk, part.call, backend)

        out, lse = concatenated(compressed, parts(call))
        return None if v_cmp is None else out, lse
    visible = visible_compressed(sequences, config)[:, None]
    keys = compressed_cu_seqlens(sequences.cu_k, config), max_compressed(sequences, config)
    return masked_attention(q, k_cmp, v_cmp, visible, call, keys)
