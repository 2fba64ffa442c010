"""Launchers of the kernels of the selected branch. No autograd; only index limits are checked.

Tensors that outlive a launcher are allocated before it, and tensors that both of its streams use
are allocated before the fork (``nsa/ops/_side_stream.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops._checks import check_keys, check_numbers, check_queries
from nsa.ops._layout import MAX_QUERIES, Gated, Heads, block_of, cdiv, next_power_of_2, rows
from nsa.ops._operator import Call
from nsa.ops._plan import once
from nsa.ops._side_stream import fork_join
from nsa.ops._triton.kernel import Launch, fitting, source
from nsa.ops._triton.selected_index import (
    Chunks,
    InverseIndex,
    Lists,
    SelectedBlocks,
    chunk_size,
    is_always_tiled,
    make_lists,
    new_index,
)
from nsa.ops._triton.tuning import MOST_REGISTERS, Tile, scatter_of, tile_for
from nsa.ops.selected.gathered import selected_gather_fwd_kernel, selected_merge_out_kernel
from nsa.ops.selected.gathered_bwd import (
    selected_gather_bwd_kernel,
    selected_merge_dq_kernel,
    selected_reduce_kernel,
)
from nsa.ops.selected.tiled import selected_delta_kernel, selected_dq_kernel, selected_fwd_kernel
from nsa.ops.selected.types import SelectedInputs, SelectedResults

# Average number of partial results per query head that are kept at once.
MAX_PARTIALS_PER_HEAD = 4
# Partial results with fewer bytes than this are kept in one segment.
SMALL = 1 << 26
# Selections per chunk: in the forward, in the backward with dQ, and in that if no sequence has more
# than ``LONG`` tokens. Without dQ see ``chunk_size``.
FORWARD_CHUNK, BACKWARD_CHUNK, DQ_CHUNK = 256, 1024, 512
LONG = 16_384
# Rows (queries by heads) per step of delta, and number of programs.
DELTA_ROWS, DELTA_PROGRAMS = 32, 1024
# Elements of the partial results of a query head per step of a merge.
MERGED = 1024
# Elements of the chunks' dK per step of their sum.
SUMMED = 4096
# Rows (queries by heads) per step of a merge, steps per program, and warps.
MERGE_ROWS = 2
MERGE_STEPS = 8
MERGE_WARPS = 1


def scatter_for(kernel: str, inputs: SelectedInputs) -> float:
    """Multiple of n that lists exceed on average if selections scatter, for forward or dQ."""
    q, _, v, _ = inputs
    index = q.device.index if q.is_cuda else None
    return scatter_of(kernel, max(q.shape[-1], v.shape[-1]), q.element_size(), index)


def num_segments(num_rows: int, slots: int, row_bytes: int) -> int:
    """Number of segments of the gathered algorithm, by shapes alone for a fixed summation order.

    The partial results need at most ``MAX_PARTIALS_PER_HEAD * row_bytes`` per query (6 KiB for 12
    heads of 64 two-byte elements), or ``SMALL`` in total.

    Args:
        num_rows: number of queries.
        slots: partial results per query head.
        row_bytes: bytes of one partial result over all query heads.
    """
    least = max(-(-slots // MAX_PARTIALS_PER_HEAD), 1)
    return max(1, min(num_rows, least, -(-num_rows * slots * row_bytes // SMALL)))


def tile_named(kernel: str, inputs: SelectedInputs, call: Call) -> Tile:
    """Tile of a kernel whose steps are whole blocks or parts of one block."""
    tile = tile_for(kernel, inputs.q, inputs.v)
    return tile._replace(keys=min(tile.keys, call.config.block_size))


def tile_of(tile: Tile, group_size: int, block_size: int) -> tuple[Tile, int]:
    """Adapt a tile's rows and keys to group and block size; also return its number of used rows.

    Tiles consist of whole queries, unless that would leave more than an eighth of the rows unused.
    """
    most = max(next_power_of_2(MAX_QUERIES * group_size), 16)
    used = min(tile.rows, most)
    if used < tile.rows:  # the register limit was measured with all rows
        warps = max(1, tile.warps * used // tile.rows)
        tile = tile._replace(rows=used, warps=warps, max_registers=MOST_REGISTERS)
    whole = min(used // group_size, MAX_QUERIES) * group_size
    tile = tile._replace(keys=min(tile.keys, block_size))
    return tile, whole if 8 * (used - whole) <= used else used


def constants_of(inputs: SelectedInputs, call: Call, dout: Tensor | None = None) -> dict[str, Any]:
    """Strides, scale and sizes as kernel constants; with ``dout`` those of the backward."""
    q, k, v, block_indices = inputs
    strides = {"stride_q": q.stride(), "stride_k": k.stride(), "stride_v": v.stride()}
    if dout is not None:
        strides["stride_do"] = dout.stride()
    scatter = scatter_for(f"selected_attention_{'fwd' if dout is None else 'dq'}", inputs)
    n = block_indices.shape[-1]
    blocks = SelectedBlocks(n, call.config.block_size, scatter * n)
    sizes = {"HEADS": Heads.of(q, v), "BLOCKS": blocks}
    return {**strides, "softmax_scale": call.softmax_scale, **sizes}


def fitted(kernel: str, inputs: SelectedInputs, call: Call) -> tuple[Tile, int]:
    """Tile of a kernel of the tiled algorithm, and its number of used rows."""
    q, k, v, _ = inputs
    tile, used = tile_of(tile_for(kernel, q, v), q.shape[1] // k.shape[1], call.config.block_size)
    return fitting(tile, k, v), used


def over_lists(
    kernel: Any, lists: Lists, tile: Tile, used: int, constants: dict[str, Any], **more: Any
) -> Launch:
    """Launch of a kernel of the tiled algorithm with one program per list."""
    num_kv_heads, num_lists, list_len = lists.block.shape
    constants = {**constants, **more, "TILE": tile, "ROWS": used, "LIST_LEN": list_len}
    return Launch(kernel, (num_lists, num_kv_heads), **constants, **tile.launch_options())


def merge_launch(
    kernel: Any,
    chunks: Chunks,
    constants: dict[str, Any],
    slots: int,
    parts: int,
    size: int,
    **more: Any,
) -> Launch:
    """Launch of a kernel that merges the partial results of a segment.

    Args:
        kernel: the kernel.
        chunks: chunks of the segment.
        constants: see :func:`constants_of`.
        slots: partial results per row.
        parts: parts of a block.
        size: elements of a partial result.
        more: further constants.
    """
    heads = constants["HEADS"]
    return Launch(
        kernel,
        (cdiv(chunks.segment_rows * heads.HQ, MERGE_ROWS * MERGE_STEPS),),
        HEADS=heads,
        BLOCKS=constants["BLOCKS"],
        PARTS=parts,
        BLOCK_M=MERGE_ROWS,
        BLOCK_S=max(1, min(next_power_of_2(slots), MERGED // block_of(size))),
        STEPS=MERGE_STEPS,
        num_warps=MERGE_WARPS,
        **more,
    )


def selected_forward(
    inputs: SelectedInputs, call: Call, results: SelectedResults, *, unique: bool = False
) -> None:
    """Write the results; ``unique`` tells whether no query selects a block twice."""
    q, k, v, block_indices = inputs = inputs.read()
    counted = "selections (tokens times KV heads times slots)"
    check_queries(q)
    check_keys("k", k)
    check_numbers("block_indices", block_indices.numel(), counted)
    if block_indices.numel() == 0:
        results.out.zero_()
        results.lse.fill_(-torch.inf)
        return
    tile_stats = None if is_always_tiled(q, block_indices, call) else results.tile_stats
    if tile_stats is None:
        results.order.zero_()
    tile, used = once(lambda: fitted("selected_attention_fwd", inputs, call))
    counter = None if call.algorithm == "gathered" else tile_stats
    gathered = None if tile_stats is None else new_gathered(inputs, call, results.order)
    with fork_join(q.device, enabled=gathered is not None) as streams:
        if gathered is not None:
            with streams.on_side():
                fill_index(*gathered, inputs=inputs, call=call, unique=unique)
        wait = streams.record()
        sizes = (q.shape[1] // k.shape[1], call.config.block_size, used)
        lists = make_lists(block_indices, call.sequences, *sizes, counter)
        launch = once(
            lambda: over_lists(selected_fwd_kernel, lists, tile, used, constants_of(inputs, call))
        )
        launch(
            q,
            source(k, tile.keys, tile),
            source(v, tile.keys, tile),
            results.out,
            results.lse,
            tuple(lists),
            tile_stats,
            *call.sequences.arguments(),
            lists.block.shape[1],
        )
        wait()
        if gathered is not None:
            gather_forward(inputs, call, results, *gathered)


def new_gathered(inputs: SelectedInputs, call: Call, order: Tensor) -> tuple[InverseIndex, Chunks]:
    """Allocate the inverse index of :func:`gather_forward` and its chunks; see ``new_index``."""
    q, k, v, block_indices = inputs
    parts = call.config.block_size // tile_named("selected_gather_fwd", inputs, call).keys
    slots = block_indices.shape[-1] * parts
    segments = num_segments(q.shape[0], slots, q.shape[1] * v.shape[2] * q.element_size())
    where = (call.sequences, call.config.block_size, k.shape[0], segments, order)
    index = new_index(block_indices, *where, with_remote=True)
    check_slots(index, q.shape[1], slots)
    return index, index.new_chunks(segments, FORWARD_CHUNK)


def check_slots(index: InverseIndex, num_heads: int, slots: int) -> None:
    """Check that the partial results of a segment can be indexed."""
    count = index.segment_rows * num_heads * slots
    check_numbers("q", count, "partial results in a segment of queries")


def fill_index(
    index: InverseIndex,
    *chunks: Chunks | None,
    inputs: SelectedInputs,
    call: Call,
    unique: bool,
    sort: bool = True,
) -> None:
    """Fill an inverse index and its chunks; both depend only on the selection."""
    where = (inputs.block_indices, call.sequences, call.config.block_size)
    ranked = index.fill(*where, unique=unique, sort=sort)
    for some in chunks:
        if some is not None:
            some.fill(ranked)


def gather_forward(
    inputs: SelectedInputs,
    call: Call,
    results: SelectedResults,
    index: InverseIndex,
    chunks: Chunks,
) -> None:
    """Run the gathered part of :func:`selected_forward`, if selections scatter.

    It merges the partial results of remote blocks into the results.
    """
    q, k, v, block_indices = inputs

    def plan() -> tuple[int, Launch, Launch]:
        constants, n = constants_of(inputs, call), block_indices.shape[-1]
        tile = tile_named("selected_gather_fwd", inputs, call)
        parts = call.config.block_size // tile.keys
        options = {"TILE": tile, "num_stages": tile.stages, **tile.launch_options()}
        gather = Launch(selected_gather_fwd_kernel, (chunks.limit, parts), **constants, **options)
        merge = merge_launch(
            selected_merge_out_kernel, chunks, constants, n * parts, parts, v.shape[2]
        )
        return chunks.segment_rows * q.shape[1] * n * parts, gather, merge

    num_parts, gather, merge = once(plan)
    part = q.new_empty(num_parts, v.shape[2])
    lse_part = q.new_empty(num_parts, dtype=torch.float32)
    for segment in range(chunks.segments):
        gather(
            q,
            k,
            v,
            part,
            lse_part,
            results.tile_stats,
            chunks.pointers(),
            *call.sequences.arguments(),
            index.num_blocks,
            segment,
            chunks.segment_rows,
            chunks.size,
        )
        where = (q.shape[0], segment, chunks.segment_rows, index.absent)
        merge(*(part, lse_part, index.remote, results.out, results.lse, results.tile_stats), *where)


def selected_backward(
    inputs: SelectedInputs,
    call: Call,
    results: SelectedResults,
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    gated: Gated | None = None,
    *,
    unique: bool = False,
) -> None:
    """Run the backward.

    Args:
        inputs: inputs of the forward.
        call: non-tensor arguments of the forward.
        results: results of the forward.
        dout: gradient of out; with ``gated``, that of the gated sum of the branches.
        grads: outputs for dq, dk and dv, contiguous.
        gated: gates and gradients for the backward of the gated sum.
        unique: whether no query selects a block twice, as in results of
            :func:`nsa.select_blocks`.
    """
    inputs, dout, gated = inputs.read(), rows(dout), gated or Gated()
    (q, k, v, block_indices), (dq, *dkv) = inputs, grads
    if block_indices.numel() == 0:
        for grad in dkv if gated.adds else grads:
            grad.zero_()
        return
    tile_stats = None if is_always_tiled(q, block_indices, call) else results.tile_stats
    lse = results.lse if gated.gates is None else torch.empty_like(results.lse)
    # lse of the (gated) branch, and row sums of out * dout.
    read = (q, k, v, dout, lse, torch.empty_like(lse))
    index, chunks, chunks_with_dq = new_backward_index(
        inputs, call, None if tile_stats is None else results.order
    )
    with fork_join(q.device) as streams:
        with streams.on_side():
            made, sort = (index, chunks, chunks_with_dq), tile_stats is None
            fill_index(*made, inputs=inputs, call=call, unique=unique, sort=sort)
        wait = streams.record()
        _tiled_query_gradient(read, inputs, call, results, tile_stats, dq, gated)
        wait()
        # The device runs one of the two algorithms, which share buffers; the kernels of the other
        # one, launched at the same time, exit immediately.
        most = max(chunks.limit, 0 if chunks_with_dq is None else chunks_with_dq.limit)
        num_sums = most * call.config.block_size
        check_numbers("k", num_sums, "rows of sums of dK and dV")
        partial = (_sums(q, num_sums, q.shape[2]), _sums(q, num_sums, v.shape[2]))
        keys = (inputs, call, (dkv[0], dkv[1]), partial, index)
        if chunks_with_dq is not None:
            streams.fork()
            with streams.on_side():
                _gather_gradients(read, *keys, chunks_with_dq, tile_stats, dq, gated.adds)
        _gather_gradients(read, *keys, chunks, tile_stats, None, gated.adds)


def _tiled_query_gradient(
    read: tuple[Tensor, ...],
    inputs: SelectedInputs,
    call: Call,
    results: SelectedResults,
    tile_stats: Tensor | None,
    dq: Tensor,
    gated: Gated,
) -> None:
    """dq if the tiled algorithm runs; delta and the gated lse in any case."""

    def row_sums() -> Launch:
        constants = constants_of(inputs, call, dout)
        heads, blocks = constants["HEADS"], constants["BLOCKS"]
        # Column masks need registers.
        limit = {} if heads.DV == heads.BLOCK_DV else {"maxnreg": MOST_REGISTERS}
        sizes = {"HEADS": heads, "BLOCKS": blocks, "BLOCK_R": DELTA_ROWS, "num_warps": 4}
        strides = {"stride_do": dout.stride()}
        return Launch(selected_delta_kernel, (DELTA_PROGRAMS,), **strides, **sizes, **limit)

    q, k, v, dout, lse, delta = read
    where = call.sequences
    tile, used = once(lambda: fitted("selected_attention_dq", inputs, call))
    sizes = (q.shape[1] // k.shape[1], call.config.block_size, used)
    scatter = None
    if tile_stats is not None:
        scatter = once(lambda: scatter_for("selected_attention_dq", inputs))
    lists = make_lists(inputs.block_indices, where, *sizes, tile_stats, scatter)
    launch = once(
        lambda: over_lists(
            selected_dq_kernel, lists, tile, used, constants_of(inputs, call, dout), ADD=gated.adds
        )
    )
    statistics = (results.out, dout, results.lse, delta)
    launch(
        q,
        source(k, tile.keys, tile),
        source(v, tile.keys, tile),
        *statistics,
        dq,
        gated.pointers(lse),
        tuple(lists),
        tile_stats,
        *where.arguments(),
        lists.block.shape[1],
    )
    if tile_stats is not None:
        cu_q, _, len_q, _, num_sequences = where.arguments()
        numbers = (cu_q, len_q, num_sequences)
        once(row_sums)(*statistics, gated.pointers(lse), tile_stats, *numbers)


def new_backward_index(
    inputs: SelectedInputs, call: Call, order: Tensor | None
) -> tuple[InverseIndex, Chunks, Chunks | None]:
    """Allocate the inverse index of the backward and its chunks, without and with dQ.

    ``order`` is that of the forward, or None if the tiled algorithm runs regardless of the
    selection; then there are no chunks with dQ.
    """
    q, k, _, block_indices = inputs
    slots, segments = block_indices.shape[-1], 1
    if order is not None:
        keys = tile_named("selected_gather_dkv", inputs, call).keys
        slots *= call.config.block_size // keys
        segments = num_segments(q.shape[0], slots, q.shape[1] * q.shape[2] * q.element_size())
    where = (call.sequences, call.config.block_size, k.shape[0], segments, order)
    index = new_index(block_indices, *where)
    chunks = index.new_chunks(1, chunk_size(block_indices.numel()))
    if order is None:
        return index, chunks, None
    check_slots(index, q.shape[1], slots)
    size = DQ_CHUNK if call.sequences.len_k <= LONG else BACKWARD_CHUNK
    return index, chunks, index.new_chunks(segments, size)


def _gather_gradients(
    read: tuple[Tensor, ...],
    inputs: SelectedInputs,
    call: Call,
    grads: tuple[Tensor, Tensor],
    partial: tuple[Tensor, Tensor],
    index: InverseIndex,
    chunks: Chunks,
    tile_stats: Tensor | None,
    dq: Tensor | None,
    add: bool,
) -> None:
    """Write dk and dv and, if given, dq.

    With ``tile_stats`` only if selections scatter (with dq) or if they do not (without dq).
    """
    q, k, v, _ = inputs
    last = chunks.segments - 1
    plan = once(lambda: _plan_gather(inputs, call, chunks, read[3], dq is not None, add))
    num_parts, gather, reduce, merge = plan
    part: Tensor | None = None
    sums: tuple[Tensor, Tensor] | None = None
    if dq is not None:
        part = q.new_empty(num_parts, q.shape[2])
    if last:
        num_keys = k.shape[0] * k.shape[1]
        sums = (_sums(q, num_keys, k.shape[2]), _sums(q, num_keys, v.shape[2]))
    _, cu_k, _, len_k, num_sequences = call.sequences.arguments()
    for segment in range(chunks.segments):
        where = (index.num_blocks, segment, chunks.segment_rows, chunks.size, last)
        gather(
            *read,
            part,
            partial,
            sums,
            grads,
            tile_stats,
            chunks.pointers(),
            *call.sequences.arguments(),
            *where,
        )
        reduce(
            *(chunks.begin, chunks.length, chunks.start),
            *(partial, sums, grads, tile_stats),
            *(cu_k, len_k, num_sequences),
            *(chunks.num_blocks, segment, last),
        )
        if part is not None and dq is not None:
            rows_of = (q.shape[0], segment, chunks.segment_rows, index.absent)
            merge(*(part, index.key, dq, tile_stats), *rows_of)


def _plan_gather(
    inputs: SelectedInputs, call: Call, chunks: Chunks, dout: Tensor, with_dq: bool, add: bool
) -> tuple[int, Launch, Launch, Launch]:
    """Partial results of dQ per segment; kernels of the chunks, of their sum, of the merge."""
    constants, block_size = constants_of(inputs, call, dout), call.config.block_size
    heads, n = constants["HEADS"], inputs.block_indices.shape[-1]
    name = "selected_gather_dkv" if with_dq else "selected_attention_dkv"
    tile, block_k = tile_named(name, inputs, call), min(block_size, 16)
    parts = block_size // tile.keys
    options = {"TILE": tile, "num_stages": tile.stages, **tile.launch_options()}
    gather = Launch(selected_gather_bwd_kernel, (chunks.limit, parts), **constants, **options)
    reduce = Launch(
        selected_reduce_kernel,
        (chunks.num_blocks, heads.HQ // heads.G, block_size // block_k),
        softmax_scale=call.softmax_scale,
        HEADS=heads,
        BLOCKS=constants["BLOCKS"],
        BLOCK_K=block_k,
        BLOCK_C=max(1, SUMMED // (block_k * heads.BLOCK_D)),
        DQ=with_dq,
        # Column masks need registers.
        num_warps=4 if (heads.D, heads.DV) == (heads.BLOCK_D, heads.BLOCK_DV) else 8,
    )
    merge = merge_launch(
        selected_merge_dq_kernel, chunks, constants, n * parts, parts, heads.D, ADD=add
    )
    return chunks.segment_rows * heads.HQ * n * parts, gather, reduce, merge


def _sums(like: Tensor, rows: int, size: int) -> Tensor:
    return torch.empty(rows, size, dtype=torch.float32, device=like.device)
