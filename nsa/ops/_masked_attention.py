"""Masked softmax attention over padded sequences, and the masks of each branch."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._operator import Call
from nsa.ops._packed import LEAST_SIZE, lengths, num_compressed, pad, unpad
from nsa.ops._sequences import Sequences


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Dtype of scores, softmax statistics and accumulators: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def grouped_scores(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Scaled dot products of each query head with the keys of its group.

    Args:
        q: ``[B, T, Hq, D]``.
        k: ``[B, S, Hkv, D]``.
        softmax_scale: factor on the products.

    Returns:
        ``[B, Hkv, G * T, S]`` in the accumulation dtype.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    dtype, group_size = accumulate_dtype(q), num_heads // num_kv_heads
    rows = (
        q.to(dtype)
        .view(batch, num_queries, num_kv_heads, group_size, head_dim)
        .permute(0, 2, 3, 1, 4)
    )
    rows = rows.reshape(batch, num_kv_heads, group_size * num_queries, head_dim) * softmax_scale
    return rows @ k.to(dtype).permute(0, 2, 3, 1)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    visible: Tensor,
    call: Call,
    keys: tuple[Tensor, int] | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Softmax attention of packed sequences over their visible keys, without autocast.

    Args:
        q: ``[T, Hq, D]``.
        k: ``[N, Hkv, D]``.
        v: ``[N, Hkv, Dv]``, or None for lse alone.
        visible: bool ``[B, Hkv or 1, T, S]``, padded.
        call: the sequences, and the factor on the scores.
        keys: offsets of the keys, and their largest number in a sequence; None means tokens.

    Returns:
        out ``[T, Hq, Dv]`` in the dtype of ``q`` (None without ``v``), and lse ``[T, Hq]``.
    """
    sequences = call.sequences
    keys = keys or (sequences.cu_k, sequences.max_k)
    rows = pad(q, sequences.cu_q, sequences.max_q), pad(k, *keys)
    with torch.autocast(q.device.type, enabled=False):
        values = None if v is None else pad(v, *keys)
        out, lse = padded_attention(*rows, values, visible, call.softmax_scale)
    lse = unpad(lse, sequences.cu_q, q.shape[0])
    return None if out is None else unpad(out, sequences.cu_q, q.shape[0]), lse


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor | None, visible: Tensor, softmax_scale: float
) -> tuple[Tensor | None, Tensor]:
    """Softmax attention of padded sequences over their visible keys.

    Args:
        q: ``[B, T, Hq, D]``.
        k: ``[B, S, Hkv, D]``.
        v: ``[B, S, Hkv, Dv]``, or None for lse alone.
        visible: bool ``[B, Hkv or 1, T, S]``.
        softmax_scale: factor on the scores.

    Returns:
        out ``[B, T, Hq, Dv]`` in the dtype of ``q`` (None without ``v``); lse ``[B, T, Hq]`` in the
        accumulation dtype. A row without a visible key has output 0, lse -inf and zero gradient.
    """
    batch, num_queries, num_heads, _ = q.shape
    scores = grouped_scores(q, k, softmax_scale)
    group_size = num_heads // k.shape[2]
    hidden = ~visible.repeat(1, 1, group_size, 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    # A finite maximum: for a row without visible keys, -inf - -inf would be NaN.
    row_max = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - row_max)  # [B, Hkv, G * T, S]
    total = weights.sum(-1, keepdim=True)
    lse = (row_max + total.log()).detach().view(batch, num_heads, num_queries).transpose(1, 2)
    if v is None:
        return None, lse
    out = weights @ v.to(weights.dtype).transpose(1, 2) / torch.where(total > 0, total, 1.0)
    out = out.unflatten(2, (group_size, num_queries)).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_queries, num_heads, v.shape[-1]).to(q.dtype), lse


def padded_positions(sequences: Sequences) -> Tensor:
    """Position t of each padded query row, int64 ``[B, T]``; the last query is at the last key."""
    row = torch.arange(sequences.max_q, device=sequences.cu_q.device)
    return row + (lengths(sequences.cu_k) - lengths(sequences.cu_q))[:, None]


def max_compressed(sequences: Sequences, config: NSAConfig) -> int:
    """Upper bound on the compressed blocks per sequence, at least 2."""
    blocks = (sequences.max_k - config.compress_block_size) // config.compress_stride + 1
    return max(blocks, LEAST_SIZE)


def max_blocks(sequences: Sequences, config: NSAConfig) -> int:
    """Upper bound M on the selection blocks per sequence, at least 2."""
    return max(-(-sequences.max_k // config.block_size), LEAST_SIZE)


def visible_compressed(sequences: Sequences, config: NSAConfig) -> Tensor:
    """Mask of compressed blocks fully in the past (``i * d + l - 1 <= t``), bool ``[B, T, C]``."""
    block = torch.arange(max_compressed(sequences, config), device=sequences.cu_q.device)
    return block < num_compressed(padded_positions(sequences) + 1, config)[..., None]


def visible_tokens(sequences: Sequences) -> Tensor:
    """Causal mask, the query's own token included, bool ``[B, T, S]``."""
    token = torch.arange(sequences.max_k, device=sequences.cu_q.device)
    return token <= padded_positions(sequences)[..., None]


def visible_window(sequences: Sequences, config: NSAConfig) -> Tensor:
    """Mask of the last ``window_size`` tokens, own token included, bool ``[B, T, S]``."""
    token = torch.arange(sequences.max_k, device=sequences.cu_q.device)
    return visible_tokens(sequences) & (
        token > padded_positions(sequences)[..., None] - config.window_size
    )
