"""Useful work of an operator: only keys that a query may see and, in the selected branch, that it chose.

A pair is one query position and one key that it attends to. A query head of D and Dv does two matrix products a pair forward
(scores, output: ``2 D + 2 Dv`` operations) and five more backward (scores again, dP, dV, dQ, dK: ``6 D + 4 Dv``).
"""

from __future__ import annotations

import numpy as np

from nsa.bench.points import Point
from nsa.config import NSAConfig


def causal_pairs(seq_len: int) -> int:
    """Dense causal attention: the sum of ``t + 1``."""
    return seq_len * (seq_len + 1) // 2


def window_pairs(seq_len: int, config: NSAConfig) -> int:
    """Window: the sum of ``min(w, t + 1)``."""
    return int(np.minimum(np.arange(seq_len) + 1, config.window_size).sum())


def compressed_pairs(seq_len: int, config: NSAConfig) -> int:
    """Compressed branch: the sum of num_cmp(t), ``max(0, (t + 1 - l) // d + 1)``."""
    blocks = (np.arange(seq_len) + 1 - config.compress_block_size) // config.compress_stride + 1
    return int(np.maximum(blocks, 0).sum())


def selected_pairs(seq_len: int, config: NSAConfig) -> int:
    """Selected branch: all tokens of ``min(n, t // l' + 1)`` blocks, the own one up to the query; n may depend on t.

    The own block is always among them (``num_local_blocks`` is at least 1), so the count does not depend on the others.
    """
    t = np.arange(seq_len)
    n = np.full(seq_len, config.num_selected_blocks)
    for length, fewer in reversed(config.block_counts):
        n[:length] = fewer
    blocks = np.minimum(t // config.block_size + 1, n)
    return int(((blocks - 1) * config.block_size + t % config.block_size + 1).sum())


def attention_flops(pairs: int, point: Point, config: NSAConfig, *, backward: bool) -> int:
    """Operations of attention over ``pairs`` a sequence and head, forward, or forward and backward."""
    head = 2 * config.head_dim + 2 * config.value_dim
    if backward:
        head += 6 * config.head_dim + 4 * config.value_dim
    return pairs * point.batch * config.num_heads * head


_PAIRS = {
    "attention.compressed": compressed_pairs,
    "attention.selected": selected_pairs,
    "attention.window": window_pairs,
}


def useful_flops(case: str, point: Point, config: NSAConfig, *, backward: bool) -> int | None:
    """Useful operations of a case; None where it moves bytes and hardly computes (``attention.compress``, ``.combine``).

    The whole counts its three branches; the choice counts one product with every visible compressed key, which in the whole is
    the compressed branch's own and not counted again.
    """
    if case == "attention.choice":
        return compressed_pairs(point.seq_len, config) * point.batch * config.num_heads * 2 * config.head_dim
    if case == "attention":
        total = sum(count(point.seq_len, config) for count in _PAIRS.values())
        return attention_flops(total, point, config, backward=backward)
    if case not in _PAIRS:
        return None
    return attention_flops(_PAIRS[case](point.seq_len, config), point, config, backward=backward)


def dense_flops(point: Point, config: NSAConfig, *, backward: bool) -> int:
    """The same for dense causal attention."""
    return attention_flops(causal_pairs(point.seq_len), point, config, backward=backward)
