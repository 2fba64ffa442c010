"""Loss of an index head: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._masked_attention import (
    grouped_scores,
    max_blocks,
    padded_positions,
    visible_tokens,
)
from nsa.ops._operator import Call
from nsa.ops._packed import lengths, pad
from nsa.ops._sequences import Sequences
from nsa.ops.index_loss.types import IndexLoss, IndexLossInputs


def is_forced(block: Tensor, own: Tensor, config: NSAConfig) -> Tensor:
    """Whether blocks are always selected, given the queries' own blocks; bool, broadcast."""
    return (block < config.num_init_blocks) | (block > own - config.num_local_blocks)


def blocks_of(
    block_indices: Tensor | None, config: NSAConfig, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """Attended and forced blocks among those up to the query's own.

    Returns:
        bool ``[B, Hkv or 1, T, M]`` and ``[B, 1, T, M]``, padded.
    """
    num_blocks = max_blocks(sequences, config)
    block = torch.arange(num_blocks, device=sequences.cu_q.device)
    own = (padded_positions(sequences) // config.block_size)[:, None, :, None]
    visible = block <= own
    forced = visible & is_forced(block, own, config)
    if block_indices is None:
        return visible, forced
    ids = pad(block_indices.long(), sequences.cu_q, sequences.max_q).transpose(1, 2)
    # Absent ids go to an extra column.
    column = torch.where((ids >= 0) & (ids <= own), ids, num_blocks)
    attended = torch.zeros(*ids.shape[:3], num_blocks + 1, dtype=torch.bool, device=ids.device)
    return attended.scatter(-1, column, True)[..., :-1], forced


def scores_by_block(
    q: Tensor, k: Tensor, softmax_scale: float, config: NSAConfig, sequences: Sequences
) -> Tensor:
    """Scaled products with the visible tokens, -inf elsewhere, ``[B, Hkv, G, T, M, l']``."""
    rows = pad(q, sequences.cu_q, sequences.max_q), pad(k, sequences.cu_k, sequences.max_k)
    scores = grouped_scores(*rows, softmax_scale).unflatten(2, (-1, sequences.max_q))
    scores = scores.masked_fill(~visible_tokens(sequences)[:, None, None], -torch.inf)
    size = max_blocks(sequences, config) * config.block_size
    padded = torch.nn.functional.pad(scores, (0, size - sequences.max_k), value=-torch.inf)
    return padded.unflatten(-1, (-1, config.block_size))


def log_mass(q: Tensor, k: Tensor, attended: Tensor, call: Call) -> Tensor:
    """Logarithm of the attention mass of each attended block, added over the heads of a group.

    Returns:
        ``[B, Hkv, T, M]``; arbitrary in blocks that are not attended.
    """
    scores = scores_by_block(q, k, call.softmax_scale, call.config, call.sequences)
    of_block = scores.logsumexp(-1).masked_fill(~attended[:, :, None], -torch.inf)
    return (of_block - of_block.logsumexp(-1, keepdim=True)).logsumexp(2)


def index_scores(q_idx: Tensor, k_idx: Tensor, forced: Tensor, call: Call) -> Tensor:
    """Logarithm of the index scores of blocks, ``[B, Hki, T, M]``; 0 for invisible blocks."""
    where = call.config, call.sequences
    scores = scores_by_block(q_idx, k_idx, q_idx.shape[-1] ** -0.5, *where)
    of_forced = scores.detach().masked_fill(~forced[:, :, None, ..., None], -torch.inf)
    lse = of_forced.flatten(-2).logsumexp(-1, keepdim=True)  # [B, Hki, IH, T, 1]
    token = scores.detach().argmax(-1, keepdim=True)  # the first of equal ones
    largest = scores.gather(-1, token)[..., 0]
    # Only -inf is replaced: NaN must be seen.
    largest, lse = (x.masked_fill(x.isneginf(), 0.0) for x in (largest, lse))
    return (largest - lse).logsumexp(2)


def index_loss_reference(inputs: IndexLossInputs, call: Call) -> IndexLoss:
    """See :func:`nsa.ops.index_loss.index_loss`; inputs are packed and validated."""
    q_idx, k_idx, q, k, block_indices = inputs[:5]
    sequences = call.sequences
    attended, forced = blocks_of(block_indices, call.config, sequences)
    row = torch.arange(sequences.max_q, device=q.device)
    is_query = row < lengths(sequences.cu_q)[:, None]
    ranked = attended & ~forced & is_query[:, None, :, None]  # [B, Hkv or 1, T, M]
    ranked = ranked.expand(-1, k.shape[1], -1, -1)
    counts = ranked.any(-1, keepdim=True)
    with torch.no_grad():
        mass = log_mass(q, k, attended, call)
    scores = index_scores(q_idx, k_idx, forced, call)
    scores = scores.repeat_interleave(k.shape[1] // k_idx.shape[1], dim=1)
    # Rows without a ranked block are replaced as a whole, so that nothing is NaN.
    target, prediction = (
        torch.where(counts, x.masked_fill(~ranked, -torch.inf), 0.0).log_softmax(-1)
        for x in (mass, scores)
    )
    difference = target.masked_fill(~ranked, 0.0) - prediction.masked_fill(~ranked, 0.0)
    return IndexLoss((target.exp() * difference).sum(), counts.sum())
