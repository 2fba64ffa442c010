"""Floating-point operations of a model, for the share of the peak that training reaches (MFU)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nsa.lm.baseline import parameters_by_part
from nsa.lm.config import LMConfig
from nsa.ops._packed import num_compressed

_CHUNK = 2**20  # positions looked at together


def keys_per_query(config: LMConfig, seq_len: int) -> float:
    """Keys that a query of one layer attends to in all branches, averaged over the positions.

    Args:
        config: the model.
        seq_len: tokens of a sequence.
    """
    chunks = (
        torch.arange(start, min(start + _CHUNK, seq_len)) for start in range(0, seq_len, _CHUNK)
    )
    return sum(_keys(config, positions) for positions in chunks) / seq_len


def _keys(config: LMConfig, position: Tensor) -> int:
    """Keys of the queries at some positions, together."""
    if config.attention == "dense":
        return int((position + 1).sum())
    pattern = config.nsa
    keys = torch.zeros_like(position)
    if "cmp" in pattern.branches:
        keys += num_compressed(position + 1, pattern)
    if "slc" in pattern.branches:
        whole_blocks = (pattern.num_selected_blocks - 1) * pattern.block_size
        keys += torch.minimum(position + 1, whole_blocks + position % pattern.block_size + 1)
    if "win" in pattern.branches:
        keys += (position + 1).clamp(max=pattern.window_size)
    return int(keys.sum())


@lru_cache
def flops_per_token(config: LMConfig, seq_len: int) -> float:
    """Operations of one training token, forward and backward.

    A multiplication and an addition count as two. Matrix products with parameters take 2 operations
    a parameter forward and 4 backward; attention takes 2 * (D + Dv) a head and key forward and
    twice that backward, over the keys that the pattern lets a query see. Norms, rotation,
    compression, scoring and the optimizer are not counted, nor is anything computed twice.

    Args:
        config: the model.
        seq_len: tokens of a sequence.
    """
    count = parameters_by_part(config)
    head = config.vocab_size * config.width
    in_products = head + count["attention"] + count["gate"] + count["mlp"]
    a_key = 2 * config.nsa.num_heads * (config.nsa.head_dim + config.nsa.value_dim)
    attention = config.num_layers * a_key * keys_per_query(config, seq_len)
    return 3.0 * (2 * in_products + attention)
