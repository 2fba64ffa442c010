"""Launchers of the kernels of the selected branch. No autograd, no checks of user input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from nsa.ops._triton.layout import Layout
from nsa.ops._triton.range_launch import block_of, fitting, key_source
from nsa.ops._triton.tuning import Tile
from nsa.ops.selected.triton_bwd import selected_dkv_kernel, selected_dq_kernel, selected_reduce_kernel
from nsa.ops.selected.triton_fwd import selected_fwd_kernel
from nsa.ops.selected.triton_index import list_kernel

# Queries of a tile: as many as a word of the lists has bits.
MAX_QUERIES = 32
# Queries of one program of dK and dV.
CHUNK = 1024


@dataclass(frozen=True)
class Lists:
    """Blocks that the queries of each tile chose.

    Attributes:
        block: int32 ``[Hkv, tiles, BLOCK_Q * n]``, ascending.
        word: the same shape: bit i says that query i of the tile chose the block.
        count: int32 ``[Hkv, tiles, 3]``: blocks wholly in the past of every query, wholly inside the sequence, and all.
        block_q: queries of a tile.
        key: int16 or int32 ``[Hkv, T, n]``, equal where the same block was chosen; None unless asked for.
        num_blocks: at least the blocks of all sequences together.
    """

    block: Tensor
    word: Tensor
    count: Tensor
    block_q: int
    key: Tensor | None
    num_blocks: int


def tile_of(tile: Tile, group_size: int, block_size: int) -> tuple[Tile, int]:
    """The tile with rows and keys that fit group and block, and the queries it holds."""
    rows = max(tile.rows, triton.next_power_of_2(group_size))
    most = max(triton.next_power_of_2(MAX_QUERIES * group_size), 16)
    warps = max(1, tile.warps * min(rows, most) // rows)
    rows = min(rows, most)
    return replace(tile, rows=rows, warps=warps, keys=min(tile.keys, block_size)), min(rows // group_size, MAX_QUERIES)


def make_lists(block_indices: Tensor, layout: Layout, block_size: int, block_q: int, num_tokens: int, keys: bool) -> Lists:
    """Lists of every tile of ``block_q`` queries; with ``keys`` also those of the inverse index."""
    num_q, num_kv_heads, n = block_indices.shape
    device = block_indices.device
    num_lists = layout.num_tiles(num_q, block_q, layout.len_q)
    num_blocks = layout.num_tiles(num_tokens, block_size, layout.len_k)
    block, word = (torch.empty(num_kv_heads, num_lists, block_q * n, dtype=torch.int32, device=device) for _ in range(2))
    count = torch.empty(num_kv_heads, num_lists, 3, dtype=torch.int32, device=device)
    # Half as many bits are sorted in half the passes.
    key_type = torch.int16 if num_kv_heads * num_blocks < 2**15 - 1 else torch.int32
    key = torch.empty(num_kv_heads, num_q, n, dtype=key_type, device=device) if keys else None
    cu_block = None
    if keys and layout.cu_k is not None:
        ends = ((layout.cu_k[1:] - layout.cu_k[:-1] + (block_size - 1)) // block_size).cumsum(0, dtype=torch.int32)
        cu_block = torch.nn.functional.pad(ends, (1, 0))
    pad_n = triton.next_power_of_2(n)
    if num_lists:
        list_kernel[(num_lists, num_kv_heads)](
            block_indices.contiguous(), block, word, count, key, layout.cu_q, layout.cu_k, cu_block, layout.len_q, layout.len_k,
            layout.num_sequences, num_q, num_lists, num_blocks, HKV=num_kv_heads, N=n, BLOCK_SIZE=block_size, BLOCK_Q=block_q,
            PAD_Q=triton.next_power_of_2(block_q), PAD_N=pad_n, num_warps=max(1, min(8, block_q * pad_n // 256)),
        )  # fmt: skip
    return Lists(block, word, count, block_q, key, num_blocks)


def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, softmax_scale: float, block_size: int, tile: Tile
) -> tuple[Tensor, Tensor]:
    """out ``[T, Hq, Dv]`` and lse fp32 ``[T, Hq]``."""
    num_q, num_heads, head_dim = q.shape
    num_tokens, num_kv_heads, value_dim = v.shape
    group_size, n = num_heads // num_kv_heads, block_indices.shape[-1]
    out = torch.empty(num_q, num_heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_q, num_heads, dtype=torch.float32, device=q.device)
    if num_q == 0 or n == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    tile, block_q = tile_of(tile, group_size, block_size)
    tile = fitting(tile, k, v)
    lists = make_lists(block_indices, layout, block_size, block_q, num_tokens, keys=False)
    selected_fwd_kernel[(lists.count.shape[1], num_kv_heads)](
        q, key_source(k, tile), key_source(v, tile), out, lse, lists.block, lists.word, lists.count, *layout.arguments(),
        lists.count.shape[1], q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), softmax_scale,
        HQ=num_heads, G=group_size, D=head_dim, DV=value_dim, N=n, BLOCK_SIZE=block_size, BLOCK_Q=block_q, BLOCK_M=tile.rows,
        BLOCK_N=tile.keys, BLOCK_D=block_of(head_dim), BLOCK_DV=block_of(value_dim), TMA=tile.tma, STAGES=tile.stages,
        EDGE=tile.edge_stages, **tile.launch_options(),
    )  # fmt: skip
    return out, lse


def selected_backward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, out: Tensor, dout: Tensor, lse: Tensor, layout: Layout,
    softmax_scale: float, block_size: int, tile_dq: Tile, tile_dkv: Tile,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes of q, k, v, contiguous."""
    num_q, num_heads, head_dim = q.shape
    num_tokens, num_kv_heads, value_dim = v.shape
    group_size, n = num_heads // num_kv_heads, block_indices.shape[-1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if num_q == 0 or n == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    tile, block_q = tile_of(tile_dq, group_size, block_size)
    tile = fitting(tile, k, v)
    lists = make_lists(block_indices, layout, block_size, block_q, num_tokens, keys=True)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), dout.stride(0), dout.stride(1))
    sizes = {"D": head_dim, "DV": value_dim, "BLOCK_D": block_of(head_dim), "BLOCK_DV": block_of(value_dim)}
    selected_dq_kernel[(lists.count.shape[1], num_kv_heads)](
        q, key_source(k, tile), key_source(v, tile), out, dout, lse, delta, dq, lists.block, lists.word, lists.count,
        *layout.arguments(), lists.count.shape[1], *strides, softmax_scale, HQ=num_heads, G=group_size, N=n,
        BLOCK_SIZE=block_size, BLOCK_Q=block_q, BLOCK_M=tile.rows, BLOCK_N=tile.keys, TMA=tile.tma, STAGES=tile.stages,
        EDGE=tile.edge_stages, **sizes, **tile.launch_options(),
    )  # fmt: skip
    assert lists.key is not None
    query, start, item, chunk_start = inverse_index(lists.key, lists.num_blocks)
    dk_part = torch.empty(item.shape[0], block_size, head_dim, dtype=torch.float32, device=k.device)
    dv_part = torch.empty(item.shape[0], block_size, value_dim, dtype=torch.float32, device=k.device)
    keys = min(tile_dkv.keys, block_size)
    selected_dkv_kernel[(item.shape[0], block_size // keys)](
        q, k, v, dout, lse, delta, dk_part, dv_part, query, start, item, chunk_start, *layout.arguments(), lists.num_blocks,
        *strides, softmax_scale, HQ=num_heads, G=group_size, BLOCK_SIZE=block_size, CHUNK=CHUNK, BLOCK_M=tile_dkv.rows,
        BLOCK_N=keys, KEYS_AS_ROWS=tile_dkv.keys_as_rows, STAGES=tile_dkv.stages, EDGE=tile_dkv.edge_stages, **sizes,
        **tile_dkv.launch_options(),
    )  # fmt: skip
    selected_reduce_kernel[(lists.num_blocks, num_kv_heads)](
        dk_part, dv_part, dk, dv, chunk_start, layout.cu_k, layout.len_k, layout.num_sequences, lists.num_blocks, softmax_scale,
        HKV=num_kv_heads, BLOCK_SIZE=block_size, **sizes, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv


def inverse_index(key: Tensor, num_blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The queries that chose each block, and the chunks that they are cut into; nothing here waits for the device.

    Args:
        key: of :class:`Lists`.
        num_blocks: of :class:`Lists`.

    Returns:
        The queries (packed rows, int32 ``[Hkv * T * n]``) by block and, within a block, in order; where each block's begin
        ``[Hkv * num_blocks + 1]``; the block of each chunk (``Hkv * num_blocks`` where there is none); and the first chunk of
        each block.
    """
    num_kv_heads, num_q, n = key.shape
    num_items = num_kv_heads * num_blocks
    ranked, order = key.flatten().sort(stable=True)
    query = (order // n % num_q).int()
    items = torch.arange(num_items + 1, dtype=key.dtype, device=key.device)
    start = torch.searchsorted(ranked, items, out_int32=True)
    counts = (start[1:] - start[:-1] + (CHUNK - 1)) // CHUNK
    chunk_start = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    chunks = torch.arange(num_kv_heads * num_q * n // CHUNK + num_items, dtype=torch.int32, device=key.device)
    item = torch.searchsorted(chunk_start, chunks, right=True, out_int32=True) - 1
    return query, start, item, chunk_start
