"""Which keys a query may see, as masks over padded sequences ``[B, T, keys]``."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._packed import lengths, num_compressed
from nsa.ops._sequences import Sequences


def padded_positions(sequences: Sequences) -> Tensor:
    """Position t of each padded query row, int64 ``[B, T]``: aligned at the end of the keys."""
    row = torch.arange(sequences.max_q, device=sequences.cu_q.device)
    return row + (lengths(sequences.cu_k) - lengths(sequences.cu_q))[:, None]


def max_compressed(sequences: Sequences, config: NSAConfig) -> int:
    """Upper bound of a sequence's compressed blocks, at least 1 so that no tensor is empty."""
    return max((sequences.max_k - config.compress_block_size) // config.compress_stride + 1, 1)


def max_blocks(sequences: Sequences, config: NSAConfig) -> int:
    """Upper bound M of a sequence's selection blocks, at least 1."""
    return max(-(-sequences.max_k // config.block_size), 1)


def visible_compressed(sequences: Sequences, config: NSAConfig) -> Tensor:
    """Compressed blocks wholly in the past (``i * d + l - 1 <= t``), bool ``[B, T, C]``."""
    block = torch.arange(max_compressed(sequences, config), device=sequences.cu_q.device)
    return block < num_compressed(padded_positions(sequences) + 1, config)[..., None]


def visible_tokens(sequences: Sequences) -> Tensor:
    """Tokens up to the query's own, bool ``[B, T, S]``."""
    token = torch.arange(sequences.max_k, device=sequences.cu_q.device)
    return token <= padded_positions(sequences)[..., None]


def visible_window(sequences: Sequences, config: NSAConfig) -> Tensor:
    """The last ``window_size`` tokens, the query's own included, bool ``[B, T, S]``."""
    token = torch.arange(sequences.max_k, device=sequences.cu_q.device)
    return visible_tokens(sequences) & (
        token > padded_positions(sequences)[..., None] - config.window_size
    )
