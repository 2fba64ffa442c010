"""Attention mass that the selected blocks keep, compared with the best selection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._checks import check_block_indices, check_heads, scale_of
from nsa.ops._masked_attention import accumulate_dtype, max_blocks
from nsa.ops._operator import Call
from nsa.ops._packed import locate, query_positions
from nsa.ops._sequences import open_sequences, pack
from nsa.ops.index_loss.reference import is_forced

MAX_SCORES = 2**26  # in memory at once


class BlockRecall(NamedTuple):
    """Fractions of the attention mass outside the forced blocks, ``[R, Hkv]``.

    The recall of a selection is ``kept.sum() / best.sum()``.

    Attributes:
        kept: fraction in the selected blocks.
        best: largest fraction in as many blocks. Both are 0 without a selected block that is not
            forced.
    """

    kept: Tensor
    best: Tensor


@torch.no_grad()
def block_recall(
    q: Tensor,
    k: Tensor,
    block_indices: Tensor,
    config: NSAConfig,
    queries: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
) -> BlockRecall:
    """Measure a selection by dense attention at some queries, in plain PyTorch.

    Args:
        q: rotated queries of the selected branch, packed ``[T, Hq, D]`` or ``[B, T, Hq, D]``.
        k: its rotated keys ``[S, Hkv, D]`` or ``[B, S, Hkv, D]``.
        block_indices: selected blocks ``[T, Hkv, n]`` or ``[B, T, Hkv, n]``.
        config: the sparse pattern.
        queries: int64 ``[R]``, rows of the packed queries. A query that has at most n blocks
            selects all of them: its recall is 1.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the keys; None means those of the queries.
        softmax_scale: factor on ``q.k``; None means ``D ** -0.5``.

    Returns:
        Fractions of the mass, averaged over the query heads of a group.

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    check_heads("q", q, config.num_heads, config.head_dim, q)
    check_heads("k", k, config.num_kv_heads, config.head_dim, q)
    check_block_indices(block_indices, config)
    shape, offsets = tuple(k.shape[:-2]), (cu_seqlens_q, cu_seqlens_k)
    sequences = open_sequences(q, shape, *offsets, None, None, "reference")
    call = Call(config, sequences, scale_of(config, softmax_scale))
    q, k, ids = pack(q), pack(k), pack(block_indices)
    sequence = locate(q.shape[0], sequences.cu_q)[0][queries]
    first = sequences.cu_k.long()[sequence]
    t = query_positions(q.shape[0], sequences.cu_q, sequences.cu_k)[queries]
    size = max(1, MAX_SCORES // max(config.num_heads * k.shape[0], 1))
    parts = (x.split(size) for x in (q[queries], ids[queries], first, t))
    found = [_recall(a, b, c, d, k, call) for a, b, c, d in zip(*parts, strict=True)]
    kept, best = zip(*found, strict=True)
    return BlockRecall(torch.cat(kept), torch.cat(best))


def _recall(
    q: Tensor, ids: Tensor, first: Tensor, t: Tensor, k: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """Fractions at queries ``[R, Hq, D]`` at positions t of sequences whose keys begin at first."""
    config, dtype = call.config, accumulate_dtype(q)
    block = torch.arange(max_blocks(call.sequences, config), device=q.device)
    token = torch.arange(len(block) * config.block_size, device=q.device)
    rows = q.to(dtype).unflatten(1, (k.shape[1], -1)) * call.softmax_scale
    scores = torch.einsum("rhgd,shd->rhgs", rows, k.to(dtype))
    at = (first[:, None] + token).clamp(max=k.shape[0] - 1)[:, None, None]
    scores = scores.gather(-1, at.expand(*scores.shape[:3], -1))  # tokens of the query's sequence
    scores = scores.masked_fill((token > t[:, None])[:, None, None], -torch.inf)
    mass = scores.softmax(-1).unflatten(-1, (-1, config.block_size)).sum(-1).mean(2)
    own = (t // config.block_size)[:, None, None]
    ranked = (block <= own) & ~is_forced(block, own, config)
    mass = torch.where(ranked, mass, 0.0)  # [R, Hkv, M]
    selected = (ids[..., None] == block).any(2) & ranked
    count = selected.sum(-1, keepdim=True)
    largest = torch.nn.functional.pad(mass.sort(-1, descending=True).values.cumsum(-1), (1, 0))
    outside = mass.sum(-1)
    outside = torch.where(outside > 0, outside, 1.0)
    kept = torch.where(selected, mass, 0.0).sum(-1)
    return kept / outside, largest.gather(-1, count)[..., 0] / outside
