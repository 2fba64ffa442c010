"""Other ways to consume a choice of blocks than this library's: as a mask, as ranges of tokens, by gathering keys and values.

Each takes q ``[B, S, Hq, D]``, k ``[B, S, Hkv, D]``, v ``[B, S, Hkv, Dv]`` and block numbers ``[B, S, Hkv, n]``, -1 for none.
It gives the function to be timed, which makes what it needs of the block numbers anew in each call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from nsa.config import NSAConfig

Consumer = Callable[[Tensor, Tensor, Tensor, Tensor, NSAConfig], Callable[[], Tensor]]

# Queries and keys of a tile that FlexAttention computes or leaves out.
_TILE = 128
# Queries of one call of a library's attention: a CUDA grid has at most 65,535 programs in its second and third dimension.
_QUERIES = 32_768


def by_mask(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig) -> Callable[[], Tensor]:
    """FlexAttention under the mask; compiled on a GPU."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    torch.compiler.reset()  # each point is compiled for itself, as is best for it
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True) if q.is_cuda else flex_attention
    size, group = config.block_size, config.group_size

    def forward() -> Tensor:
        chosen = chosen_blocks(block_indices, -(-k.shape[1] // size))

        def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return chosen[batch, head // group, row, key // size] & (key <= row)

        tiles = tiles_with_a_choice(chosen, size).repeat_interleave(group, dim=1)
        order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
        lengths = (q.shape[1], k.shape[1])
        mask = BlockMask.from_kv_blocks(
            tiles.sum(-1, dtype=torch.int32), order, BLOCK_SIZE=_TILE, mask_mod=visible, seq_lengths=lengths
        )
        out: Tensor = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return forward


def chosen_blocks(block_indices: Tensor, num_blocks: int) -> Tensor:
    """bool ``[B, Hkv, S, num_blocks]``."""
    place = torch.where(block_indices >= 0, block_indices, num_blocks).long().transpose(1, 2)
    chosen = torch.zeros((*place.shape[:3], num_blocks + 1), dtype=torch.bool, device=place.device)
    return chosen.scatter_(-1, place, value=True)[..., :num_blocks]


def tiles_with_a_choice(chosen: Tensor, block_size: int) -> Tensor:
    """Tiles of queries and keys in which some query chose some block, bool ``[B, Hkv, S / 128, S / 128]``, rounded up."""
    wide = _TILE // block_size
    rows, columns = (-(-length // tile) for length, tile in ((chosen.shape[2], _TILE), (chosen.shape[3], wide)))
    whole = pad(chosen, (0, columns * wide - chosen.shape[3], 0, rows * _TILE - chosen.shape[2]))
    return whole.view(*chosen.shape[:2], rows, _TILE, columns, wide).any(-1).any(3)


def by_ranges(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig) -> Callable[[], Tensor]:
    """A program for each query goes from range to range."""
    from nsa.bench.triton_ranges import RangeAttention

    def forward() -> Tensor:
        out: Tensor = RangeAttention.apply(q, k, v, *merged_ranges(block_indices, config.block_size))
        return out

    return forward


def merged_ranges(block_indices: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """First token and the one after the last of each run of neighbouring blocks, int32 ``[B, S, Hkv, n]``; 0, 0 for none."""
    n = block_indices.shape[-1]
    absent = torch.iinfo(torch.int32).max
    ids = torch.where(block_indices >= 0, block_indices, absent).int().sort(-1).values
    present = ids < absent
    before, after = pad(ids, (1, 0), value=-2)[..., :-1], pad(ids, (0, 1), value=-2)[..., 1:]
    begins, ends = present & (ids != before + 1), present & (ids + 1 != after)
    number = begins.cumsum(-1) - 1
    first, last = (torch.zeros((*ids.shape[:-1], n + 1), dtype=torch.int32, device=ids.device) for _ in range(2))
    first.scatter_(-1, torch.where(begins, number, n), ids * block_size)
    last.scatter_(-1, torch.where(ends, number, n), (ids + 1) * block_size)
    return first[..., :n].contiguous(), last[..., :n].contiguous()


def by_gather(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig) -> Callable[[], Tensor]:
    """Keys and values of every query are copied side by side: as many sequences as there are queries."""
    (batch, tokens, heads, _), groups = q.shape, k.shape[2]
    size = config.block_size
    blocks = -(-tokens // size)

    def gathered(x: Tensor, rows: Tensor) -> Tensor:
        """``[B * S, Hkv, n * l', size]``; as an embedding, whose gradient is added up in fp32 and in order."""
        whole = pad(x, (0, 0, 0, 0, 0, blocks * size - tokens)).view(batch, blocks, size, groups, -1)
        table = whole.transpose(2, 3).transpose(1, 2).reshape(batch * groups * blocks, -1)
        return embedding(rows, table).view(batch * tokens, groups, -1, x.shape[-1])

    def forward() -> Tensor:
        ids = block_indices.long()
        sequence = torch.arange(batch, device=q.device)[:, None, None, None]
        group = torch.arange(groups, device=q.device)[:, None]
        rows = (sequence * groups + group) * blocks + ids.clamp(min=0)
        key = ids[..., None] * size + torch.arange(size, device=q.device)
        row = torch.arange(tokens, device=q.device)[:, None, None, None]
        seen = ((ids[..., None] >= 0) & (key <= row)).view(batch * tokens, groups, 1, -1)
        parts = (q.reshape(batch * tokens, groups, heads // groups, -1), gathered(k, rows), gathered(v, rows), seen)
        out = [
            scaled_dot_product_attention(own, keys, values, attn_mask=mask)
            for own, keys, values, mask in zip(*(x.split(_QUERIES) for x in parts), strict=True)
        ]
        return torch.cat(out).view(batch, tokens, heads, -1)

    return forward
