"""Launchers of the kernels of the selected branch, and the choice of their algorithm. No autograd, no checks of user input.

What outlives a launcher is made before it, and what its two streams share before they fork
(``nsa/ops/_side_stream.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nsa.ops._limits import check_numbers
from nsa.ops._side_stream import fork_join
from nsa.ops._triton.layout import Gated, Layout
from nsa.ops._triton.range_launch import block_of, fitting, key_source
from nsa.ops._triton.sizes import next_power_of_2
from nsa.ops._triton.tuning import MOST_REGISTERS, Tile
from nsa.ops.selected.algorithm import LIMIT_4, MAX_QUERIES, always_tiled
from nsa.ops.selected.gathered import (
    selected_gather_bwd_kernel,
    selected_gather_fwd_kernel,
    selected_merge_dq_kernel,
    selected_merge_out_kernel,
    selected_reduce_kernel,
)
from nsa.ops.selected.index import Chunks, InverseIndex, make_lists, new_index, new_order
from nsa.ops.selected.tiled_bwd import selected_delta_kernel, selected_dq_kernel
from nsa.ops.selected.tiled_fwd import selected_fwd_kernel

# Rows of slots that are held for a query head at once, on average over all queries: so much memory
# as so many more queries.
HELD_SLOTS = 4
# Rows of slots that need less than this, bytes, are held in one segment.
SMALL = 1 << 26
# Entries of a chunk: of the forward, of the backward, and of that with dQ where no sequence has
# more than ``LONG`` tokens.
FORWARD_CHUNK, BACKWARD_CHUNK, DQ_CHUNK = 256, 1024, 512
LONG = 16_384
# Without dQ chunks are smaller where they would be fewer: a GPU runs some 400 programs at once.
PROGRAMS, LEAST_CHUNK = 512, 128
# Rows (queries by heads) of a step of delta, and the programs that share them.
DELTA_ROWS, DELTA_PROGRAMS = 32, 1024
# Elements of the rows of slots that one step of a merge holds for a query head.
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
            alone, and otherwise what the choice itself asks for, on the device.
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
        """Whether the tiled algorithm runs whatever the choice is."""
        return always_tiled(
            self.algorithm,
            q.shape[1] // k.shape[1],
            n,
            self.layout.len_q,
            self.layout.len_k,
            self.block_size,
        )

    def results(self, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor) -> ForwardResults:
        """Memory for what :func:`selected_forward` gives; of the tensors shapes and device count."""
        num_q, num_heads, _ = q.shape
        out = torch.empty(num_q, num_heads, v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(num_q, num_heads, dtype=torch.float32, device=q.device)
        if self.always_tiled(q, k, block_indices.shape[-1]):
            return ForwardResults(out, lse, None, None)
        union = torch.zeros(2, dtype=torch.int64, device=q.device)
        if self.algorithm == "gathered":
            union[0].fill_(1)
        return ForwardResults(out, lse, new_order(block_indices), union)

    def read(
        self, q: Tensor, k: Tensor, n: int, results: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> ForwardResults:
        """The forward's results as the registered operator has them: without None, where the last two are not read."""
        out, lse, order, union = results
        if self.always_tiled(q, k, n):
            return ForwardResults(out, lse, None, None)
        return ForwardResults(out, lse, order, union)

    def num_segments(self, num_rows: int, slots: int, row_bytes: int) -> int:
        """Segments by shapes alone, so that sums never change order.

        The rows of slots then need ``HELD_SLOTS * row_bytes`` a query at most (6 KiB for 12 heads
        of 64 elements of 2 bytes), or ``SMALL`` in all.

        Args:
            num_rows: queries.
            slots: rows of slots for each query head.
            row_bytes: bytes of one row of slots of all query heads.
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
        order: of the inverse index; None where the tiled algorithm runs whatever the choice is.
        union: int64 ``[2]``: blocks of the tiles' lists and their number, 0 at first; None as
            ``order``. With the gathered algorithm they are 1 and 0 from the start and stay so:
            choices count as scattered.
    """

    out: Tensor
    lse: Tensor
    order: Tensor | None
    union: Tensor | None


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
    tile = replace(
        tile, rows=rows, warps=warps, keys=min(tile.keys, block_size), max_registers=limit
    )
    return tile, whole if 8 * (rows - whole) <= rows else rows


def chunk_size(num_entries: int) -> int:
    """Entries of a chunk of the backward without dQ, by shapes alone: sums never change order."""
    return min(
        BACKWARD_CHUNK, max(LEAST_CHUNK, 1 << (max(num_entries // PROGRAMS, 1).bit_length() - 1))
    )


def slots_of_step(slots: int, block: int) -> int:
    """Slots that one step of a merge holds for a row of ``block`` elements."""
    return max(1, min(next_power_of_2(slots), MERGED // block))


def strides_of(*tensors: Tensor) -> list[int]:
    """Strides of tokens and heads of each tensor."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call, results: ForwardResults
) -> None:
    """Fill the results, see :meth:`Call.results`."""
    num_q, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    group_size, n = num_heads // num_kv_heads, block_indices.shape[-1]
    out, lse, union = results.out, results.lse, results.union
    if num_q == 0 or n == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    tile, used = tile_of(call.tiles("selected_attention_fwd"), group_size, call.block_size)
    tile, counter = fitting(tile, k, v), None if call.algorithm == "gathered" else union
    gathered = None if union is None else new_gathered(q, k, v, block_indices, call, results.order)
    with fork_join(q.device, enabled=gathered is not None) as streams:
        if gathered is not None:
            with streams.on_side():
                fill_index(*gathered, block_indices=block_indices, call=call)
        wait = streams.record()
        lists = make_lists(
            block_indices, call.layout, group_size, call.block_size, used, counter, counted=False
        )
        selected_fwd_kernel[(lists.count.shape[1], num_kv_heads)](
            q, key_source(k, tile), key_source(v, tile), out, lse, lists.block, lists.word, lists.count, union,
            *call.layout.arguments(), lists.count.shape[1], *strides_of(q, k, v), call.softmax_scale, HQ=num_heads,
            G=group_size, D=head_dim, DV=value_dim, N=n, BLOCK_SIZE=call.block_size, BLOCK_Q=lists.queries, ROWS=used,
            BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_D=block_of(head_dim), BLOCK_DV=block_of(value_dim), LIMIT_4=LIMIT_4,
            TMA=tile.tma, STAGES=tile.stages,
            **tile.launch_options(),
        )  # fmt: skip
        wait()
        if gathered is not None and union is not None:
            gather_forward(q, k, v, n, call, union, *gathered, out, lse)


def new_gathered(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call, order: Tensor | None
) -> tuple[InverseIndex, Chunks]:
    """Memory for the inverse index of :func:`gather_forward` and its chunks; the order goes to ``order``."""
    slots = block_indices.shape[-1] * (
        call.block_size // min(call.tiles("selected_gather_fwd").keys, call.block_size)
    )
    segments = call.num_segments(q.shape[0], slots, q.shape[1] * v.shape[2] * q.element_size())
    where = (call.layout, call.block_size, k.shape[0], segments, order)
    index = new_index(block_indices, *where, with_far=True)
    check_slots(index, q.shape[1], slots)
    return index, index.new_chunks(segments, FORWARD_CHUNK)


def check_slots(index: InverseIndex, num_heads: int, slots: int) -> None:
    """The rows of slots of a segment can be numbered."""
    count = index.segment_rows * num_heads * slots
    check_numbers("selected_attention", "q", count, "rows of slots in a segment of queries")


def fill_index(
    index: InverseIndex,
    *chunks: Chunks | None,
    block_indices: Tensor,
    call: Call,
    sort: bool = True,
) -> None:
    """Make an inverse index and its chunks: of the choice alone."""
    ranked = index.fill(block_indices, call.layout, call.block_size, unique=call.unique, sort=sort)
    for some in chunks:
        if some is not None:
            some.fill(ranked)


def gather_forward(
    q: Tensor, k: Tensor, v: Tensor, n: int, call: Call, union: Tensor, index: InverseIndex, chunks: Chunks, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """The gathered algorithm's share of :func:`selected_forward`, where choices scatter.

    It merges what comes of blocks that are not near into ``out`` and ``lse``.
    """
    num_q, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    group_size = num_heads // num_kv_heads
    tile = call.tiles("selected_gather_fwd")
    keys = min(tile.keys, call.block_size)
    parts = call.block_size // keys
    part = torch.empty(
        chunks.segment_rows * num_heads * n * parts, value_dim, dtype=q.dtype, device=q.device
    )
    lse_part = torch.empty(part.shape[0], dtype=torch.float32, device=q.device)
    sizes = {
        "HQ": num_heads,
        "G": group_size,
        "DV": value_dim,
        "N": n,
        "BLOCK_DV": block_of(value_dim),
        "LIMIT_4": LIMIT_4,
    }
    for segment in range(chunks.segments):
        selected_gather_fwd_kernel[(chunks.limit, parts)](
            q, k, v, part, lse_part, union, *chunks.arguments(), *call.layout.arguments(), index.num_blocks, segment,
            chunks.segment_rows, chunks.size, *strides_of(q, k, v), call.softmax_scale, D=head_dim, BLOCK_D=block_of(head_dim),
            BLOCK_SIZE=call.block_size, BLOCK_M=tile.rows, BLOCK_N=keys,
            **sizes, num_stages=tile.stages, **tile.launch_options(),
        )  # fmt: skip
        selected_merge_out_kernel[(-(-chunks.segment_rows * num_heads // (MERGE_ROWS * MERGE_STEPS)),)](
            part, lse_part, index.far, out, lse, union, num_q, segment, chunks.segment_rows, index.none, PARTS=parts,
            BLOCK_M=MERGE_ROWS, STEPS=MERGE_STEPS, BLOCK_S=slots_of_step(n * parts, block_of(value_dim)), **sizes,
            num_warps=MERGE_WARPS,
        )  # fmt: skip


def selected_backward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, dout: Tensor, call: Call, results: ForwardResults,
    grads: tuple[Tensor, Tensor, Tensor], gated: Gated,
) -> None:  # fmt: skip
    """Fill ``grads``: dq, dk, dv in the shapes of q, k, v, contiguous; ``results`` are the forward's.

    With gates dout is the gradient of the branches' gated sum.
    """
    num_q, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    group_size, n = num_heads // num_kv_heads, block_indices.shape[-1]
    out, lse, union = results.out, results.lse, results.union
    dq, dk, dv = grads
    if num_q == 0 or n == 0:
        for grad in grads[1:] if gated.adds else grads:
            grad.zero_()
        return
    delta = torch.empty_like(lse)
    gated_lse = None if gated.gates is None else torch.empty_like(lse)
    tile, used = tile_of(call.tiles("selected_attention_dq"), group_size, call.block_size)
    tile, counted = fitting(tile, k, v), union is not None
    index, chunks, chunks_with_dq = new_backward_index(q, k, block_indices, call, results)
    with fork_join(q.device) as streams:
        with streams.on_side():
            sort = results.order is None
            fill_index(
                index, chunks, chunks_with_dq, block_indices=block_indices, call=call, sort=sort
            )
        wait = streams.record()
        lists = make_lists(
            block_indices, call.layout, group_size, call.block_size, used, union, counted=counted
        )
        selected_dq_kernel[(lists.count.shape[1], num_kv_heads)](
            q, key_source(k, tile), key_source(v, tile), out, dout, lse, delta, dq, gated.gates, gated.dgates, gated_lse,
            lists.block, lists.word, lists.count, union, *call.layout.arguments(), lists.count.shape[1],
            *strides_of(q, k, v, dout), call.softmax_scale, HQ=num_heads, G=group_size, D=head_dim, DV=value_dim, N=n,
            BLOCK_SIZE=call.block_size, BLOCK_Q=lists.queries, ROWS=used, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
            BLOCK_D=block_of(head_dim), BLOCK_DV=block_of(value_dim), ADD=gated.adds, LIMIT_4=LIMIT_4, TMA=tile.tma,
            STAGES=tile.stages,
            **tile.launch_options(),
        )  # fmt: skip
        if union is not None:
            # Masks of columns take registers.
            limit = {} if value_dim == block_of(value_dim) else {"maxnreg": MOST_REGISTERS}
            selected_delta_kernel[(DELTA_PROGRAMS,)](
                out, dout, lse, delta, gated.gates, gated.dgates, gated_lse, union, call.layout.cu_q, call.layout.len_q,
                call.layout.num_sequences, *strides_of(dout), HQ=num_heads, DV=value_dim, N=n, BLOCK_R=DELTA_ROWS,
                BLOCK_DV=block_of(value_dim), LIMIT_4=LIMIT_4, num_warps=4, **limit,
            )  # fmt: skip
        wait()
        inputs = (q, k, v, dout, lse if gated_lse is None else gated_lse, delta)
        # The device runs one of both ways, which share their sums; the other's kernels leave at
        # once, beside it.
        most = max(chunks.limit, 0 if chunks_with_dq is None else chunks_with_dq.limit)
        check_numbers(
            "selected_attention", "k", most * call.block_size, "rows of sums of dK and dV"
        )
        partial = [_sums(q, most * call.block_size, size) for size in (head_dim, value_dim)]
        if chunks_with_dq is not None:
            streams.fork()
            with streams.on_side():
                _gather_gradients(
                    inputs, (dk, dv), partial, index, chunks_with_dq, call, union, dq, gated.adds
                )
        _gather_gradients(inputs, (dk, dv), partial, index, chunks, call, union, None, gated.adds)


def new_backward_index(
    q: Tensor, k: Tensor, block_indices: Tensor, call: Call, results: ForwardResults
) -> tuple[InverseIndex, Chunks, Chunks | None]:
    """Memory for the inverse index of the backward and its chunks without dQ and, with a union, with dQ."""
    n, segments = block_indices.shape[-1], 1
    if results.union is not None:
        slots = n * (
            call.block_size // min(call.tiles("selected_gather_dkv").keys, call.block_size)
        )
        segments = call.num_segments(q.shape[0], slots, q.shape[1] * q.shape[2] * q.element_size())
    where = (call.layout, call.block_size, k.shape[0], segments, results.order)
    index = new_index(block_indices, *where)
    chunks = index.new_chunks(1, chunk_size(block_indices.numel()))
    if results.union is None:
        return index, chunks, None
    check_slots(index, q.shape[1], slots)
    size = DQ_CHUNK if call.layout.len_k <= LONG else BACKWARD_CHUNK
    return index, chunks, index.new_chunks(segments, size)


def _gather_gradients(
    inputs: tuple[Tensor, ...], grads: tuple[Tensor, Tensor], partial: list[Tensor], index: InverseIndex, chunks: Chunks,
    call: Call, union: Tensor | None, dq: Tensor | None, add: bool,
) -> None:  # fmt: skip
    """Fill dk and dv and, if it is given, dq; with ``union`` only where choices scatter (dq) or do not (no dq)."""
    q, k, v, dout, *_ = inputs
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, value_dim = v.shape[1:]
    n, with_dq, last = index.key.shape[-1], dq is not None, chunks.segments - 1
    tile = call.tiles("selected_gather_dkv" if with_dq else "selected_attention_dkv")
    keys = min(tile.keys, call.block_size)
    parts = call.block_size // keys
    part = None
    if with_dq:
        part = torch.empty(
            chunks.segment_rows * num_heads * n * parts, head_dim, dtype=q.dtype, device=q.device
        )
    sums = [
        _sums(q, k.shape[0] * num_kv_heads, size) if last else None
        for size in (head_dim, value_dim)
    ]
    block_k = min(call.block_size, 16)
    chunks_of_step = max(1, SUMMED // (block_k * block_of(head_dim)))
    # Masks of columns take registers.
    reducing_warps = 4 if (head_dim, value_dim) == (block_of(head_dim), block_of(value_dim)) else 8
    sizes: dict[str, Any] = {
        "D": head_dim,
        "N": n,
        "BLOCK_D": block_of(head_dim),
        "LIMIT_4": LIMIT_4,
    }
    both = {
        **sizes,
        "DV": value_dim,
        "BLOCK_DV": block_of(value_dim),
        "BLOCK_SIZE": call.block_size,
        "DQ": with_dq,
    }
    groups = {"HQ": num_heads, "G": num_heads // num_kv_heads}
    small = block_of(head_dim) + block_of(value_dim) <= 128
    # Large heads leave no registers for entries ahead of their rows, but a deep pipeline is none
    # without. Small heads without dQ are faster with the loop split: 0.98 ms against 1.07 (seed
    # shape, 32 sequences of 2,048 tokens, H200).
    loop = {
        "AHEAD": small or tile.stages > 2,
        "STAGES": tile.stages if small and not with_dq else None,
    }
    for segment in range(chunks.segments):
        selected_gather_bwd_kernel[(chunks.limit, parts)](
            *inputs, part, *partial, *sums, *grads, union, *chunks.arguments(), *call.layout.arguments(), index.num_blocks,
            segment, chunks.segment_rows, chunks.size, last, *strides_of(q, k, v, dout), call.softmax_scale,
            BLOCK_M=tile.rows, BLOCK_N=keys, KEYS_AS_ROWS=tile.keys_as_rows, **loop,
            **groups, **both, num_stages=tile.stages, **tile.launch_options(),
        )  # fmt: skip
        selected_reduce_kernel[(index.num_blocks, num_kv_heads, call.block_size // block_k)](
            *partial, *sums, *grads, union, chunks.begin, chunks.length, chunks.start, call.layout.cu_k, call.layout.len_k,
            call.layout.num_sequences, index.num_blocks, segment, last, call.softmax_scale, HKV=num_kv_heads,
            BLOCK_K=block_k, BLOCK_C=chunks_of_step, **both, num_warps=reducing_warps,
        )  # fmt: skip
        if with_dq:
            selected_merge_dq_kernel[(-(-chunks.segment_rows * num_heads // (MERGE_ROWS * MERGE_STEPS)),)](
                part, index.key, dq, union, q.shape[0], segment, chunks.segment_rows, index.none, PARTS=parts,
                BLOCK_M=MERGE_ROWS, STEPS=MERGE_STEPS, BLOCK_S=slots_of_step(n * parts, block_of(head_dim)), ADD=add, **groups,
                **sizes, num_warps=MERGE_WARPS,
            )  # fmt: skip


def _sums(like: Tensor, rows: int, size: int) -> Tensor:
    return torch.empty(rows, size, dtype=torch.float32, device=like.device)
