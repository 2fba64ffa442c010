"""Attention over the last w tokens (Eq. 5, branch win): the specification."""

from __future__ import annotations

from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._masked_attention import masked_attention
from nsa.ops._packed import pad, unpad
from nsa.ops._sequences import Sequences
from nsa.ops._visibility import visible_window


def window_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, sequences: Sequences, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """See :func:`nsa.window_attention`; inputs are packed and checked."""
    out, lse = masked_attention(
        pad(q, sequences.cu_q, sequences.max_q),
        pad(k, sequences.cu_k, sequences.max_k),
        pad(v, sequences.cu_k, sequences.max_k),
        visible_window(sequences, config)[:, None],
        softmax_scale,
    )
    assert out is not None
    return unpad(out, sequences.cu_q, q.shape[0]), unpad(lse, sequences.cu_q, q.shape[0])
