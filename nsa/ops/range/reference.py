"""Attention over the window and over compressed keys (Eq. 5): types and specification."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops._masked_attention import (
    masked_attention,
    max_compressed,
    visible_compressed,
    visible_window,
)
from nsa.ops._operator import Call
from nsa.ops._packed import compressed_cu_seqlens, pad, unpad


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


def window_attention_reference(inputs: RangeInputs, call: Call) -> RangeResults:
    """See :func:`nsa.window_attention`; inputs are packed and validated."""
    (q, k, v), sequences = inputs, call.sequences
    out, lse = masked_attention(
        pad(q, sequences.cu_q, sequences.max_q),
        pad(k, sequences.cu_k, sequences.max_k),
        pad(v, sequences.cu_k, sequences.max_k),
        visible_window(sequences, call.config)[:, None],
        call.softmax_scale,
    )
    assert out is not None
    return RangeResults(*(unpad(x, sequences.cu_q, q.shape[0]) for x in (out, lse)))


def compressed_attention_reference(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor | None,
    call: Call,
) -> tuple[Tensor | None, Tensor]:
    """See :func:`nsa.compressed_attention`; inputs are packed and validated."""
    config, sequences = call.config, call.sequences
    cu_cmp = compressed_cu_seqlens(sequences.cu_k, config)
    max_cmp = max_compressed(sequences, config)
    out, lse = masked_attention(
        pad(q, sequences.cu_q, sequences.max_q),
        pad(k_cmp, cu_cmp, max_cmp),
        None if v_cmp is None else pad(v_cmp, cu_cmp, max_cmp),
        visible_compressed(sequences, config)[:, None],
        call.softmax_scale,
    )
    lse = unpad(lse, sequences.cu_q, q.shape[0])
    return None if out is None else unpad(out, sequences.cu_q, q.shape[0]), lse
