"""The window branch: attention over the last w tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._backend import choose_backend
from nsa.ops._checks import check_qkv, scale_of
from nsa.ops._operator import Call
from nsa.ops._range import RangeInputs, RangeResults
from nsa.ops._sequences import open_sequences, pack
from nsa.ops.window.ops import window_attention_op
from nsa.ops.window.reference import window_attention_reference
from nsa.stages import WINDOW, in_stage

__all__ = ["run_window_attention", "window_attention"]


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
        config: the sparse pattern; of it ``window_size`` and the head counts and sizes are used.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the keys; None means those of the queries.
        max_seqlen_q: at least the longest sequence in queries; for None see
            :func:`nsa.native_sparse_attention`.
        max_seqlen_k: the same in key tokens.
        softmax_scale: factor on the scores; None means ``D ** -0.5``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        out, like ``q`` with head size Dv, and lse ``[T, Hq]`` (natural logarithm, fp32 or fp64,
        without gradient).

    Raises:
        ValueError: shapes, dtypes or offsets do not fit.
    """
    name = "window_attention"
    backend = choose_backend(name, backend, q)
    check_qkv(name, q, k, v, config)
    key_shape = tuple(k.shape[:-2])
    sequences = open_sequences(
        name, q, key_shape, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend
    )
    call = Call(config, sequences, scale_of(name, config, softmax_scale))
    out, lse = run_window_attention(RangeInputs(pack(q), pack(k), pack(v)), call, backend)
    return sequences.restore(out), sequences.restore(lse)


@in_stage(WINDOW)
def run_window_attention(inputs: RangeInputs, call: Call, backend: str) -> RangeResults:
    """See :func:`window_attention`; inputs are packed and checked, the backend is chosen."""
    if backend == "triton":
        return window_attention_op(inputs, call)
    with torch.autocast(inputs.q.device.type, enabled=False):
        return window_attention_reference(inputs, call)
