"""Launchers of range attention; see ``range_attention.py``. No autograd, no checks of user input.

What outlives a launcher is made before it: the caller decides on which stream
(``nsa/ops/_side_stream.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops._range import KeyRange, RangeInputs, RangeResults
from nsa.ops._triton.layout import Gated, Heads, block_of
from nsa.ops._triton.range_attention import range_fwd_kernel
from nsa.ops._triton.range_attention_bwd import (
    range_dkv_kernel,
    range_dq_kernel,
    range_reduce_kernel,
)
from nsa.ops._triton.sizes import cdiv
from nsa.ops._triton.tuning import LONG_KEYS, MOST_REGISTERS, Tile

# Chunks of queries that the work on one block of keys is cut into: most of them, queries of the
# smallest, and programs to aim at.
MAX_CHUNKS = 40
MIN_CHUNK_ROWS = 512
TARGET_PROGRAMS = 10_240


def tile_name(operator: str, kind: str, keys: KeyRange) -> str:
    """Name of a kernel in the tables of tiles; with very many keys it has a tile of its own."""
    many = not keys.window and keys.len_key >= LONG_KEYS
    return f"{operator}_{kind}{'_long' if many else ''}"


def reduction_options(keys: int, head_dim: int, value_dim: int) -> dict[str, int]:
    """Launch options of a kernel that sums dK and dV of so many keys.

    64 registers of a thread hold the sums.
    """
    warps = min(max(keys * block_of(max(head_dim, value_dim)) // 1024, 4), 16)
    return {"num_warps": warps, "maxnreg": min(MOST_REGISTERS, 2048 // warps)}


def fitting(tile: Tile, *sources: Tensor) -> Tile:
    """The tile; without descriptors where tensors do not lie in steps of 16 bytes, as they need."""
    steps = [x.data_ptr() for x in sources] + [
        stride * x.element_size() for x in sources for stride in x.stride()[:-1]
    ]
    aligned = all(step > 0 and step % 16 == 0 for step in steps)
    return tile if aligned or not tile.tma else tile._replace(tma=False)


def source(x: Tensor, rows: int, tile: Tile) -> Tensor | TensorDescriptor:
    """``x [N, H, D]`` as a kernel loads ``rows`` rows of one head: by pointers or a descriptor."""
    if not tile.tma:
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 1, block_of(x.shape[-1])])


def range_forward(
    inputs: RangeInputs,
    out: Tensor,
    lse: Tensor,
    keys: KeyRange,
    softmax_scale: float,
    tile: Tile,
) -> None:
    """Fill out ``[T, Hq, Dv]`` and lse fp32 ``[Hq, T]``."""
    q, k, v = inputs
    num_q, heads = q.shape[0], Heads.of(q, v)
    where = keys.sequences
    num_tiles = where.num_tiles(num_q * heads.G, tile.rows, where.len_q * heads.G)
    tile = fitting(tile, k, v)
    if num_q and not k.shape[0]:
        out.zero_()
        lse.fill_(-torch.inf)
    elif num_q:
        range_fwd_kernel[(num_tiles, k.shape[1])](
            q,
            source(k, tile.keys, tile),
            source(v, tile.keys, tile),
            out,
            lse,
            *keys.arguments(),
            num_q,
            **constants_of(inputs, keys, softmax_scale),
            TILE=tile,
            **tile.launch_options(),
        )


def constants_of(inputs: RangeInputs, keys: KeyRange, softmax_scale: float) -> dict[str, Any]:
    """What stays the same from call to call of every kernel, besides its tile."""
    q, k, v = inputs
    return {
        "stride_q": q.stride(),
        "stride_k": k.stride(),
        "stride_v": v.stride(),
        "softmax_scale": softmax_scale,
        "size": keys.size,
        "stride": keys.stride,
        "HEADS": Heads.of(q, v),
        "WINDOW": keys.window,
    }


@dataclass(frozen=True)
class RangeBackward:
    """What the kernels of a backward pass read, and what that of dQ leaves for that of dK and dV.

    Attributes:
        name: of the operator.
        inputs: of the forward.
        results: of the forward, with lse as ``[Hq, T]``.
        dout: gradient of out; with gates that of the branches' gated sum.
        dq: gradient of q, contiguous.
        keys: which keys a query sees.
        softmax_scale: factor on the scores.
        gated: the branch's part in the gated sum.
        delta: fp32 ``[Hq, T]``: row sums of out * dout.
        gated_lse: with gates, lse of the gated branch, which the kernel of dQ writes; otherwise
            that of the forward.
    """

    name: str
    inputs: RangeInputs
    results: RangeResults
    dout: Tensor
    dq: Tensor
    keys: KeyRange
    softmax_scale: float
    gated: Gated
    delta: Tensor
    gated_lse: Tensor

    @classmethod
    def new(
        cls,
        name: str,
        inputs: RangeInputs,
        results: RangeResults,
        dout: Tensor,
        dq: Tensor,
        keys: KeyRange,
        softmax_scale: float,
        gated: Gated,
    ) -> RangeBackward:
        """With memory for what the kernel of dQ leaves."""
        lse = results.lse
        made = (torch.empty_like(lse), lse if gated.gates is None else torch.empty_like(lse))
        return cls(name, inputs, results, dout, dq, keys, softmax_scale, gated, *made)

    def tile_name(self, kind: str) -> str:
        """Of one of its kernels, in the tables of tiles."""
        return tile_name(self.name, kind, self.keys)

    @property
    def constants(self) -> dict[str, Any]:
        """What stays the same from call to call of both kernels, besides their tile."""
        constants = constants_of(self.inputs, self.keys, self.softmax_scale)
        return {**constants, "stride_do": self.dout.stride()}


def range_dq(backward: RangeBackward, tile: Tile) -> None:
    """First half of the backward: dq and, for the second half, delta and the gated lse."""
    q, k, v = backward.inputs
    keys, gated = backward.keys, backward.gated
    num_q, num_kv_heads = q.shape[0], v.shape[1]
    group_size = q.shape[1] // num_kv_heads
    if num_q == 0 or k.shape[0] == 0:
        if not gated.adds:
            backward.dq.zero_()
        return
    tile, where = fitting(tile, k, v), keys.sequences
    num_tiles = where.num_tiles(num_q * group_size, tile.rows, where.len_q * group_size)
    range_dq_kernel[(num_tiles, num_kv_heads)](
        q,
        source(k, tile.keys, tile),
        source(v, tile.keys, tile),
        backward.results.out,
        backward.dout,
        backward.results.lse,
        backward.delta,
        backward.dq,
        gated.pointers(backward.gated_lse),
        *keys.arguments(),
        num_q,
        **backward.constants,
        TILE=tile,
        ADD=gated.adds,
        **tile.launch_options(),
    )


def range_dkv(backward: RangeBackward, tile: Tile) -> tuple[Tensor, Tensor]:
    """Second half of the backward, after dQ: dk, dv in the shapes of k, v, contiguous."""
    q, k, v = backward.inputs
    keys, dout, len_q = backward.keys, backward.dout, backward.keys.sequences.len_q
    num_q, num_key, num_kv_heads = q.shape[0], k.shape[0], k.shape[1]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    num_blocks = keys.sequences.num_tiles(num_key, tile.keys, keys.len_key)
    if not keys.window or num_q == 0:
        # Rows that no block owns are not visited.
        dk.zero_()
        dv.zero_()
    if num_q == 0 or num_blocks == 0:
        return dk, dv
    most = min(len_q, keys.size) if keys.window else len_q
    num_chunks, chunk_rows = chunks_of(
        len_q, most, keys.window, num_blocks * num_kv_heads, tile.rows
    )
    partial = num_chunks > 1
    dk_sum, dv_sum = dk, dv
    if partial:
        dk_sum = torch.empty(num_chunks, *k.shape, dtype=torch.float32, device=k.device)
        dv_sum = torch.empty(num_chunks, *v.shape, dtype=torch.float32, device=v.device)
    tile = fitting(tile, q, dout)
    if q.shape[1] == num_kv_heads and tile.max_registers is not None:
        # Addresses that rise evenly are kept in registers: none are left for pipelined edges.
        tile = tile._replace(edge_stages=1)
    constants = backward.constants
    range_dkv_kernel[(num_blocks, num_kv_heads, num_chunks)](
        source(q, tile.rows, tile),
        k,
        v,
        source(dout, tile.rows, tile),
        backward.gated_lse,
        backward.delta,
        dk_sum,
        dv_sum,
        *keys.arguments(),
        num_q,
        chunk_rows,
        num_key,
        **constants,
        TILE=tile,
        **tile.launch_options(),
    )
    if partial:
        range_reduce_kernel[(num_blocks, num_kv_heads, 2)](
            *(dk_sum, dv_sum, dk, dv),
            *keys.arguments(),
            *(chunk_rows, num_key, keys.size, keys.stride),
            HEADS=constants["HEADS"],
            BLOCK_N=tile.keys,
            WINDOW=keys.window,
            **reduction_options(tile.keys, k.shape[2], v.shape[2]),
        )
    return dk, dv


def chunks_of(len_q: int, most: int, window: bool, num_programs: int, rows: int) -> tuple[int, int]:
    """Chunks that the queries of a key block are cut into, and queries of a chunk.

    They follow from shapes alone, so that sums never change order.

    Args:
        len_q: queries of the longest sequence.
        most: at most so many of them see a key.
        window: whether keys are tokens of a window.
        num_programs: programs of one chunk.
        rows: queries of a tile; chunks are of whole tiles, or every one would have a masked one
            more.
    """
    num_chunks = max(
        1, min(cdiv(most, MIN_CHUNK_ROWS), MAX_CHUNKS, TARGET_PROGRAMS // max(num_programs, 1))
    )
    if num_chunks == 1 or (window and most <= 2 * MIN_CHUNK_ROWS):
        return 1, len_q
    chunk_rows = cdiv(cdiv(len_q, num_chunks), rows) * rows
    return cdiv(len_q, chunk_rows), chunk_rows
