"""Launchers of the kernels of the selected branch. No autograd, no checks of user input.

What outlives a launcher is made before it, and what its two streams share before they fork
(``nsa/ops/_side_stream.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.ops._limits import check_numbers
from nsa.ops._side_stream import fork_join
from nsa.ops._triton.layout import Gated, Heads, Layout
from nsa.ops._triton.range_launch import fitting, source
from nsa.ops._triton.sizes import cdiv, next_power_of_2
from nsa.ops._triton.tuning import MOST_REGISTERS, Tile
from nsa.ops.selected.algorithm import MAX_QUERIES, always_tiled
from nsa.ops.selected.gathered_bwd import (
    selected_gather_bwd_kernel,
    selected_merge_dq_kernel,
    selected_reduce_kernel,
)
from nsa.ops.selected.gathered_fwd import selected_gather_fwd_kernel, selected_merge_out_kernel
from nsa.ops.selected.index import (
    Chunks,
    InverseIndex,
    SelectedBlocks,
    make_lists,
    new_index,
    new_order,
)
from nsa.ops.selected.tiled_bwd import selected_delta_kernel, selected_dq_kernel
from nsa.ops.selected.tiled_fwd import selected_fwd_kernel

# Partial results that are held for a query head at once, on average over all queries.
HELD_SLOTS = 4
# Partial results that need less than this, bytes, are held in one segment.
SMALL = 1 << 26
# Selections of a chunk: of the forward, of the backward, and of that with dQ where no sequence has
# more than ``LONG`` tokens.
FORWARD_CHUNK, BACKWARD_CHUNK, DQ_CHUNK = 256, 1024, 512
LONG = 16_384
# Without dQ chunks are smaller where they would be fewer: a GPU runs some 400 programs at once.
PROGRAMS, LEAST_CHUNK = 512, 128
# Rows (queries by heads) of a step of delta, and the programs that share them.
DELTA_ROWS, DELTA_PROGRAMS = 32, 1024
# Elements of the partial results that one step of a merge holds for a query head.
MERGED = 1024
# Elements of the chunks' dK that one step of their sum holds.
SUMMED = 4096
# Rows (queries by heads) of a step of a merge, steps of a program, and its warps.
MERGE_ROWS = 2
MERGE_STEPS = 8
MERGE_WARPS = 1

# The tile of a kernel by its name; see ``tile_for``.
Tiles = Callable[[str], Tile]


@dataclass(frozen=True)
class Call:
    """What forward and backward are told beside tensors.

    Attributes:
        layout: where the sequences lie.
        softmax_scale: factor on the scores.
        block_size: tokens of a block.
        tiles: tile of each kernel.
        algorithm: ``tiled``, ``gathered``, or ``auto``: tiled where lists are short by the shapes
            alone, and otherwise what suits the selection, decided on the device.
        segments: segments of the gathered algorithm; None: as many as memory wants.
        unique: whether no query names a block twice, as :func:`nsa.select_blocks` does not.
    """

    layout: Layout
    softmax_scale: float
    block_size: int
    tiles: Tiles
    algorithm: str = "auto"
    segments: int | None = None
    unique: bool = False

    def always_tiled(self, q: Tensor, k: Tensor, n: int) -> bool:
        """Whether the tiled algorithm runs whatever the selection is."""
        return always_tiled(
            self.algorithm,
            q.shape[1] // k.shape[1],
            n,
            self.layout.len_q,
            self.layout.len_k,
            self.block_size,
        )

    def results(self, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor) -> ForwardResults:
        """Memory for what :func:`selected_forward` gives; only shapes and device are read."""
        num_q, num_heads, _ = q.shape
        out = torch.empty(num_q, num_heads, v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(num_q, num_heads, dtype=torch.float32, device=q.device)
        if self.always_tiled(q, k, block_indices.shape[-1]):
            return ForwardResults(out, lse, None, None)
        tile_stats = torch.zeros(2, dtype=torch.int64, device=q.device)
        if self.algorithm == "gathered":
            tile_stats[0].fill_(1)
        return ForwardResults(out, lse, new_order(block_indices), tile_stats)

    def read(
        self, q: Tensor, k: Tensor, n: int, results: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> ForwardResults:
        """The forward's results, from those of the registered operator, which has no None."""
        out, lse, order, tile_stats = results
        if self.always_tiled(q, k, n):
            return ForwardResults(out, lse, None, None)
        return ForwardResults(out, lse, order, tile_stats)

    def num_segments(self, num_rows: int, slots: int, row_bytes: int) -> int:
        """Segments by shapes alone, so that sums never change order.

        The partial results then need ``HELD_SLOTS * row_bytes`` a query at most (6 KiB for 12 heads
        of 64 elements of 2 bytes), or ``SMALL`` in all.

        Args:
            num_rows: queries.
            slots: partial results of each query head.
            row_bytes: bytes of one partial result of all query heads.
        """
        least = max(-(-slots // HELD_SLOTS), 1)
        return self.segments or max(
            1, min(num_rows, least, -(-num_rows * slots * row_bytes // SMALL))
        )


@dataclass(frozen=True)
class ForwardResults:
    """What the forward gives.

    Attributes:
        out: ``[T, Hq, Dv]``.
        lse: fp32 ``[T, Hq]``.
        order: of the inverse index; None where the tiled algorithm runs whatever the selection is.
        tile_stats: int64 ``[2]``: blocks of the tiles' lists and their number, 0 at first; None as
            ``order``. With the gathered algorithm they are 1 and 0 from the start and stay so:
            selections count as scattered.
    """

    out: Tensor
    lse: Tensor
    order: Tensor | None
    tile_stats: Tensor | None


def tile_of(tile: Tile, group_size: int, block_size: int) -> tuple[Tile, int]:
    """The tile with rows and keys that fit group and block, and how many of its rows are used.

    Those of whole queries, unless that would leave more than an eighth of them out.
    """
    most = max(next_power_of_2(MAX_QUERIES * group_size), 16)
    rows = min(tile.rows, most)
    warps = max(1, tile.warps * rows // tile.rows)
    whole = min(rows // group_size, MAX_QUERIES) * group_size
    # A limit of registers was measured with all rows.
    limit = tile.max_registers if rows == tile.rows else MOST_REGISTERS
    tile = tile._replace(
        rows=rows, warps=warps, keys=min(tile.keys, block_size), max_registers=limit
    )
    return tile, whole if 8 * (rows - whole) <= rows else rows


def chunk_size(num_selections: int) -> int:
    """Entries of a chunk of the backward without dQ, by shapes alone: sums never change order."""
    return min(
        BACKWARD_CHUNK, max(LEAST_CHUNK, 1 << (max(num_selections // PROGRAMS, 1).bit_length() - 1))
    )


def slots_of_step(slots: int, block: int) -> int:
    """Slots that one step of a merge holds for a row of ``block`` elements."""
    return max(1, min(next_power_of_2(slots), MERGED // block))


def constants_of(
    call: Call, n: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None
) -> dict[str, Any]:
    """Strides, scale and sizes, as the kernels of ``n`` slots a query take them."""
    strides = {"stride_q": q.stride(), "stride_k": k.stride(), "stride_v": v.stride()}
    if dout is not None:
        strides["stride_do"] = dout.stride()
    sizes = {"HEADS": Heads.of(q, v), "BLOCKS": SelectedBlocks.of(n, call.block_size)}
    return {**strides, "softmax_scale": call.softmax_scale, **sizes}


def merge_grid(chunks: Chunks, num_heads: int) -> tuple[int]:
    """Programs that merge the partial results of a segment."""
    return (cdiv(chunks.segment_rows * num_heads, MERGE_ROWS * MERGE_STEPS),)


def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call, results: ForwardResults
) -> None:
    """Fill the results, see :meth:`Call.results`."""
    heads, n = Heads.of(q, v), block_indices.shape[-1]
    out, lse, tile_stats = results.out, results.lse, results.tile_stats
    if q.shape[0] == 0 or n == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    tile, used = tile_of(call.tiles("selected_attention_fwd"), heads.G, call.block_size)
    tile, counter = fitting(tile, k, v), None if call.algorithm == "gathered" else tile_stats
    gathered = None
    if tile_stats is not None:
        gathered = new_gathered(q, k, v, block_indices, call, results.order)
    with fork_join(q.device, enabled=gathered is not None) as streams:
        if gathered is not None:
            with streams.on_side():
                fill_index(*gathered, block_indices=block_indices, call=call)
        wait = streams.record()
        lists = make_lists(
            block_indices, call.layout, heads.G, call.block_size, used, counter, counted=False
        )
        num_lists, list_len = lists.block.shape[1:]
        selected_fwd_kernel[(num_lists, v.shape[1])](
            q,
            source(k, tile.keys, tile),
            source(v, tile.keys, tile),
            out,
            lse,
            lists.pointers(),
            tile_stats,
            *call.layout.arguments(),
            num_lists,
            **constants_of(call, n, q, k, v),
            TILE=tile,
            ROWS=used,
            LIST_LEN=list_len,
            **tile.launch_options(),
        )
        wait()
        if gathered is not None and tile_stats is not None:
            gather_forward(q, k, v, n, call, tile_stats, *gathered, out, lse)


def new_gathered(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call, order: Tensor | None
) -> tuple[InverseIndex, Chunks]:
    """Memory for the inverse index of :func:`gather_forward` and its chunks; see ``new_index``."""
    slots = block_indices.shape[-1] * (
        call.block_size // min(call.tiles("selected_gather_fwd").keys, call.block_size)
    )
    segments = call.num_segments(q.shape[0], slots, q.shape[1] * v.shape[2] * q.element_size())
    where = (call.layout, call.block_size, k.shape[0], segments, order)
    index = new_index(block_indices, *where, with_remote=True)
    check_slots(index, q.shape[1], slots)
    return index, index.new_chunks(segments, FORWARD_CHUNK)


def check_slots(index: InverseIndex, num_heads: int, slots: int) -> None:
    """The partial results of a segment can be numbered."""
    count = index.segment_rows * num_heads * slots
    check_numbers("selected_attention", "q", count, "partial results in a segment of queries")


def fill_index(
    index: InverseIndex,
    *chunks: Chunks | None,
    block_indices: Tensor,
    call: Call,
    sort: bool = True,
) -> None:
    """Make an inverse index and its chunks: of the selection alone."""
    ranked = index.fill(block_indices, call.layout, call.block_size, unique=call.unique, sort=sort)
    for some in chunks:
        if some is not None:
            some.fill(ranked)


def gather_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    call: Call,
    tile_stats: Tensor,
    index: InverseIndex,
    chunks: Chunks,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The gathered algorithm's share of :func:`selected_forward`, where selections scatter.

    It merges what comes of remote blocks into ``out`` and ``lse``.
    """
    constants = constants_of(call, n, q, k, v)
    heads, num_heads = constants["HEADS"], q.shape[1]
    tile = call.tiles("selected_gather_fwd")
    tile = tile._replace(keys=min(tile.keys, call.block_size))
    parts = call.block_size // tile.keys
    num_parts = chunks.segment_rows * num_heads * n * parts
    part = torch.empty(num_parts, heads.DV, dtype=q.dtype, device=q.device)
    lse_part = torch.empty(num_parts, dtype=torch.float32, device=q.device)
    for segment in range(chunks.segments):
        selected_gather_fwd_kernel[(chunks.limit, parts)](
            q,
            k,
            v,
            part,
            lse_part,
            tile_stats,
            chunks.pointers(),
            *call.layout.arguments(),
            index.num_blocks,
            segment,
            chunks.segment_rows,
            chunks.size,
            **constants,
            TILE=tile,
            num_stages=tile.stages,
            **tile.launch_options(),
        )
        where = (q.shape[0], segment, chunks.segment_rows, index.absent)
        selected_merge_out_kernel[merge_grid(chunks, num_heads)](
            *(part, lse_part, index.remote, out, lse, tile_stats),
            *where,
            HEADS=heads,
            BLOCKS=constants["BLOCKS"],
            PARTS=parts,
            BLOCK_M=MERGE_ROWS,
            BLOCK_S=slots_of_step(n * parts, heads.BLOCK_DV),
            STEPS=MERGE_STEPS,
            num_warps=MERGE_WARPS,
        )


def selected_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    dout: Tensor,
    call: Call,
    results: ForwardResults,
    grads: tuple[Tensor, Tensor, Tensor],
    gated: Gated,
) -> None:
    """Fill ``grads``: dq, dk, dv in the shapes of q, k, v, contiguous.

    ``results`` are the forward's. With gates dout is the gradient of the branches' gated sum.
    """
    dq, dk, dv = grads
    if q.shape[0] == 0 or block_indices.shape[-1] == 0:
        for grad in grads[1:] if gated.adds else grads:
            grad.zero_()
        return
    tile_stats = results.tile_stats
    delta = torch.empty_like(results.lse)
    lse = results.lse if gated.gates is None else torch.empty_like(results.lse)
    inputs = (q, k, v, dout, lse, delta)
    index, chunks, chunks_with_dq = new_backward_index(q, k, block_indices, call, results)
    with fork_join(q.device) as streams:
        with streams.on_side():
            made = (index, chunks, chunks_with_dq)
            sort = results.order is None
            fill_index(*made, block_indices=block_indices, call=call, sort=sort)
        wait = streams.record()
        _tiled_query_gradient(inputs, block_indices, call, results, dq, gated)
        wait()
        # The device runs one of both ways, which share their sums; the other's kernels leave at
        # once, at the same time.
        most = max(chunks.limit, 0 if chunks_with_dq is None else chunks_with_dq.limit)
        rows = most * call.block_size
        check_numbers("selected_attention", "k", rows, "rows of sums of dK and dV")
        sums = (_sums(q, rows, q.shape[2]), _sums(q, rows, v.shape[2]))
        keys = ((dk, dv), sums, index)
        if chunks_with_dq is not None:
            streams.fork()
            with streams.on_side():
                _gather_gradients(inputs, *keys, chunks_with_dq, call, tile_stats, dq, gated.adds)
        _gather_gradients(inputs, *keys, chunks, call, tile_stats, None, gated.adds)


def _tiled_query_gradient(
    inputs: tuple[Tensor, ...],
    block_indices: Tensor,
    call: Call,
    results: ForwardResults,
    dq: Tensor,
    gated: Gated,
) -> None:
    """dq where the tiled algorithm runs; in any case delta and the gated lse, among the inputs."""
    q, k, v, dout, lse, delta = inputs
    tile_stats = results.tile_stats
    constants = constants_of(call, block_indices.shape[-1], q, k, v, dout)
    heads = constants["HEADS"]
    tile, used = tile_of(call.tiles("selected_attention_dq"), heads.G, call.block_size)
    tile, counted = fitting(tile, k, v), tile_stats is not None
    lists = make_lists(
        block_indices, call.layout, heads.G, call.block_size, used, tile_stats, counted=counted
    )
    num_lists, list_len = lists.block.shape[1:]
    statistics = (results.out, dout, results.lse, delta)
    selected_dq_kernel[(num_lists, v.shape[1])](
        q,
        source(k, tile.keys, tile),
        source(v, tile.keys, tile),
        *statistics,
        dq,
        gated.pointers(lse),
        lists.pointers(),
        tile_stats,
        *call.layout.arguments(),
        num_lists,
        **constants,
        TILE=tile,
        ROWS=used,
        LIST_LEN=list_len,
        ADD=gated.adds,
        **tile.launch_options(),
    )
    if tile_stats is not None:
        # Masks of columns take registers.
        limit = {} if heads.DV == heads.BLOCK_DV else {"maxnreg": MOST_REGISTERS}
        selected_delta_kernel[(DELTA_PROGRAMS,)](
            *statistics,
            gated.pointers(lse),
            tile_stats,
            call.layout.cu_q,
            call.layout.len_q,
            call.layout.num_sequences,
            stride_do=dout.stride(),
            HEADS=heads,
            BLOCKS=constants["BLOCKS"],
            BLOCK_R=DELTA_ROWS,
            num_warps=4,
            **limit,
        )


def new_backward_index(
    q: Tensor, k: Tensor, block_indices: Tensor, call: Call, results: ForwardResults
) -> tuple[InverseIndex, Chunks, Chunks | None]:
    """Memory for the inverse index of the backward, its chunks without dQ, and those with dQ.

    The latter are None where the tiled algorithm runs whatever the selection is.
    """
    n, segments = block_indices.shape[-1], 1
    if results.tile_stats is not None:
        slots = n * (
            call.block_size // min(call.tiles("selected_gather_dkv").keys, call.block_size)
        )
        segments = call.num_segments(q.shape[0], slots, q.shape[1] * q.shape[2] * q.element_size())
    where = (call.layout, call.block_size, k.shape[0], segments, results.order)
    index = new_index(block_indices, *where)
    chunks = index.new_chunks(1, chunk_size(block_indices.numel()))
    if results.tile_stats is None:
        return index, chunks, None
    check_slots(index, q.shape[1], slots)
    size = DQ_CHUNK if call.layout.len_k <= LONG else BACKWARD_CHUNK
    return index, chunks, index.new_chunks(segments, size)


def _gather_gradients(
    inputs: tuple[Tensor, ...],
    grads: tuple[Tensor, Tensor],
    partial: tuple[Tensor, Tensor],
    index: InverseIndex,
    chunks: Chunks,
    call: Call,
    tile_stats: Tensor | None,
    dq: Tensor | None,
    add: bool,
) -> None:
    """Fill dk and dv and, if it is given, dq.

    With ``tile_stats`` only where selections scatter (dq) or do not (no dq).
    """
    q, k, v, dout, *_ = inputs
    num_heads, num_kv_heads, n = q.shape[1], v.shape[1], index.key.shape[-1]
    constants = constants_of(call, n, q, k, v, dout)
    heads, last = constants["HEADS"], chunks.segments - 1
    tile = call.tiles("selected_attention_dkv" if dq is None else "selected_gather_dkv")
    tile = tile._replace(keys=min(tile.keys, call.block_size))
    parts = call.block_size // tile.keys
    part: Tensor | None = None
    sums: tuple[Tensor, Tensor] | None = None
    if dq is not None:
        num_parts = chunks.segment_rows * num_heads * n * parts
        part = torch.empty(num_parts, heads.D, dtype=q.dtype, device=q.device)
    if last:
        rows = k.shape[0] * num_kv_heads
        sums = (_sums(q, rows, heads.D), _sums(q, rows, heads.DV))
    for segment in range(chunks.segments):
        where = (index.num_blocks, segment, chunks.segment_rows, chunks.size, last)
        selected_gather_bwd_kernel[(chunks.limit, parts)](
            *inputs,
            part,
            partial,
            sums,
            grads,
            tile_stats,
            chunks.pointers(),
            *call.layout.arguments(),
            *where,
            **constants,
            TILE=tile,
            num_stages=tile.stages,
            **tile.launch_options(),
        )
        targets = (partial, sums, grads, tile_stats)
        _add_chunks(targets, chunks, call, segment, constants, with_dq=dq is not None)
        if part is not None and dq is not None:
            selected_merge_dq_kernel[merge_grid(chunks, num_heads)](
                *(part, index.key, dq, tile_stats),
                *(q.shape[0], segment, chunks.segment_rows, index.absent),
                HEADS=heads,
                BLOCKS=constants["BLOCKS"],
                PARTS=parts,
                BLOCK_M=MERGE_ROWS,
                BLOCK_S=slots_of_step(n * parts, heads.BLOCK_D),
                STEPS=MERGE_STEPS,
                ADD=add,
                num_warps=MERGE_WARPS,
            )


def _add_chunks(
    targets: tuple[Any, ...],
    chunks: Chunks,
    call: Call,
    segment: int,
    constants: dict[str, Any],
    *,
    with_dq: bool,
) -> None:
    """Add up dK and dV of a segment's chunks; see ``selected_reduce_kernel``."""
    heads, layout = constants["HEADS"], call.layout
    block_k = min(call.block_size, 16)
    grid = (chunks.num_blocks, heads.HQ // heads.G, call.block_size // block_k)
    selected_reduce_kernel[grid](
        *(chunks.begin, chunks.length, chunks.start),
        *targets,
        *(layout.cu_k, layout.len_k, layout.num_sequences),
        *(chunks.num_blocks, segment, chunks.segments - 1),
        softmax_scale=call.softmax_scale,
        HEADS=heads,
        BLOCKS=constants["BLOCKS"],
        BLOCK_K=block_k,
        BLOCK_C=max(1, SUMMED // (block_k * heads.BLOCK_D)),
        DQ=with_dq,
        # Masks of columns take registers.
        num_warps=4 if (heads.D, heads.DV) == (heads.BLOCK_D, heads.BLOCK_DV) else 8,
    )


def _sums(like: Tensor, rows: int, size: int) -> Tensor:
    return torch.empty(rows, size, dtype=torch.float32, device=like.device)
