"""Launchers of the gathered design of the selected branch; see ``triton_gather.py``. No autograd, no checks of user input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nsa.ops._triton.layout import Layout
from nsa.ops._triton.range_launch import block_of
from nsa.ops._triton.tuning import Tile
from nsa.ops.selected.triton_gather import (
    selected_delta_kernel,
    selected_gather_bwd_kernel,
    selected_gather_fwd_kernel,
    selected_gather_reduce_kernel,
    selected_item_kernel,
    selected_merge_dq_kernel,
    selected_merge_out_kernel,
)

# Rows of slots that are held for a query head at once, on average over all queries: so much memory as two more queries.
HELD_SLOTS = 2
# Rows of slots that need less than this, bytes, are held in one segment.
SMALL = 1 << 26
# Queries of one program.
CHUNK = 512
# Elements of the rows of slots that one step of a merge holds for a query head.
MERGED = 1024
# Rows (queries by heads) of a program of a merge, and its warps.
MERGE_ROWS = 2
MERGE_WARPS = 1


@dataclass(frozen=True)
class Gathered:
    """A choice of blocks as an inverse index: segment by segment and block by block, the queries that chose it.

    Attributes:
        item: int16 or int32 ``[T, Hkv, n]``: the item of each entry, ``none`` where the block is absent.
        order: int64 ``[T * Hkv * n]``: entries by item and, within an item, by query.
        start: int32 ``[items + 1]``: where the entries of each item begin in ``order``.
        chunk_item: int32: the item of each chunk.
        chunk_start: int32 ``[items + 1]``: the first chunk of each item.
        num_blocks: at least the blocks of all sequences together.
        segments: segments that the queries are cut into.
        segment_rows: queries of a segment.
        none: number of items.
    """

    item: Tensor
    order: Tensor
    start: Tensor
    chunk_item: Tensor
    chunk_start: Tensor
    num_blocks: int
    segments: int
    segment_rows: int
    none: int

    @property
    def num_chunks(self) -> int:
        """At least the chunks of any segment."""
        _, num_kv_heads, n = self.item.shape
        return self.segment_rows * num_kv_heads * n // CHUNK + num_kv_heads * self.num_blocks

    def index(self) -> tuple[Tensor, ...]:
        """What the kernels take of it."""
        return self.order, self.start, self.chunk_item, self.chunk_start


def num_segments(num_rows: int, slots: int, row_bytes: int) -> int:
    """Segments by shapes alone, so that sums never change order.

    The rows of slots then need ``HELD_SLOTS * row_bytes`` a query at most (6 KiB for 12 heads of 64 elements of 2 bytes), or
    ``SMALL`` in all.

    Args:
        num_rows: queries.
        slots: rows of slots for each query head.
        row_bytes: bytes of one row of slots of all query heads.
    """
    return max(1, min(num_rows, -(-slots // HELD_SLOTS), -(-num_rows * slots * row_bytes // SMALL)))


def gather(block_indices: Tensor, layout: Layout, block_size: int, num_tokens: int, segments: int) -> Gathered:
    """The inverse index of ``block_indices [T, Hkv, n]``; nothing here waits for the device."""
    num_q, num_kv_heads, n = block_indices.shape
    device = block_indices.device
    num_blocks = layout.num_tiles(num_tokens, block_size, layout.len_k)
    segment_rows = -(-num_q // segments)
    none = segments * num_kv_heads * num_blocks
    # Half as many bits are sorted in half the passes. Rows of no sequence are not visited: they keep ``none``.
    item_type = torch.int16 if none < 2**15 - 1 else torch.int32
    item = torch.full(block_indices.shape, none, dtype=item_type, device=device)
    cu_block = None
    if layout.cu_k is not None:
        ends = ((layout.cu_k[1:] - layout.cu_k[:-1] + (block_size - 1)) // block_size).cumsum(0, dtype=torch.int32)
        cu_block = torch.nn.functional.pad(ends, (1, 0))
    block_q = 64
    selected_item_kernel[(layout.num_tiles(num_q, block_q, layout.len_q),)](
        block_indices.contiguous(), item, layout.cu_q, layout.cu_k, cu_block, layout.len_q, layout.len_k, layout.num_sequences,
        num_blocks, segment_rows, none, HKV=num_kv_heads, N=n, BLOCK_SIZE=block_size, BLOCK_Q=block_q, ENTRIES=1024,
        num_warps=4,
    )  # fmt: skip
    ranked, order = item.flatten().sort(stable=True)
    start = torch.searchsorted(ranked, torch.arange(none + 1, dtype=item_type, device=device), out_int32=True)
    counts = (start[1:] - start[:-1] + (CHUNK - 1)) // CHUNK
    chunk_start = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    chunks = torch.arange(item.numel() // CHUNK + none, dtype=torch.int32, device=device)
    chunk_item = torch.searchsorted(chunk_start, chunks, right=True, out_int32=True) - 1
    return Gathered(item, order, start, chunk_item, chunk_start, num_blocks, segments, segment_rows, none)


def slots_of_step(slots: int, block: int) -> int:
    """Slots that one step of a merge holds for a row of ``block`` elements."""
    return max(1, min(triton.next_power_of_2(slots), MERGED // block))


def gather_forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, softmax_scale: float, block_size: int, tile: Tile,
    segments: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out ``[T, Hq, Dv]`` and lse fp32 ``[T, Hq]``. ``segments`` None: as many as memory wants."""
    num_q, num_heads, head_dim = q.shape
    num_tokens, num_kv_heads, value_dim = v.shape
    group_size, n = num_heads // num_kv_heads, block_indices.shape[-1]
    out = torch.empty(num_q, num_heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_q, num_heads, dtype=torch.float32, device=q.device)
    if num_q == 0 or n == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    keys = min(tile.keys, block_size)
    parts = block_size // keys
    segments = segments or num_segments(num_q, n * parts, num_heads * value_dim * q.element_size())
    index = gather(block_indices, layout, block_size, num_tokens, segments)
    part = torch.empty(index.segment_rows * num_heads * n * parts, value_dim, dtype=q.dtype, device=q.device)
    lse_part = torch.empty(part.shape[0], dtype=torch.float32, device=q.device)
    sizes = {"HQ": num_heads, "G": group_size, "DV": value_dim, "N": n, "BLOCK_DV": block_of(value_dim)}
    for segment in range(segments):
        selected_gather_fwd_kernel[(index.num_chunks, parts)](
            q, k, v, part, lse_part, *index.index(), *layout.arguments(), index.num_blocks, segment, index.segment_rows,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), softmax_scale, D=head_dim,
            BLOCK_D=block_of(head_dim), BLOCK_SIZE=block_size, CHUNK=CHUNK, BLOCK_M=tile.rows, BLOCK_N=keys,
            STAGES=tile.stages, EDGE=tile.edge_stages, **sizes, **tile.launch_options(),
        )  # fmt: skip
        selected_merge_out_kernel[(-(-index.segment_rows * num_heads // MERGE_ROWS),)](
            part, lse_part, index.item, out, lse, num_q, segment, index.segment_rows, index.none, PARTS=parts,
            BLOCK_M=MERGE_ROWS, BLOCK_S=slots_of_step(n * parts, block_of(value_dim)), **sizes, num_warps=MERGE_WARPS,
        )  # fmt: skip
    return out, lse


def gather_backward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, out: Tensor, dout: Tensor, lse: Tensor, layout: Layout,
    softmax_scale: float, block_size: int, tile: Tile, segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes of q, k, v, contiguous. ``segments`` None: as many as memory wants."""
    num_q, num_heads, head_dim = q.shape
    num_tokens, num_kv_heads, value_dim = v.shape
    group_size, n = num_heads // num_kv_heads, block_indices.shape[-1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if num_q == 0 or n == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    keys = min(tile.keys, block_size)
    parts = block_size // keys
    segments = segments or num_segments(num_q, n * parts, num_heads * head_dim * q.element_size())
    index = gather(block_indices, layout, block_size, num_tokens, segments)
    delta = torch.empty_like(lse)
    selected_delta_kernel[(-(-num_q * num_heads // 64),)](
        out, dout, delta, num_q * num_heads, dout.stride(0), dout.stride(1), HQ=num_heads, DV=value_dim, BLOCK_M=64,
        BLOCK_DV=block_of(value_dim), num_warps=4,
    )  # fmt: skip
    part = torch.empty(index.segment_rows * num_heads * n * parts, head_dim, dtype=q.dtype, device=q.device)
    sizes = {"D": head_dim, "BLOCK_D": block_of(head_dim)}
    both = {**sizes, "DV": value_dim, "BLOCK_DV": block_of(value_dim)}
    chunk_sums, sums = (
        [torch.empty(*shape, size, dtype=torch.float32, device=q.device) for size in (head_dim, value_dim)]
        for shape in ((index.num_chunks, block_size), k.shape[:2] if segments > 1 else (0, 0))
    )
    block_k = min(block_size, 16)
    for segment in range(segments):
        selected_gather_bwd_kernel[(index.num_chunks, parts)](
            q, k, v, dout, lse, delta, part, *chunk_sums, *index.index(), *layout.arguments(), index.num_blocks, segment,
            index.segment_rows, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), dout.stride(0),
            dout.stride(1), softmax_scale, HQ=num_heads, G=group_size, N=n, BLOCK_SIZE=block_size, CHUNK=CHUNK,
            BLOCK_M=tile.rows, BLOCK_N=keys, STAGES=tile.stages, EDGE=tile.edge_stages, **both, **tile.launch_options(),
        )  # fmt: skip
        last = segment == segments - 1
        selected_gather_reduce_kernel[(index.num_blocks, num_kv_heads, block_size // block_k)](
            *chunk_sums, *(sums if segment else (None, None)), *((dk, dv) if last else sums), index.chunk_start, layout.cu_k,
            layout.len_k, layout.num_sequences, index.num_blocks, segment, softmax_scale, HKV=num_kv_heads,
            BLOCK_SIZE=block_size, BLOCK_K=block_k, LAST=last, **both, num_warps=4,
        )  # fmt: skip
        selected_merge_dq_kernel[(-(-index.segment_rows * num_heads // MERGE_ROWS),)](
            part, index.item, dq, num_q, segment, index.segment_rows, index.none, HQ=num_heads, G=group_size, N=n, PARTS=parts,
            BLOCK_M=MERGE_ROWS, BLOCK_S=slots_of_step(n * parts, block_of(head_dim)), **sizes, num_warps=MERGE_WARPS,
        )  # fmt: skip
    return dq, dk, dv
