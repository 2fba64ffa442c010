"""Scores of selection blocks and the choice of the best n (Eqs. 8 to 12): the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._boundary import Sequences
from nsa.ops._masked_attention import grouped_scores
from nsa.ops._packed import compressed_cu_seqlens, pad, query_positions, unpad
from nsa.ops._visibility import max_blocks, max_compressed, visible_compressed


def overlap_stencil(config: NSAConfig) -> dict[int, int]:
    """Weights of Eq. 9: ``overlap(i, j) / d`` by the offset ``i - j * l' / d``, for every offset with an overlap."""
    length = config.compress_block_size // config.compress_stride
    block = config.block_size // config.compress_stride
    return {offset: min(offset + length, block) - max(offset, 0) for offset in range(1 - length, block)}


def block_scores(
    q: Tensor, k_cmp: Tensor, lse: Tensor, config: NSAConfig, sequences: Sequences, softmax_scale: float
) -> Tensor:
    """Importance of every selection block for every query, summed over the group (Eqs. 8, 9, 10).

    The terms are added in a fixed order, heads before stencil taps, so that equal terms give equal scores.

    Returns:
        ``[T, Hkv, M]`` in the dtype of ``lse``.
    """
    max_cmp = max_compressed(sequences, config)
    keys = pad(k_cmp, compressed_cu_seqlens(sequences.cu_k, config), max_cmp)
    scores = grouped_scores(pad(q, sequences.cu_q, sequences.max_q), keys, softmax_scale)  # [B, Hkv, G, T, C]
    lse_rows = pad(lse, sequences.cu_q, sequences.max_q)  # [B, T, Hq]
    lse_rows = lse_rows.permute(0, 2, 1).reshape(*scores.shape[:4])[..., None]
    visible = visible_compressed(sequences, config)[:, None, None]
    probabilities = torch.where(visible, torch.exp(scores - lse_rows), 0.0).sum(2)  # [B, Hkv, T, C]

    stencil = overlap_stencil(config)
    before = -min(stencil)
    step = config.block_size // config.compress_stride
    num_blocks = max_blocks(sequences, config)
    after = max(num_blocks * step - max_cmp, 0)
    padded = torch.nn.functional.pad(probabilities, (before, after))
    importance = torch.zeros((), dtype=padded.dtype, device=padded.device)
    for offset, weight in stencil.items():
        first = before + offset
        importance = importance + weight * padded[..., first : first + num_blocks * step : step][..., :num_blocks]
    return unpad(importance.transpose(1, 2), sequences.cu_q, q.shape[0])


def choose_blocks(scores: Tensor, positions: Tensor, config: NSAConfig) -> Tensor:
    """The n blocks of every query (Eqs. 11 and 12): forced ones, then the highest scores, ties to the lower id.

    Args:
        scores: ``[T, Hkv, M]``.
        positions: position of each query in its sequence, int64 ``[T]``.
        config: the sparse pattern.

    Returns:
        int32 ``[T, Hkv, n]``, ascending, padded with -1 at the end.
    """
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks, device=scores.device)
    current = (positions // config.block_size)[:, None, None]
    candidate = (block <= current).expand(scores.shape)
    forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(~candidate, -torch.inf)
    best = ranked.argsort(dim=-1, descending=True, stable=True)[..., : config.num_selected_blocks]
    best = torch.where(candidate.gather(-1, best), best, num_blocks).sort(-1).values
    best = torch.where(best < num_blocks, best, -1)
    return torch.nn.functional.pad(best, (0, config.num_selected_blocks - best.shape[-1]), value=-1).int()


def select_blocks_reference(
    q: Tensor, k_cmp: Tensor, lse: Tensor, config: NSAConfig, sequences: Sequences, softmax_scale: float
) -> Tensor:
    """See :func:`nsa.select_blocks`; inputs are packed and checked."""
    scores = block_scores(q, k_cmp, lse, config, sequences, softmax_scale)
    return choose_blocks(scores, query_positions(q.shape[0], sequences.cu_q, sequences.cu_k), config)
