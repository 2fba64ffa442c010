"""Compression of token blocks to one key or value each (phi of Eq. 7): the specification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._masked_attention import accumulate_dtype
from nsa.ops._packed import compressed_cu_seqlens, compressed_rows, locate


@dataclass(frozen=True)
class PhiWeights:
    """Parameters of phi for keys or for values; ``config.phi`` determines which are set.

    Attributes:
        weight: ``linear``: ``[Hkv, l, D]``.
        position: ``mlp``: learned position inside the block ``[Hkv, l, D]``.
        w1: ``mlp``: ``[Hkv, l * D, hidden]``.
        w2: ``mlp``: ``[Hkv, hidden, D]``.
    """

    weight: Tensor | None = None
    position: Tensor | None = None
    w1: Tensor | None = None
    w2: Tensor | None = None


def gather_blocks(x: Tensor, cu_seqlens: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Tokens of every compression block ``[C, l, Hkv, D]``, and ``cu_seqlens_cmp``.

    Rows that belong to no block are zero.
    """
    cu_seqlens_cmp = compressed_cu_seqlens(cu_seqlens, config)
    num_rows = compressed_rows(x.shape[0], config.compress_stride)
    sequence, block, real = locate(num_rows, cu_seqlens_cmp)
    start = cu_seqlens.long()[sequence] + block * config.compress_stride
    token = start[:, None] + torch.arange(config.compress_block_size, device=x.device)
    with_zero_row = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return with_zero_row[torch.where(real[:, None], token, x.shape[0])], cu_seqlens_cmp


def compress_reference(
    x: Tensor, weights: PhiWeights | None, config: NSAConfig, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`nsa.compress`; ``x`` is packed and validated."""
    dtype = accumulate_dtype(x)
    blocks, cu_seqlens_cmp = gather_blocks(x, cu_seqlens, config)
    blocks = blocks.to(dtype)  # [C, l, Hkv, D]
    if config.phi == "mean":
        return blocks.mean(1).to(x.dtype), cu_seqlens_cmp
    assert weights is not None
    if config.phi == "linear":
        assert weights.weight is not None
        y = torch.einsum("clhd,hld->chd", blocks, weights.weight.to(dtype))
        return y.to(x.dtype), cu_seqlens_cmp
    assert weights.position is not None and weights.w1 is not None and weights.w2 is not None
    _, _, real = locate(blocks.shape[0], cu_seqlens_cmp)
    placed = blocks.transpose(1, 2) + weights.position.to(dtype)  # [C, Hkv, l, D]
    hidden = torch.einsum("che,heo->cho", placed.flatten(2), weights.w1.to(dtype))
    update = torch.einsum("cho,hod->chd", torch.nn.functional.silu(hidden), weights.w2.to(dtype))
    y = torch.where(real[:, None, None], blocks.mean(1) + update, 0.0)
    return y.to(x.dtype), cu_seqlens_cmp


def rotated_place(config: NSAConfig) -> int:
    """Index in the block of the token whose position rotates the compressed key."""
    return (config.compress_block_size - 1) // 2 if config.compress_rope == "middle" else 0


def compressed_positions(
    config: NSAConfig, cu_seqlens: Tensor, num_rows: int, starts: Tensor | None = None
) -> Tensor:
    """Position in its sequence at which each compressed key is rotated.

    Args:
        config: the sparse pattern; ``compress_rope`` determines the position in the block.
        cu_seqlens: int32 ``[B + 1]`` offsets of the tokens.
        num_rows: rows of the compressed keys, ``S // d``.
        starts: positions of the first token of each sequence, ``[B]``; None means 0.

    Returns:
        int64 ``[num_rows]``; arbitrary in rows that belong to no block.
    """
    sequence, block, _ = locate(num_rows, compressed_cu_seqlens(cu_seqlens, config))
    position = block * config.compress_stride + rotated_place(config)
    return position if starts is None else position + starts[sequence]
