"""Selected blocks as token ranges, for inspection."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._checks import check_block_indices
from nsa.ops._packed import query_positions
from nsa.ops._sequences import open_sequences


def blocks_to_ranges(
    block_indices: Tensor,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Turn selected blocks into merged token ranges.

    Args:
        block_indices: integer ``[T, Hkv, n]`` or ``[B, T, Hkv, n]``, any order; one that is there
            more than once counts once; ids below 0 or above ``t // l'`` are absent.
        config: the sparse pattern.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the key tokens; None means those of the queries.

    Returns:
        int32 ``[T, Hkv, n, 2]`` (with a leading B for a dense batch): ``[start, end)`` in tokens of
        the sequence, adjacent blocks merged, clamped to t + 1, ascending; unused ranges are -1.

    Raises:
        ValueError: shapes or offsets do not fit.
    """
    name = "blocks_to_ranges"
    check_block_indices(name, block_indices, config)
    ids = block_indices
    key_shape = tuple(ids.shape[:-2]) if cu_seqlens_k is None else (int(cu_seqlens_k[-1]),)
    sequences = open_sequences(
        name, ids, key_shape, cu_seqlens_q, cu_seqlens_k, ids.shape[0], key_shape[0], "reference"
    )
    ids = (ids.flatten(0, 1) if ids.ndim == 4 else ids).long()
    positions = query_positions(ids.shape[0], sequences.cu_q, sequences.cu_k)[:, None, None]
    absent = torch.iinfo(torch.int64).max
    present = (ids >= 0) & (ids <= positions // config.block_size)
    ids = torch.where(present, ids, absent).sort(-1).values
    ids[..., 1:] = torch.where(ids[..., 1:] == ids[..., :-1], absent, ids[..., 1:])
    ids = ids.sort(-1).values
    present = ids < absent
    starts_range = present.clone()
    starts_range[..., 1:] &= ids[..., 1:] != ids[..., :-1] + 1
    # range that each block belongs to
    slot = torch.where(present, starts_range.cumsum(-1) - 1, ids.shape[-1])
    size = config.block_size
    start = torch.full((*ids.shape[:-1], ids.shape[-1] + 1), absent, device=ids.device)
    start = start.scatter_reduce(-1, slot, torch.where(present, ids * size, absent), "amin")[
        ..., :-1
    ]
    end = torch.full_like(start, -1)
    end = torch.nn.functional.pad(end, (0, 1)).scatter_reduce(
        -1, slot, torch.where(present, ids * size + size, -1), "amax"
    )[..., :-1]
    used = start < absent
    ranges = torch.stack((start, torch.minimum(end, positions + 1)), dim=-1)
    return sequences.restore(torch.where(used[..., None], ranges, -1).int())
