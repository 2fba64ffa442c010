"""``nsa bench consumers``: four ways to attend to selected blocks, with the time of each stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from nsa.bench.attention import Provider
from nsa.config import NSAConfig
from nsa.ops.selected import selected_attention
from nsa.ops.selection import blocks_to_ranges

TILE = 128  # queries and keys of a FlexAttention block
QUERIES = 32_768  # per SDPA call: two CUDA grid dimensions are limited to 65,535


def attend_indices(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, made: Tensor) -> Tensor:
    """Attend with this library's selected branch."""
    return selected_attention(q, k, v, made, config)[0]


def block_mask(ids: Tensor, config: NSAConfig, by: str) -> Any:
    """FlexAttention mask from block indices ``[B, S, Hkv, n]``.

    ``by="mask"`` reads a bool per query and block; ``by="ranges"`` compares a key's position with
    the merged token ranges of the query.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length, size, group = ids.shape[1], config.block_size, config.group_size
    tiles, wide = -(-length // TILE), TILE // size
    blocks = torch.where(ids >= 0, ids, tiles * wide).long().transpose(1, 2)
    chosen = blocks.new_zeros(*blocks.shape[:3], tiles * wide + 1, dtype=torch.bool)
    chosen = chosen.scatter_(-1, blocks, value=True)[..., :-1]
    merged = blocks_to_ranges(ids, config) if by == "ranges" else ids

    def looked_up(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return chosen[batch, head // group, row, key // size] & (key <= row)

    def in_ranges(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        inside = row < 0
        for i in range(merged.shape[3]):
            begin, end = (merged[batch, row, head // group, i, j] for j in (0, 1))
            inside = inside | ((key >= begin) & (key < end))
        return inside

    padded = pad(chosen, (0, 0, 0, tiles * TILE - length)).unflatten(2, (tiles, TILE))
    some = padded.unflatten(-1, (tiles, wide)).any(-1).any(3).repeat_interleave(group, dim=1)
    order = some.int().argsort(dim=-1, descending=True, stable=True).int()
    rule, number = in_ranges if by == "ranges" else looked_up, some.sum(-1, dtype=torch.int32)
    sizes: dict[str, Any] = {"BLOCK_SIZE": TILE, "seq_lengths": (length, length)}
    return BlockMask.from_kv_blocks(number, order, mask_mod=rule, **sizes)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, made: Any) -> Tensor:
    """Attend with FlexAttention, compiled on a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    attend: Callable[..., Tensor] = compiled if q.is_cuda else flex_attention
    inputs = (x.transpose(1, 2) for x in (q, k, v))
    return attend(*inputs, block_mask=made, enable_gqa=True).transpose(1, 2)


def gathered_rows(ids: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Row indices of the selected blocks, and a mask of their visible keys for each query."""
    (batch, length, heads, _), size = ids.shape, config.block_size
    first = torch.arange(batch * heads, device=ids.device).view(batch, 1, heads, 1)
    rows = first * -(-length // size) + ids.clamp(min=0)
    keys = ids[..., None] * size + torch.arange(size, device=ids.device)
    t = torch.arange(length, device=ids.device)[:, None, None, None]
    seen = (ids[..., None] >= 0) & (keys <= t)
    return rows.flatten(0, 1), seen.view(batch * length, heads, 1, -1)


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, made: Any) -> Tensor:
    """Copy the selected keys and values of every query, and attend with SDPA."""
    size, (batch, length, heads) = config.block_size, k.shape[:3]
    missing = -length % size

    def copied(x: Tensor, rows: Tensor) -> Tensor:  # embedding: its gradient is summed in fp32
        blocks = pad(x, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, size)).movedim(3, 1)
        table = blocks.reshape(batch * heads * blocks.shape[2], -1)
        return embedding(rows, table).view(*rows.shape[:2], -1, x.shape[-1])

    queries = q.reshape(batch * length, heads, -1, q.shape[-1])
    parts = zip(*(x.split(QUERIES) for x in (queries, *made)), strict=True)
    attend = scaled_dot_product_attention
    out = [attend(some, copied(k, at), copied(v, at), attn_mask=seen) for some, at, seen in parts]
    return torch.cat(out).view(*q.shape[:3], -1)


_TEMPLATE = (("triton_tem",), ("triton_tem",))
_SELECTED = ("attention.selected",)
_MASK, _RANGES = ((partial(block_mask, by=by), attend_flex) for by in ("mask", "ranges"))
CONSUMERS = [
    Provider("nsa", _SELECTED, consume=(lambda ids, config: ids, attend_indices)),
    Provider("mask", _SELECTED, consume=_MASK, kernels=_TEMPLATE),
    Provider("ranges", _SELECTED, consume=_RANGES, kernels=_TEMPLATE),
    Provider("gather", _SELECTED, consume=(gathered_rows, attend_gathered), kernels=((), ())),
]
