"""Floating-point operations of a model, for model FLOPs utilization (MFU)."""

from __future__ import annotations

from functools import lru_cache

from nsa.lm.baseline import parameters_by_part
from nsa.lm.config import LMConfig


def keys_per_query(config: LMConfig, seq_len: int) -> float:
    """Keys per query in one layer, summed over branches, averaged over positions.

    Args:
        config: the model, from :meth:`LMConfig.layer`.
        seq_len: tokens of a sequence.
    """
    if config.attention == "dense":
        return _triangle(seq_len) / seq_len
    pattern, keys = config.nsa, 0
    if "cmp" in pattern.branches:
        stride, first = pattern.compress_stride, pattern.compress_block_size - 1
        blocks, rest = divmod(max(seq_len - first, 0), stride)
        keys += stride * _triangle(blocks) + rest * (blocks + 1)
    if "slc" in pattern.branches:
        size, others = pattern.block_size, pattern.num_selected_blocks - 1
        dense = min(seq_len, (others + 1) * size)  # positions that see all earlier tokens
        blocks, rest = divmod(seq_len - dense, size)
        keys += _triangle(dense) + blocks * _triangle(size) + _triangle(rest)
        keys += (seq_len - dense) * others * size
    if "win" in pattern.branches:
        dense = min(seq_len, pattern.window_size)
        keys += _triangle(dense) + (seq_len - dense) * pattern.window_size
    return keys / seq_len


def _triangle(n: int) -> int:
    """1 + 2 + .. + n."""
    return n * (n + 1) // 2


@lru_cache
def flops_per_token(config: LMConfig, seq_len: int, *, backward: bool = True) -> float:
    """Operations of one training token, forward and backward.

    A multiply-add counts as two. Matrix products with parameters need 2 operations per parameter
    forward and 4 backward; attention needs 2 * (D + Dv) per head and visible key forward and twice
    that backward. Scores of tokens (``token_max``, ``index``) need 2 * D per scoring head and token
    up to the query's own, forward alone. Norms, rotation, compression, other scores, the optimizer
    and recomputation are not counted.

    Args:
        config: the model.
        seq_len: tokens of a sequence.
        backward: whether the backward pass counts.
    """
    count = parameters_by_part(config)
    head = config.vocab_size * config.width
    in_products = head + count["attention"] + count["gate"] + count["mlp"]
    attention = scores = 0.0
    for kind, layers in config.kinds.items():
        pattern, number = kind.nsa, len(layers) * kind.nsa.num_heads
        a_key = 2 * (pattern.head_dim + pattern.value_dim)
        attention += number * a_key * keys_per_query(kind, seq_len)
        if kind.attention == "nsa" and pattern.scores_tokens:
            heads = pattern.scoring
            each = 2 * heads.head_dim * heads.num_heads * len(layers)
            scores += each * _triangle(seq_len) / seq_len
    return (3.0 if backward else 1.0) * (2 * in_products + attention) + scores
