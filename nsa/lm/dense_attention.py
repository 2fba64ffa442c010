"""Dense causal attention, the baseline, with the heads and rotary settings of a pattern."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.attention import AttentionInputs
from nsa.cache import LayerCache
from nsa.config import NSAConfig
from nsa.module import ProjectedAttention, RMSNorm
from nsa.ops._backend import on_gpu
from nsa.ops._sequences import Sequences, open_layer_input
from nsa.ops.projection import Heads
from nsa.stages import DENSE, PROJECTION, in_stage, stage

# Dtypes of the variable-length kernel, and its options for causal grouped-query attention.
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_OPTIONS: dict[str, Any] = {"window_size": (-1, 0)}
if torch.__version__ >= "2.12":  # older versions always group
    _VARLEN_OPTIONS["enable_gqa"] = True

# Windows over a whole cache are rounded up to a multiple of this number of tokens.
_WINDOWS = 4096

# Backends of causal attention without a mask on a GPU, fastest first; the last is for fp32.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def dense_pattern(config: NSAConfig, max_tokens: int) -> NSAConfig:
    """Return the pattern of a dense decode cache: a window over all tokens."""
    # round up to few window sizes: kernels are compiled for each
    window = -(-max_tokens // _WINDOWS) * _WINDOWS
    one = replace(config, branches=("win",), window_size=window, share_kv=False)
    return replace(one, gate="fixed", gate_bias=0.0, gate_temperature=1.0)


class DenseAttention(ProjectedAttention):
    """Causal grouped-query attention through PyTorch's ``scaled_dot_product_attention``.

    Args:
        width: size of the residual stream.
        config: heads, head sizes and rotary settings; other fields are not used.
    """

    def __init__(self, width: int, config: NSAConfig) -> None:
        super().__init__(width, config)
        has_bias, is_all = config.projection_bias != "none", config.projection_bias == "all"
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=has_bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=has_bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.value_dim, bias=has_bias)
        self.o_proj = nn.Linear(config.num_heads * config.value_dim, width, bias=is_all)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.qk_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.qk_norm_eps)
        queries = Heads(config.num_heads, config.head_dim, (True,))
        keys = Heads(config.num_kv_heads, config.head_dim, (True,))
        self.describe_columns([queries, keys, Heads(config.num_kv_heads, config.value_dim)])

    def attention_inputs(self, found: list[Tensor], x: Tensor) -> AttentionInputs:
        """Inputs of the decode cache: heads ``[T, H, size]`` of the window, with a gate of 1."""
        q, k, v = found
        return AttentionInputs(q, None, None, None, None, k, v, None, None)

    def attend_cached(
        self, found: list[Tensor], x: Tensor, sequences: Sequences, cache: LayerCache
    ) -> Tensor:
        """Append new tokens to the cache; return their attention output ``[T, Hq, Dv]``."""
        inputs = self.attention_inputs(found, x)
        cu_seqlens = None if sequences.offsets is None else sequences.cu_q
        q, k, v = found
        alone = partial(causal_attention, q, k, v, cu_seqlens, sequences.len_q)
        return cache.attend(inputs, rope=self.rope, sequences=sequences, alone=alone)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        sequences: Sequences | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend; see :class:`nsa.NativeSparseAttention`.

        Args:
            x: packed ``[T, width]`` or a dense batch ``[B, T, width]``.
            cu_seqlens: int32 ``[B + 1]`` offsets of the packed sequences; None means one sequence.
            max_seqlen: at least the longest sequence, tokens; None means all tokens.
            attention_mask: bool or integer ``[B, T]`` of a padded batch.
            sequences: replaces the previous three arguments.
            cache: decode cache; ``x`` then contains the tokens after the cached ones.

        Returns:
            The layer's output, shaped like ``x``.

        Raises:
            ValueError: shapes or offsets do not match.
        """
        shape = x.shape
        x, sequences = open_layer_input(
            x, self.width, cu_seqlens, max_seqlen, attention_mask, sequences
        )
        before = None if cache is None else cache.lengths(sequences, x.shape[0])
        heads = self._project(x, sequences, before)
        if cache is None:
            cu_seqlens = None if sequences.offsets is None else sequences.cu_q
            q, k, v = heads
            out = causal_attention(q, k, v, cu_seqlens, sequences.len_q)
        else:
            out = self.attend_cached(heads, x, sequences, cache)
        with stage(PROJECTION):
            return self.o_proj(out.flatten(-2)).view(shape)


@in_stage(DENSE)
def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None = None
) -> Tensor:
    """Causal softmax attention within each packed sequence, with PyTorch's kernels.

    Lengths are not read. If all sequences have ``max_seqlen`` tokens, they run as a batch through
    causal SDPA. Otherwise the variable-length kernel (``torch.nn.attention.varlen``) runs on a GPU
    in bf16 or fp16, and masked SDPA elsewhere. The backward pass of the variable-length kernel sums
    the gradient of q with atomics, so its last bits may differ between runs.

    Args:
        q: rotated queries ``[T, Hq, D]``.
        k: rotated keys ``[T, Hkv, D]``.
        v: values ``[T, Hkv, Dv]``.
        cu_seqlens: int32 ``[B + 1]`` offsets of the sequences; None means that all have
            ``max_seqlen`` tokens.
        max_seqlen: at least the longest sequence, tokens; None means T.

    Returns:
        ``[T, Hq, Dv]`` in the dtype of ``q``.
    """
    num_tokens = q.shape[0]
    size = max(num_tokens if max_seqlen is None else max_seqlen, 1)
    if cu_seqlens is not None:
        size = max(min(size, num_tokens), 1)
    # Lengths of at most ``size`` whose sum is B * size are all ``size``.
    if cu_seqlens is None or (cu_seqlens.shape[0] - 1) * size == num_tokens:
        queries, keys, values = (x.unflatten(0, (-1, size)) for x in (q, k, v))
        return _sdpa(queries, keys, values, None).flatten(0, 1)
    if on_gpu(q) and q.dtype in _VARLEN_DTYPES and k.shape[-1] == v.shape[-1]:
        # Imported here: it takes two seconds, for a compiler that only training needs.
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, size, size, **_VARLEN_OPTIONS)
        assert isinstance(out, Tensor)  # no lse was requested
        return out
    return _banded_attention(q, k, v, cu_seqlens, size)


def _banded_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, size: int) -> Tensor:
    """:func:`causal_attention` of sequences of at most ``size`` tokens, with a mask.

    Tokens are split into chunks of ``size``: no sequence is longer, so a query sees keys of its
    own chunk and of the one before it, however many sequences there are. The mask has
    ``2 * size`` entries per token.
    """
    num_tokens = q.shape[0]
    padding = -num_tokens % size
    row = torch.arange(num_tokens + padding, device=q.device)
    # padding rows have sequence B, which does not exist
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    sequence, row = sequence.view(-1, size), row.view(-1, size)
    queries, keys, values = (
        nn.functional.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, size)) for x in (q, k, v)
    )
    same = sequence[:, :, None] == _with_previous(sequence, -1)[:, None, :]
    # [num_chunks, size, 2 * size]
    visible = same & (_with_previous(row, -1)[:, None, :] <= row[:, :, None])
    out = _sdpa(queries, _with_previous(keys, 0), _with_previous(values, 0), visible)
    return out.flatten(0, 1)[:num_tokens]


def _with_previous(x: Tensor, fill: int) -> Tensor:
    """Concatenate each chunk to the previous one: ``[N, size, ...]`` to ``[N, 2 * size, ...]``.

    The first chunk is concatenated to ``fill``.
    """
    return torch.cat((torch.cat((torch.full_like(x[:1], fill), x[:-1])), x), dim=1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """SDPA over ``[B, T, H, D]``; causal if ``visible`` (bool ``[B, T, S]``) is None."""
    group_size = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = nn.functional.scaled_dot_product_attention
    if on_gpu(q) and visible is None:
        with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
            out = attend(q, k, v, is_causal=True, enable_gqa=group_size > 1)
    else:
        if group_size > 1:  # not all SDPA kernels support grouped heads
            k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
        mask = None if visible is None else visible[:, None]
        out = attend(q, k, v, attn_mask=mask, is_causal=visible is None)
    return out.transpose(1, 2)
