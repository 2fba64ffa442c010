"""Launchers of the loss of an index head. No autograd; only index limits are checked."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa.ops._checks import check_keys, check_numbers, check_queries
from nsa.ops._layout import block_of, cdiv, next_power_of_2, rows
from nsa.ops._operator import Call
from nsa.ops._plan import once
from nsa.ops._triton.kernel import Launch
from nsa.ops._triton.selected_index import (
    Chunks,
    InverseIndex,
    SelectedBlocks,
    chunk_size,
    is_always_tiled,
    new_index,
)
from nsa.ops._triton.token_lse import token_lse
from nsa.ops._triton.tuning import MOST_REGISTERS, Tile, tile_for
from nsa.ops.index_loss.dense_kernels import index_loss_all_kernel, index_loss_dk_kernel
from nsa.ops.index_loss.kernels import (
    IndexSizes,
    index_loss_dq_kernel,
    index_loss_gather_dk_kernel,
    index_loss_kernel,
    index_loss_products_kernel,
    index_loss_reduce_dk_kernel,
)
from nsa.ops.index_loss.types import IndexLossInputs

# Most two-byte keys in one product, and their most bytes; rows (queries by index heads) of a tile
# of two-byte elements. These sizes are not timed. With them nothing spills up to head size 128 in
# two bytes with blocks of at most 64 tokens.
PRODUCT_KEYS = 64
PRODUCT_BYTES = 16 * 1024
TILE_ROWS = 64
# Elements of a tile of several index heads' queries, at most TILE_ROWS for each head.
TILE_QUERIES = 8192
# Most selections in a chunk of products.
PRODUCT_CHUNK = 512
# Elements of a tile of queries, heads and slots, and per warp; the most warps.
TILE_SLOTS, WARP_SLOTS, SLOT_WARPS = 512, 512, 8
# Elements of a tile of keys that several slots of index queries chose.
TILE_KEYS = 16_384


def sizes_of(inputs: IndexLossInputs, call: Call) -> IndexSizes:
    """Constants of all kernels."""
    q_idx, k_idx, q, k, block_indices = inputs[:5]
    block_size, element_size = call.config.block_size, q.element_size()
    group_size, index_heads = q.shape[1] // k.shape[1], q_idx.shape[1] // k_idx.shape[1]
    slots = 0 if block_indices is None else block_indices.shape[-1]
    columns = block_of(q.shape[2]), block_of(q_idx.shape[2])
    index_rows = next_power_of_2(index_heads)
    tile_rows = TILE_ROWS if block_size <= 64 else TILE_ROWS // 2
    most_rows = max(tile_rows, TILE_QUERIES // columns[1] if max(columns) <= 64 else 0)
    queries = min(tile_rows, most_rows // index_rows)
    queries = max(16, queries if element_size == 2 else 0)
    most = 2 * PRODUCT_KEYS // element_size
    keys = min(block_size, most, max(PRODUCT_BYTES // (max(columns) * element_size), 16))
    return IndexSizes(
        HKV=k.shape[1],
        G=group_size,
        HKI=k_idx.shape[1],
        IH=index_heads,
        D=q.shape[2],
        DI=q_idx.shape[2],
        BLOCK_D=columns[0],
        BLOCK_DI=columns[1],
        N=slots,
        BLOCK_SIZE=block_size,
        KEYS=keys,
        QUERIES=queries,
        BLOCK_G=next_power_of_2(group_size),
        BLOCK_IH=index_rows,
        BLOCK_N=next_power_of_2(max(slots, 1)),
    )


def constants_of(inputs: IndexLossInputs, call: Call) -> dict[str, Any]:
    """Strides, factors and sizes as kernel constants."""
    strides = zip(("q_idx", "k_idx", "q", "k"), inputs[:4], strict=True)
    sizes = sizes_of(inputs, call)
    return {
        **{f"stride_{name}": x.stride() for name, x in strides},
        "index_scale": inputs.q_idx.shape[2] ** -0.5,
        "softmax_scale": call.softmax_scale,
        "num_init": call.config.num_init_blocks,
        "num_local": call.config.num_local_blocks,
        "SIZES": sizes,
        **options_of(sizes, inputs.q.element_size()),
    }


def options_of(sizes: IndexSizes, element_size: int) -> dict[str, int]:
    """Launch options of the kernels, more warps for tiles that need many registers."""
    is_large = max(sizes.BLOCK_D, sizes.BLOCK_DI) > 128
    is_full = sizes.BLOCK_IH > 1 and sizes.QUERIES * sizes.BLOCK_IH * sizes.BLOCK_DI >= TILE_QUERIES
    if is_large or element_size > 2 or sizes.BLOCK_SIZE > 64:
        return {"num_warps": 8, "num_stages": 1 if is_large else 2, "maxnreg": MOST_REGISTERS}
    return {"num_warps": 8 if is_full else 4, "num_stages": 2}


def read(inputs: IndexLossInputs) -> IndexLossInputs:
    """Check that the kernels can number everything; return the inputs in the layout they read."""
    q_idx, k_idx, q, k, block_indices, *rest = inputs
    for x in (q_idx, q):
        check_queries(x)
    for name, x in (("k_idx", k_idx), ("k", k)):
        check_keys(name, x)
    check_numbers("k_idx", k_idx.shape[0] * k_idx.shape[1], "rows (tokens times heads)")
    if block_indices is not None:
        block_indices = block_indices.contiguous()
    return IndexLossInputs(rows(q_idx), rows(k_idx), rows(q), rows(k), block_indices, *rest)


def write_lse(
    q: Tensor, k: Tensor, lse: Tensor, scale: float, inputs: IndexLossInputs, call: Call
) -> None:
    """Write the log-sum-exp over the visible tokens, base 2, fp32 ``[H, T]``.

    For the index queries only tokens of forced blocks count.
    """

    def plan() -> Launch:
        sizes = sizes_of(inputs, call)
        return token_lse(
            q,
            k,
            scale,
            call.sequences,
            call.config,
            queries=sizes.QUERIES,
            keys=sizes.KEYS,
            forced=q is inputs.q_idx,
            natural=False,
            **options_of(sizes, q.element_size()),
        )

    once(plan)(q, k, lse, *call.sequences.arguments(), q.shape[0])


def over_queries(kernel: Any, inputs: IndexLossInputs, call: Call) -> Launch:
    """Launch of a kernel of the loss, with one program per tile of queries and KV head."""
    constants, sequences = constants_of(inputs, call), call.sequences
    queries = constants["SIZES"].QUERIES
    tiles = sequences.num_tiles(inputs.q.shape[0], queries, sequences.len_q)
    return Launch(kernel, (tiles, inputs.k.shape[1]), **constants)


def forward(
    inputs: IndexLossInputs, call: Call, loss: Tensor, counts: Tensor, state: list[Tensor]
) -> None:
    """Write loss and number of ranked blocks ``[T, Hkv]``, and ``state``, see ``new_state``."""
    inputs = read(inputs)
    q_idx, k_idx, q, k, block_indices = inputs[:5]
    lse_idx: Tensor | None = None
    if q_idx.shape[1] > k_idx.shape[1]:  # with one index head it cancels
        lse_idx = state[-1]
        write_lse(q_idx, k_idx, lse_idx, q_idx.shape[2] ** -0.5, inputs, call)
    numbers = (*call.sequences.arguments(), q.shape[0])
    if block_indices is not None:
        _selected_forward(inputs, call, (loss, counts), state, lse_idx)
        return
    write_lse(q, k, state[2], call.softmax_scale, inputs, call)
    launch = once(lambda: over_queries(index_loss_all_kernel, inputs, call))
    launch(q_idx, k_idx, q, k, state[2], lse_idx, loss, counts, *state[:2], *numbers)


def new_chunks(
    inputs: IndexLossInputs, call: Call, order: Tensor, ranked: Tensor, *, fill: bool
) -> tuple[InverseIndex, Chunks]:
    """Inverse index of the selected blocks and its chunks.

    With ``fill`` the selections are written to ``order``, unless the inputs have their order, and
    their key blocks to ``ranked``; without it the index has no key blocks by selection.
    """
    ids = inputs.block_indices
    assert ids is not None
    block_size, sequences = call.config.block_size, call.sequences
    is_sorted = inputs.order is not None and not is_always_tiled(inputs.q, ids, call)
    given = inputs.order if is_sorted else order
    index = new_index(ids, sequences, block_size, inputs.k.shape[0], 1, given)
    if fill:
        how = {"unique": inputs.lse is not None, "sort": not is_sorted}
        ranked.copy_(index.fill(ids, sequences, block_size, **how))
    size = chunk_size(ids.numel())
    chunks = index.new_chunks(1, min(size, PRODUCT_CHUNK) if fill else size)
    chunks.fill(ranked)
    return index, chunks


def over_chunks(
    kernel: Any, tile: Tile, inputs: IndexLossInputs, call: Call, chunks: Chunks, **constants: Any
) -> tuple[IndexSizes, Launch]:
    """Sizes and launch of a kernel with one program per chunk and part of its block."""
    block_size = call.config.block_size
    sizes = sizes_of(inputs, call)
    tile = tile._replace(max_registers=MOST_REGISTERS)  # limits are measured for other kernels
    sizes = sizes._replace(QUERIES=tile.rows, KEYS=min(tile.keys, block_size))
    blocks = SelectedBlocks(sizes.N, block_size, 0.0)
    options = {"num_stages": tile.stages, **tile.launch_options(), **constants}
    grid = (chunks.limit, block_size // sizes.KEYS)
    return sizes, Launch(kernel, grid, SIZES=sizes, BLOCKS=blocks, **options)


def _selected_forward(
    inputs: IndexLossInputs,
    call: Call,
    results: tuple[Tensor, Tensor],
    state: list[Tensor],
    lse_idx: Tensor | None,
) -> None:
    """Write results and state of the loss over selected blocks."""
    q_idx, k_idx, q, k, block_indices, lse, _ = inputs
    assert block_indices is not None
    check_numbers("block_indices", block_indices.numel(), "selections")
    slope, row, order, ranked = state[:4]
    index, chunks = new_chunks(inputs, call, order, ranked, fill=True)

    def plan() -> tuple[IndexSizes, Launch, Launch]:
        constants = constants_of(inputs, call)
        forced = {key: constants[key] for key in ("num_init", "num_local")}
        named = [key for key in constants if key.startswith("stride") or key.endswith("_scale")]
        products = {key: constants[key] for key in named} | forced
        products["SKIP"] = lse is not None
        tile = tile_for("selected_gather_fwd", q, q_idx)
        if q.element_size() == 2 and max(q.shape[2], q_idx.shape[2]) <= 64:
            tile = tile._replace(rows=2 * tile.rows)  # no output needs registers
        sizes, gather = over_chunks(
            index_loss_products_kernel, tile, inputs, call, chunks, **products
        )
        elements = max(sizes.BLOCK_G, sizes.BLOCK_IH) * sizes.BLOCK_N
        queries = max(1, TILE_SLOTS // elements)
        warps = max(1, min(SLOT_WARPS, queries * elements // WARP_SLOTS))
        tiles = call.sequences.num_tiles(q.shape[0], queries, call.sequences.len_q)
        of_loss = sizes._replace(QUERIES=queries)
        options = {"num_warps": warps, "maxnreg": MOST_REGISTERS, **forced}
        loss = Launch(index_loss_kernel, (tiles, sizes.HKV), SIZES=of_loss, **options)
        return sizes, gather, loss

    sizes, gather, loss = once(plan)
    parts = sizes.BLOCK_SIZE // sizes.KEYS
    mass = slope.new_empty(parts, block_indices.numel(), sizes.G)
    largest = slope.new_empty(parts, block_indices.numel(), sizes.IH)
    token = row.new_empty(largest.shape)
    numbers = (*call.sequences.arguments(), q.shape[0])
    where = (index.num_blocks, 0, chunks.segment_rows, chunks.size)
    gather(q_idx, k_idx, q, k, mass, largest, token, chunks.pointers(), *numbers, *where)
    made = (mass, largest, token, lse, lse_idx, *results, slope, row)
    loss(block_indices, index.key, *made, *numbers, index.absent)


def backward(
    inputs: IndexLossInputs, call: Call, dout: Tensor, state: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients of the index queries and keys.

    Args:
        inputs: inputs of the forward.
        call: its other arguments.
        dout: gradient of the sum of the losses, fp32 scalar.
        state: see ``new_state``.
    """
    inputs = read(inputs)
    q_idx, k_idx, _, _, block_indices = inputs[:5]
    (num_q, num_heads, index_dim), num_key_heads = q_idx.shape, k_idx.shape[1]
    dk = k_idx.new_zeros(k_idx.shape)
    if block_indices is None:
        shared = inputs.k.shape[1] // num_key_heads
        by_group = state[0].view(num_q, num_key_heads, shared, -1, index_dim)
        factor = dout * index_dim**-0.5
        dq = (by_group.sum(2) * factor).to(q_idx.dtype).view(q_idx.shape)
        _key_gradient(inputs, call, dout, state, dk)
        return dq, dk
    slope, row = state[:2]
    dq = q_idx.new_empty(q_idx.shape)

    def plan() -> Launch:
        columns = block_of(index_dim)
        step = min(16, next_power_of_2(slope.shape[2]))
        rows_of = max(1, TILE_KEYS // (step * columns))
        sizes = {"SLOTS": slope.shape[2], "DI": index_dim, "BLOCK_DI": columns}
        sizes |= {"BLOCK_R": rows_of, "BLOCK_S": step, "num_warps": 4}
        return Launch(index_loss_dq_kernel, (cdiv(num_q * num_heads, rows_of),), **sizes)

    keys = k_idx.contiguous()
    once(plan)(keys, slope, row, dout, dq, num_q * num_heads, float(index_dim**-0.5))
    _selected_key_gradient(inputs, call, dout, state, dk)
    return dq, dk


def _selected_key_gradient(
    inputs: IndexLossInputs,
    call: Call,
    dout: Tensor,
    state: list[Tensor],
    dk: Tensor,
) -> None:
    """Write the gradient of the index keys if selected blocks are attended to."""
    q_idx, k_idx = inputs[:2]
    slope, row, order, ranked = state[:4]
    index, chunks = new_chunks(inputs, call, order, ranked, fill=False)
    sequences, block_size, index_dim = call.sequences, call.config.block_size, k_idx.shape[2]

    def plan() -> tuple[Launch, Launch]:
        tile = tile_for("selected_gather_dkv", q_idx, k_idx)
        sizes, gather = over_chunks(
            index_loss_gather_dk_kernel,
            tile,
            inputs,
            call,
            chunks,
            stride_q_idx=q_idx.stride(),
            num_init=call.config.num_init_blocks,
            num_local=call.config.num_local_blocks,
        )
        grid = (index.num_blocks, sizes.HKI, cdiv(block_size, sizes.KEYS))
        scale = index_dim**-0.5
        return gather, Launch(index_loss_reduce_dk_kernel, grid, index_scale=scale, SIZES=sizes)

    gather, reduce = once(plan)
    part = slope.new_empty(chunks.limit, block_size, index_dim)
    where = (index.num_blocks, 0, chunks.segment_rows, chunks.size)
    gather(q_idx, slope, row, part, chunks.pointers(), *sequences.arguments(), *where)
    _, cu_k, _, len_k, num_sequences = sequences.arguments()
    reduce(part, chunks.start, dout, dk, cu_k, len_k, num_sequences, index.num_blocks)


def _key_gradient(
    inputs: IndexLossInputs, call: Call, dout: Tensor, state: list[Tensor], dk: Tensor
) -> None:
    """Write the gradient of the index keys if all blocks are attended to."""
    q_idx, k_idx, q, k = inputs[:4]
    _, norm, lse, *lse_idx = state

    def plan() -> Launch:
        block_size, sequences = call.config.block_size, call.sequences
        blocks = sequences.num_tiles(k.shape[0], block_size, sequences.len_k)
        constants = constants_of(inputs, call)
        return Launch(index_loss_dk_kernel, (blocks, k_idx.shape[1]), **constants)

    numbers = (*call.sequences.arguments(), q.shape[0])
    of_index = lse_idx[0] if lse_idx else None
    once(plan)(q_idx, k_idx, q, k, lse, of_index, norm, dout, dk, *numbers)
