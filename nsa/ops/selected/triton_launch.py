"""Launchers of the kernels of the selected branch. No autograd, no checks of user input.

Two designs. A tile of queries visits every block that one of them chose: the best while these are few. In long sequences whose
neighbours disagree, choices outside of the usual blocks go through the inverse index instead: a block at a time, against the
queries that chose it, in the forward pass and for dQ. dK and dV always do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from nsa.ops._triton.layout import Layout
from nsa.ops._triton.range_launch import block_of, fitting, key_source
from nsa.ops._triton.tuning import Tile
from nsa.ops.selected.triton_bwd import selected_dkv_kernel, selected_dq_kernel, selected_reduce_kernel
from nsa.ops.selected.triton_fwd import selected_fwd_kernel
from nsa.ops.selected.triton_hybrid import (
    selected_delta_kernel,
    selected_gather_kernel,
    selected_merge_dq_kernel,
    selected_merge_kernel,
)
from nsa.ops.selected.triton_index import (
    selected_chunk_kernel,
    selected_chunk_key_kernel,
    selected_entry_kernel,
    selected_list_kernel,
)

# Queries of a tile: as many as a word of the lists has bits. Choices of a tile: as many as one program sorts.
MAX_QUERIES = 32
MAX_CHOICES = 4096
# Choices of one program of the inverse index.
CHUNK = 1024
# Parts are held for this many choices of every query at a time, but for no more elements than an int32 can count.
PART_SLOTS = 4
MAX_PART_ELEMENTS = 2**30
# Blocks in the list of a tile up to which visiting them all is the fastest, and those that queries choose in any case.
TILE_UNION = 42
FORCED = 3
EVERYTHING = 2**31 - 1


@dataclass(frozen=True)
class Lists:
    """Blocks that the queries of each tile chose, without those that are gathered.

    Attributes:
        block: int32 ``[Hkv, tiles, BLOCK_Q * n]``, ascending.
        word: the same shape: bit i says that query i of the tile chose the block.
        count: int32 ``[Hkv, tiles, 3]``: blocks wholly in the past of every query, wholly inside the sequence, and all.
        block_q: queries of a tile.
    """

    block: Tensor
    word: Tensor
    count: Tensor
    block_q: int


@dataclass(frozen=True)
class InverseIndex:
    """The choices of every block, of one segment of queries after the other.

    A choice is numbered in ``[Hkv, T, n]``, a block in ``[segments, Hkv, blocks]``.

    Attributes:
        entry: int32 or int64 ``[Hkv * T * n]``: choices by block, in order; the complement of one that is not gathered.
        start: int32 or int64 ``[segments * Hkv * blocks + 1]``: where those of each block begin.
        chunk_start: int32, as ``start``: chunks before those of each block.
        part_start: int32, as ``start``: the same, counting only blocks with several chunks.
        chunk_key: int32: the block of each chunk.
        state: int8 ``[Hkv, T, n]``: absent, in the list of its tile, or gathered.
        num_blocks: at least the blocks of all sequences together.
        segment_rows: queries of a segment.
    """

    entry: Tensor
    start: Tensor
    chunk_start: Tensor
    part_start: Tensor
    chunk_key: Tensor
    state: Tensor
    num_blocks: int
    segment_rows: int

    @property
    def num_segments(self) -> int:
        """Segments that the queries are cut into."""
        return -(-self.state.shape[1] // self.segment_rows)

    @property
    def max_choices(self) -> int:
        """At least the choices of a segment."""
        num_kv_heads, num_q, n = self.state.shape
        return num_kv_heads * min(self.segment_rows, num_q) * n

    @property
    def max_chunks(self) -> int:
        """At least the chunks of a segment: all but one of each block are full."""
        return self.max_choices // CHUNK + min(self.state.shape[0] * self.num_blocks, self.max_choices)

    @property
    def max_parts(self) -> int:
        """At least those of them that share their block with others: k of them hold more than (k - 1) * CHUNK choices."""
        return 2 * self.max_choices // CHUNK


def tile_of(tile: Tile, group_size: int, block_size: int, n: int) -> tuple[Tile, int]:
    """The tile with rows and keys that fit group, block and number of choices, and the queries it holds."""
    most_queries = max(1, min(MAX_QUERIES, MAX_CHOICES // triton.next_power_of_2(n)))
    rows = max(tile.rows, triton.next_power_of_2(group_size))
    most = max(triton.next_power_of_2(most_queries * group_size), 16)
    warps = max(1, tile.warps * min(rows, most) // rows)
    rows = min(rows, most)
    tile = replace(tile, rows=rows, warps=warps, keys=min(tile.keys, block_size))
    return tile, min(rows // group_size, most_queries)


@cache
def early_blocks(block_q: int, n: int) -> int:
    """Blocks of a sequence up to which a tile of ``block_q`` queries visits all blocks that its queries chose.

    As long as the union of independent choices is expected to hold at most ``TILE_UNION`` blocks. Of n choices ``FORCED`` are
    the same for all queries, the others are any of the blocks.
    """
    free = n - FORCED
    if block_q * free + FORCED <= TILE_UNION:
        return EVERYTHING
    blocks = n
    while FORCED + (blocks + 1 - FORCED) * (1 - (1 - free / (blocks + 1 - FORCED)) ** block_q) <= TILE_UNION:
        blocks += 1
    return blocks


def segment_rows(num_q: int, num_heads: int, slots: int, size: int) -> int:
    """Queries of a segment, so that parts of ``slots`` choices a query stay within the memory that is meant for them."""
    rows = min(-(-num_q * PART_SLOTS // slots), MAX_PART_ELEMENTS // (num_heads * slots * size))
    return max(1, min(rows, num_q))


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Sizes that every kernel is compiled for."""
    (_, num_heads, head_dim), value_dim = q.shape, v.shape[-1]
    return {
        "HQ": num_heads, "G": num_heads // k.shape[1], "D": head_dim, "DV": value_dim, "BLOCK_D": block_of(head_dim),
        "BLOCK_DV": block_of(value_dim),
    }  # fmt: skip


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of tokens and heads."""
    return tuple(x.stride(dim) for x in tensors for dim in (0, 1))


def make_lists(block_indices: Tensor, layout: Layout, block_size: int, block_q: int, early: int) -> Lists:
    """Lists of every tile of ``block_q`` queries; tiles from position ``early`` on keep only the usual blocks."""
    num_q, num_kv_heads, n = block_indices.shape
    device = block_indices.device
    num_lists = layout.num_tiles(num_q, block_q, layout.len_q)
    block, word = (torch.empty(num_kv_heads, num_lists, block_q * n, dtype=torch.int32, device=device) for _ in range(2))
    count = torch.empty(num_kv_heads, num_lists, 3, dtype=torch.int32, device=device)
    pad_n = triton.next_power_of_2(n)
    selected_list_kernel[(num_lists, num_kv_heads)](
        block_indices.contiguous(), block, word, count, None, None, layout.cu_q, layout.cu_k, None, layout.len_q, layout.len_k,
        layout.num_sequences, num_q, num_lists, 0, 0, num_q, early, HKV=num_kv_heads, N=n, BLOCK_SIZE=block_size,
        BLOCK_Q=block_q, PAD_Q=triton.next_power_of_2(block_q), PAD_N=pad_n, num_warps=max(1, min(8, block_q * pad_n // 256)),
    )  # fmt: skip
    return Lists(block, word, count, block_q)


def make_index(
    block_indices: Tensor, layout: Layout, block_size: int, num_tokens: int, rows: int, block_q: int = 16,
    early: int = EVERYTHING,
) -> InverseIndex:  # fmt: skip
    """The inverse index; nothing here waits for the device.

    Args:
        block_indices: int32 or int64 ``[T, Hkv, n]``.
        layout: where the sequences lie.
        block_size: tokens of a block.
        num_tokens: key tokens of all sequences.
        rows: queries of a segment.
        block_q: queries of a tile, as given to ``make_lists``; any if there are no lists.
        early: as given to ``make_lists``.
    """
    num_q, num_kv_heads, n = block_indices.shape
    device = block_indices.device
    num_blocks = layout.num_tiles(num_tokens, block_size, layout.len_k)
    num_choices, num_keys = block_indices.numel(), -(-num_q // rows) * num_kv_heads * num_blocks
    # Half as many bits are sorted in half the passes.
    key = torch.empty(num_kv_heads, num_q, n, dtype=torch.int16 if num_keys < 2**15 - 1 else torch.int32, device=device)
    state = torch.empty(num_kv_heads, num_q, n, dtype=torch.int8, device=device)
    cu_block = None
    if layout.cu_k is not None:
        ends = ((layout.cu_k[1:] - layout.cu_k[:-1] + (block_size - 1)) // block_size).cumsum(0, dtype=torch.int32)
        cu_block = torch.nn.functional.pad(ends, (1, 0))
    num_lists = layout.num_tiles(num_q, block_q, layout.len_q)
    pad_n = triton.next_power_of_2(n)
    selected_list_kernel[(num_lists, num_kv_heads)](
        block_indices.contiguous(), None, None, None, key, state, layout.cu_q, layout.cu_k, cu_block, layout.len_q,
        layout.len_k, layout.num_sequences, num_q, num_lists, num_blocks, num_keys, rows, early, HKV=num_kv_heads, N=n,
        BLOCK_SIZE=block_size, BLOCK_Q=block_q, PAD_Q=triton.next_power_of_2(block_q), PAD_N=pad_n,
        num_warps=max(1, min(8, block_q * pad_n // 256)),
    )  # fmt: skip
    ranked, order = key.flatten().sort(stable=True)
    wide = num_choices >= 2**31
    start = torch.searchsorted(ranked, torch.arange(num_keys + 1, dtype=key.dtype, device=device), out_int32=not wide)
    entry = torch.empty(num_choices, dtype=torch.int64 if wide else torch.int32, device=device)
    selected_entry_kernel[(triton.cdiv(num_choices, 1024),)](order, state, entry, num_choices, BLOCK=1024)
    chunk_start, part_start = (torch.empty(num_keys + 1, dtype=torch.int32, device=device) for _ in range(2))
    selected_chunk_kernel[(1,)](start, chunk_start, part_start, num_keys, CHUNK=CHUNK, BLOCK=2048, num_warps=8)
    chunk_key = torch.empty(num_choices // CHUNK + min(num_keys, num_choices), dtype=torch.int32, device=device)
    selected_chunk_key_kernel[(triton.cdiv(num_keys, 128),)](chunk_start, chunk_key, num_keys, BLOCK=128)
    return InverseIndex(entry, start, chunk_start, part_start, chunk_key, state, num_blocks, rows)


def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, softmax_scale: float, block_size: int, tile: Tile,
    tile_gather: Tile | None = None,
) -> tuple[Tensor, Tensor, InverseIndex | None]:  # fmt: skip
    """Attention over chosen blocks.

    Args:
        q: ``[T, Hq, D]``, last dimension contiguous, as in all others.
        k: ``[S, Hkv, D]``.
        v: ``[S, Hkv, Dv]``.
        block_indices: int32 or int64 ``[T, Hkv, n]``.
        layout: where the sequences lie.
        softmax_scale: factor on the scores.
        block_size: tokens of a block.
        tile: of the tile kernel.
        tile_gather: of the kernel for the choices that go through the inverse index; None leaves all of them to the tiles.

    Returns:
        out ``[T, Hq, Dv]``, lse fp32 ``[T, Hq]``, and the inverse index if one was made, for the backward pass.
    """
    num_q, num_heads, _ = q.shape
    num_tokens, num_kv_heads, value_dim = v.shape
    n = block_indices.shape[-1]
    out = torch.empty(num_q, num_heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_q, num_heads, dtype=torch.float32, device=q.device)
    if num_q == 0 or n == 0:
        return out.zero_(), lse.fill_(-torch.inf), None
    tile, block_q = tile_of(tile, num_heads // num_kv_heads, block_size, n)
    tile = fitting(tile, k, v)
    early = EVERYTHING if tile_gather is None else min(early_blocks(block_q, n) * block_size, EVERYTHING)
    lists = make_lists(block_indices, layout, block_size, block_q, early)
    selected_fwd_kernel[(lists.count.shape[1], num_kv_heads)](
        q, key_source(k, tile), key_source(v, tile), out, lse, lists.block, lists.word, lists.count, *layout.arguments(),
        lists.count.shape[1], *strides_of(q, k, v), softmax_scale, N=n, BLOCK_SIZE=block_size, BLOCK_Q=block_q,
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, TMA=tile.tma, STAGES=tile.stages, EDGE=tile.edge_stages, **sizes_of(q, k, v),
        **tile.launch_options(),
    )  # fmt: skip
    if tile_gather is None:
        return out, lse, None
    tile_gather = replace(tile_gather, keys=min(tile_gather.keys, block_size))
    slots = n * (block_size // tile_gather.keys)
    rows = segment_rows(num_q, num_heads, slots, max(q.shape[-1], value_dim))
    index = make_index(block_indices, layout, block_size, num_tokens, rows, block_q, early)
    gather_and_merge(q, k, v, out, lse, index, layout, softmax_scale, block_size, tile_gather)
    return out, lse, index


def gather_and_merge(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, index: InverseIndex, layout: Layout, softmax_scale: float,
    block_size: int, tile: Tile,
) -> None:  # fmt: skip
    """Add the gathered choices to out and lse, one segment of queries after the other."""
    num_kv_heads, num_q, n = index.state.shape
    steps, sizes = block_size // tile.keys, sizes_of(q, k, v)
    num_parts = index.max_choices * steps * sizes["G"]
    part = torch.empty(num_parts, sizes["DV"], dtype=q.dtype, device=q.device)
    part_lse = torch.empty(num_parts, dtype=torch.float32, device=q.device)
    merge = merge_shape(sizes["BLOCK_DV"])
    for segment in range(index.num_segments):
        selected_gather_kernel[(index.max_chunks, steps)](
            q, k, v, part, part_lse, index.entry, index.start, index.chunk_start, index.chunk_key, layout.cu_k, layout.len_k,
            layout.num_sequences, num_q, index.num_blocks, segment, index.segment_rows, *strides_of(q, k, v), softmax_scale,
            N=n, BLOCK_SIZE=block_size, CHUNK=CHUNK, BLOCK_M=tile.rows, BLOCK_N=tile.keys, STAGES=tile.stages, **sizes,
            **tile.launch_options(),
        )  # fmt: skip
        selected_merge_kernel[(triton.cdiv(index.segment_rows * sizes["G"], merge["ROWS"]), num_kv_heads)](
            part, part_lse, index.state, out, lse, num_q, segment, index.segment_rows, HQ=sizes["HQ"], G=sizes["G"],
            DV=sizes["DV"], N=n, STEPS=steps, BLOCK_DV=sizes["BLOCK_DV"], **merge,
        )  # fmt: skip


def merge_shape(block_d: int) -> dict[str, int]:
    """Rows and slots of a program that merges: what one warp keeps in registers."""
    return {"ROWS": max(1, min(256 // block_d, 2)), "SLOTS": 16, "num_warps": 1}


def selected_backward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, out: Tensor, dout: Tensor, lse: Tensor, layout: Layout,
    softmax_scale: float, block_size: int, tile_dq: Tile | None, tile_dkv: Tile, index: InverseIndex | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes of q, k, v, contiguous; arguments as in ``selected_forward``, which made out and lse.

    ``tile_dq`` is of the kernel that computes dQ by tiles; None computes it together with dK and dV, choice by choice.
    ``index`` comes from ``selected_forward``; None makes one.
    """
    num_q, num_heads, head_dim = q.shape
    n = block_indices.shape[-1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if num_q == 0 or n == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    tile_dkv = replace(tile_dkv, keys=min(tile_dkv.keys, block_size))
    delta = torch.empty_like(lse)
    if tile_dq is None:
        sizes = sizes_of(q, k, v)
        selected_delta_kernel[(triton.cdiv(lse.numel(), 64),)](
            out, dout, delta, num_q, *strides_of(dout), HQ=num_heads, DV=sizes["DV"], ROWS=64, BLOCK_DV=sizes["BLOCK_DV"]
        )  # fmt: skip
    else:
        tiles_dq(q, k, v, block_indices, out, dout, lse, delta, dq, layout, softmax_scale, block_size, tile_dq)
    if index is None:
        slots = n * (block_size // tile_dkv.keys)
        rows = segment_rows(num_q, num_heads, slots, max(head_dim, v.shape[-1])) if tile_dq is None else num_q
        index = make_index(block_indices, layout, block_size, k.shape[0], rows)
    partial = dq if tile_dq is None else None
    gather_dkv(q, k, v, dout, lse, delta, dk, dv, partial, index, layout, softmax_scale, block_size, tile_dkv)
    return dq, dk, dv


def tiles_dq(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, out: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    layout: Layout, softmax_scale: float, block_size: int, tile: Tile,
) -> None:  # fmt: skip
    """Write dQ, and delta."""
    n, num_kv_heads = block_indices.shape[-1], k.shape[1]
    tile, block_q = tile_of(tile, q.shape[1] // num_kv_heads, block_size, n)
    tile = fitting(tile, k, v)
    lists = make_lists(block_indices, layout, block_size, block_q, EVERYTHING)
    selected_dq_kernel[(lists.count.shape[1], num_kv_heads)](
        q, key_source(k, tile), key_source(v, tile), out, dout, lse, delta, dq, lists.block, lists.word, lists.count,
        *layout.arguments(), lists.count.shape[1], *strides_of(q, k, v, dout), softmax_scale, N=n, BLOCK_SIZE=block_size,
        BLOCK_Q=block_q, BLOCK_M=tile.rows, BLOCK_N=tile.keys, TMA=tile.tma, STAGES=tile.stages, EDGE=tile.edge_stages,
        **sizes_of(q, k, v), **tile.launch_options(),
    )  # fmt: skip


def gather_dkv(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, dq: Tensor | None,
    index: InverseIndex, layout: Layout, softmax_scale: float, block_size: int, tile: Tile,
) -> None:  # fmt: skip
    """Write dK and dV and, where a tensor for it is given, dQ; one segment of queries after the other."""
    num_kv_heads, num_q, n = index.state.shape
    steps, sizes = block_size // tile.keys, sizes_of(q, k, v)
    accumulate = index.num_segments > 1
    dk_sum, dv_sum = dk, dv
    if accumulate:
        dk_sum, dv_sum = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    dk_part, dv_part = (
        torch.empty(index.max_parts, block_size, size, dtype=torch.float32, device=k.device)
        for size in (sizes["D"], sizes["DV"])
    )
    dq_part = None
    if dq is not None:
        dq_part = torch.empty(index.max_choices * steps * sizes["G"], sizes["D"], dtype=q.dtype, device=q.device)
    merge = merge_shape(sizes["BLOCK_D"])
    heads = {name: sizes.pop(name) for name in ("HQ", "G")}
    for segment in range(index.num_segments):
        selected_dkv_kernel[(index.max_chunks, steps)](
            q, k, v, dout, lse, delta, dk_sum, dv_sum, dk_part, dv_part, dq_part, index.entry, index.start, index.chunk_start,
            index.part_start, index.chunk_key, *layout.arguments(), num_q, index.num_blocks, segment, index.segment_rows,
            *strides_of(q, k, v, dout), softmax_scale, N=n, BLOCK_SIZE=block_size, CHUNK=CHUNK, BLOCK_M=tile.rows,
            BLOCK_N=tile.keys, KEYS_AS_ROWS=tile.keys_as_rows, ACCUMULATE=accumulate, STAGES=tile.stages, EDGE=tile.edge_stages,
            **heads, **sizes, **tile.launch_options(),
        )  # fmt: skip
        selected_reduce_kernel[(index.num_blocks, num_kv_heads, block_size // 16)](
            dk_sum, dv_sum, dk_part, dv_part, index.chunk_start, index.part_start, layout.cu_k, layout.len_k,
            layout.num_sequences, index.num_blocks, segment, softmax_scale, HKV=num_kv_heads, BLOCK_SIZE=block_size, BLOCK_N=16,
            ACCUMULATE=accumulate, **sizes, num_warps=4,
        )  # fmt: skip
        if dq is not None:
            selected_merge_dq_kernel[(triton.cdiv(index.segment_rows * heads["G"], merge["ROWS"]), num_kv_heads)](
                dq_part, index.state, dq, num_q, segment, index.segment_rows, softmax_scale, D=sizes["D"], N=n, STEPS=steps,
                BLOCK_D=sizes["BLOCK_D"], **heads, **merge,
            )  # fmt: skip
    if accumulate:
        torch.mul(dk_sum, softmax_scale, out=dk)
        dv.copy_(dv_sum)
