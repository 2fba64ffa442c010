"""Attention over the last w tokens (Eq. 5, branch win): the specification."""

from __future__ import annotations

from nsa.ops._masked_attention import masked_attention
from nsa.ops._operator import Call
from nsa.ops._packed import pad, unpad
from nsa.ops._range import RangeInputs, RangeResults
from nsa.ops._visibility import visible_window


def window_attention_reference(inputs: RangeInputs, call: Call) -> RangeResults:
    """See :func:`nsa.window_attention`; inputs are packed and checked."""
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
