"""Attention over compressed keys (Eq. 5, branch cmp): the specification."""

from __future__ import annotations

from torch import Tensor

from nsa.ops._masked_attention import masked_attention
from nsa.ops._operator import Call
from nsa.ops._packed import compressed_cu_seqlens, pad, unpad
from nsa.ops._visibility import max_compressed, visible_compressed


def compressed_attention_reference(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor | None,
    call: Call,
) -> tuple[Tensor | None, Tensor]:
    """See :func:`nsa.compressed_attention`; inputs are packed and checked."""
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
