"""Launchers of the range attention kernels (``kernels.py``). No autograd, no input validation.

Tensors that outlive a launcher are allocated before it, so that the caller chooses the stream
(``nsa/ops/_side_stream.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops._checks import check_keys, check_queries
from nsa.ops._layout import Gated, Heads, by_head, cdiv, rows
from nsa.ops._operator import KeyRange
from nsa.ops._plan import once
from nsa.ops._triton.kernel import Launch, fitting, source
from nsa.ops._triton.tuning import LONG_KEYS, MOST_REGISTERS, Tile, tile_for
from nsa.ops.range.kernels import (
    range_dkv_kernel,
    range_dq_kernel,
    range_fwd_kernel,
    range_reduce_kernel,
)
from nsa.ops.range.types import RangeInputs, RangeResults

# Split of the queries of one key block into chunks: maximum number of chunks, minimum number of
# queries per chunk, and target number of programs.
MAX_CHUNKS = 40
MIN_CHUNK_ROWS = 512
TARGET_PROGRAMS = 10_240


def tile_name(kind: str, keys: KeyRange) -> str:
    """Kernel name in the tile tables; very many keys have a separate tile."""
    return f"{keys.name}_{kind}{'_long' * (not keys.window and keys.len_key >= LONG_KEYS)}"


def range_forward(inputs: RangeInputs, keys: KeyRange, results: RangeResults) -> None:
    """Write the results; their lse is a view of ``[Hq, T]``."""
    check_queries(inputs.q)
    check_keys("k" if keys.window else "k_cmp", inputs.k, keys.stride)
    q, k, v = inputs = RangeInputs(*(rows(x) for x in inputs))
    out, lse = results.out, results.lse.t()

    def plan() -> tuple[Tile, Launch]:
        tile = fitting(tile_for(tile_name("fwd", keys), q, v), k, v)
        constants, grid = constants_of(inputs, keys), query_grid(inputs, keys, tile)
        return tile, Launch(range_fwd_kernel, grid, **constants, TILE=tile, **tile.launch_options())

    if q.shape[0] and not k.shape[0]:
        out.zero_()
        lse.fill_(-torch.inf)
    elif q.shape[0]:
        tile, launch = once(plan)
        launch(
            q,
            source(k, tile.keys, tile),
            source(v, tile.keys, tile),
            out,
            lse,
            *keys.arguments(),
            q.shape[0],
        )


def query_grid(inputs: RangeInputs, keys: KeyRange, tile: Tile) -> tuple[int, int]:
    """Number of programs: tiles of queries by query heads of a group, and KV heads."""
    q, _, v = inputs
    num_kv_heads, where = v.shape[1], keys.sequences
    group_size = q.shape[1] // num_kv_heads
    rows = q.shape[0] * group_size
    return where.num_tiles(rows, tile.rows, where.len_q * group_size), num_kv_heads


def constants_of(inputs: RangeInputs, keys: KeyRange) -> dict[str, Any]:
    """Constants common to all kernels, except the tile."""
    q, k, v = inputs
    return {
        "stride_q": q.stride(),
        "stride_k": k.stride(),
        "stride_v": v.stride(),
        "softmax_scale": keys.softmax_scale,
        "size": keys.size,
        "stride": keys.stride,
        "HEADS": Heads.of(q, v),
        "WINDOW": keys.window,
    }


class RangeBackward:
    """Backward pass in two halves: dQ, then dK and dV. Allocates everything except dk and dv.

    Args:
        inputs: inputs of the forward.
        results: results of the forward.
        dout: gradient of out; with ``gated``, that of the gated sum of the branches.
        dq: output for the gradient of q, contiguous.
        keys: keys visible to a query.
        gated: gates and gradients for the backward of the gated sum.
    """

    def __init__(
        self,
        inputs: RangeInputs,
        results: RangeResults,
        dout: Tensor,
        dq: Tensor,
        keys: KeyRange,
        gated: Gated | None = None,
    ) -> None:
        self.inputs, self.dout = RangeInputs(*(rows(x) for x in inputs)), rows(dout)
        self.out, self.lse = results.out, by_head(results.lse)
        self.dq, self.keys, self.gated = dq, keys, gated or Gated()
        # Row sums of out * dout, and with gates the lse of the gated branch, both written by the
        # first half for the second.
        self.delta, gates = torch.empty_like(self.lse), self.gated.gates
        self.gated_lse = self.lse if gates is None else torch.empty_like(self.lse)

    def constants(self) -> dict[str, Any]:
        """Constants common to both kernels, except the tile."""
        return {**constants_of(self.inputs, self.keys), "stride_do": self.dout.stride()}

    def query_gradient(self) -> None:
        """First half of the backward: dq and, for the second half, delta and the gated lse."""
        (q, k, v), keys, gated = self.inputs, self.keys, self.gated
        if q.shape[0] == 0 or k.shape[0] == 0:
            if not gated.adds:
                self.dq.zero_()
            return

        def plan() -> tuple[Tile, Launch]:
            tile = fitting(tile_for(tile_name("dq", keys), q, v), k, v)
            grid = query_grid(self.inputs, keys, tile)
            constants = {**self.constants(), "TILE": tile, "ADD": gated.adds}
            return tile, Launch(range_dq_kernel, grid, **constants, **tile.launch_options())

        tile, launch = once(plan)
        launch(
            q,
            source(k, tile.keys, tile),
            source(v, tile.keys, tile),
            self.out,
            self.dout,
            self.lse,
            self.delta,
            self.dq,
            gated.pointers(self.gated_lse),
            *keys.arguments(),
            q.shape[0],
        )

    def key_gradients(self) -> tuple[Tensor, Tensor]:
        """Second half of the backward, after dQ: dk and dv in the shapes of k and v, contiguous."""
        (q, k, v), keys = self.inputs, self.keys
        num_q = q.shape[0]
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        plan = once(lambda: plan_keys(self))
        if not keys.window or num_q == 0:
            # Rows that belong to no block are not visited.
            dk.zero_()
            dv.zero_()
        if num_q == 0 or plan.num_chunks == 0:
            return dk, dv
        statistics = (self.gated_lse, self.delta)
        plan.run(self.inputs, self.dout, statistics, keys.arguments(), (dk, dv), keys)
        return dk, dv


class KeyPlan(NamedTuple):
    """Plan of kernels that compute dK and dV, in chunks of queries.

    Attributes:
        tile: tile of the dK and dV kernel.
        num_chunks: chunks of queries; 0 if there is nothing to compute.
        chunk_rows: queries per chunk.
        launch: the dK and dV kernel.
        reduce: the kernel that sums several chunks.
    """

    tile: Tile
    num_chunks: int
    chunk_rows: int
    launch: Launch
    reduce: Launch

    def run(
        self,
        inputs: RangeInputs,
        dout: Tensor,
        statistics: tuple[Tensor, Tensor],
        where: tuple[Any, ...],
        grads: tuple[Tensor, Tensor],
        keys: KeyRange,
    ) -> None:
        """Launch the kernels, which write ``grads``, dk and dv.

        Args:
            inputs: queries, keys and values.
            dout: gradient of the output.
            statistics: further tensors that the dK and dV kernel reads.
            where: its arguments that locate the sequences.
            grads: contiguous outputs.
            keys: range of keys that tells which chunks have a sum.
        """
        (q, k, v), tile, sums = inputs, self.tile, grads
        if self.num_chunks > 1:
            dk, dv = (x.new_empty(self.num_chunks, *x.shape, dtype=torch.float32) for x in grads)
            sums = dk, dv
        read = source(q, tile.rows, tile), k, v, source(dout, tile.rows, tile), *statistics
        self.launch(*read, *sums, *where, q.shape[0], self.chunk_rows, k.shape[0])
        if self.num_chunks > 1:
            sizes = (self.chunk_rows, k.shape[0], keys.size, keys.stride)
            self.reduce(*sums, *grads, *keys.arguments(), *sizes)


def key_plan(
    kernel: Any,
    tile: Tile,
    grid: tuple[int, int],
    chunks: tuple[int, int],
    constants: dict[str, Any],
    window: bool,
) -> KeyPlan:
    """Plan of a kernel for blocks of keys by KV heads, with numbers as of :func:`chunks_of`."""
    heads, options = constants["HEADS"], tile.launch_options()
    launch = Launch(kernel, (*grid, chunks[0]), **constants, TILE=tile, **options)
    # The sums of dK or dV fit in 64 registers per thread.
    warps = min(max(tile.keys * max(heads.BLOCK_D, heads.BLOCK_DV) // 1024, 4), 16)
    reduce = Launch(
        range_reduce_kernel,
        (*grid, 2),
        HEADS=heads,
        BLOCK_N=tile.keys,
        WINDOW=window,
        num_warps=warps,
        maxnreg=min(MOST_REGISTERS, 2048 // warps),
    )
    return KeyPlan(tile, *chunks, launch, reduce)


def plan_keys(backward: RangeBackward) -> KeyPlan:
    """Plan the second half of the backward."""
    (q, k, v), keys, len_q = backward.inputs, backward.keys, backward.keys.sequences.len_q
    tile, num_kv_heads = tile_for(tile_name("dkv", keys), q, v), k.shape[1]
    num_blocks = keys.sequences.num_tiles(k.shape[0], tile.keys, keys.len_key)
    most = min(len_q, keys.size) if keys.window else len_q
    programs = num_blocks * num_kv_heads
    chunks = chunks_of(len_q, most, keys.window, programs, tile.rows) if programs else (0, 0)
    tile = fitting(tile, q, backward.dout)
    if q.shape[1] == num_kv_heads and tile.max_registers is not None:
        # Evenly spaced addresses are kept in registers, which leaves none for pipelined edges.
        tile = tile._replace(edge_stages=1)
    grid, constants = (num_blocks, num_kv_heads), backward.constants()
    return key_plan(range_dkv_kernel, tile, grid, chunks, constants, keys.window)


def chunks_of(len_q: int, most: int, window: bool, num_programs: int, rows: int) -> tuple[int, int]:
    """Number of chunks that the queries of a key block are split into, and queries per chunk.

    They depend only on shapes, so that the summation order never changes.

    Args:
        len_q: queries of the longest sequence.
        most: upper bound on the queries that see a key.
        window: whether keys are tokens of a window.
        num_programs: programs of one chunk.
        rows: queries of a tile; chunks consist of whole tiles, otherwise each would have one more
            masked tile.
    """
    num_chunks = max(
        1, min(cdiv(most, MIN_CHUNK_ROWS), MAX_CHUNKS, TARGET_PROGRAMS // max(num_programs, 1))
    )
    if num_chunks == 1 or (window and most <= 2 * MIN_CHUNK_ROWS):
        return 1, len_q
    chunk_rows = cdiv(cdiv(len_q, num_chunks), rows) * rows
    return cdiv(len_q, chunk_rows), chunk_rows
