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

from nsa.ops._triton.layout import Gated, Heads, Layout, block_of
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


@dataclass(frozen=True)
class RangeLayout:
    """Where sequences lie and which keys a query sees.

    Attributes:
        window: whether keys are tokens of a window; otherwise they are compressed blocks.
        cu_q, cu_k, num_sequences, len_q, len_k: see ``Layout``.
        cu_key: offsets of the keys: ``cu_k`` for the window, those of the blocks for the compressed
            branch.
        len_key: keys of each sequence when ``cu_q`` is None, otherwise at least the most.
        size: window size, or compression block size.
        stride: compression stride; 1 for the window.
    """

    window: bool
    cu_q: Tensor | None
    cu_k: Tensor | None
    cu_key: Tensor | None
    num_sequences: int
    len_q: int
    len_k: int
    len_key: int
    size: int
    stride: int

    def num_tiles(self, rows: int, tile: int, each: int) -> int:
        """See ``Layout.num_tiles``."""
        return Layout(self.cu_q, self.cu_k, self.num_sequences, self.len_q, self.len_k).num_tiles(
            rows, tile, each
        )

    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """What every kernel takes."""
        return (
            self.cu_q,
            self.cu_k,
            self.cu_key,
            self.len_q,
            self.len_k,
            self.len_key,
            self.num_sequences,
        )


def tile_name(operator: str, kind: str, layout: RangeLayout) -> str:
    """Name of a kernel in the tables of tiles; with very many keys it has a tile of its own."""
    many = not layout.window and layout.len_key >= LONG_KEYS
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: RangeLayout,
    softmax_scale: float,
    tile: Tile,
) -> None:
    """Fill out ``[T, Hq, Dv]`` and lse fp32 ``[Hq, T]``."""
    num_q, heads = q.shape[0], Heads.of(q, v)
    num_tiles = layout.num_tiles(num_q * heads.G, tile.rows, layout.len_q * heads.G)
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
            *layout.arguments(),
            num_q,
            stride_q=q.stride(),
            stride_k=k.stride(),
            stride_v=v.stride(),
            softmax_scale=softmax_scale,
            size=layout.size,
            stride=layout.stride,
            HEADS=heads,
            TILE=tile,
            WINDOW=layout.window,
            **tile.launch_options(),
        )


@dataclass(frozen=True)
class RangeBackward:
    """What the kernels of a backward pass read, and what that of dQ leaves for that of dK and dV.

    Attributes:
        q, k, v, out, dout: as the forward had them; with gates dout is the gradient of the
            branches' gated sum.
        lse: of the forward, ``[Hq, T]``.
        dq: gradient of q, contiguous.
        delta: fp32 ``[Hq, T]``: row sums of out * dout.
        gated_lse: with gates, lse of the gated branch, which the kernel of dQ writes; otherwise
            ``lse``.
        gated: the branch's part in the gated sum.
        layout: where sequences lie and which keys a query sees.
        softmax_scale: factor on the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    dq: Tensor
    delta: Tensor
    gated_lse: Tensor
    gated: Gated
    layout: RangeLayout
    softmax_scale: float

    @classmethod
    def new(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        dq: Tensor,
        layout: RangeLayout,
        softmax_scale: float,
        gated: Gated,
    ) -> RangeBackward:
        """With memory for what the kernel of dQ leaves."""
        gated_lse = lse if gated.gates is None else torch.empty_like(lse)
        return cls(
            q,
            k,
            v,
            out,
            dout,
            lse,
            dq,
            torch.empty_like(lse),
            gated_lse,
            gated,
            layout,
            softmax_scale,
        )

    @property
    def constants(self) -> dict[str, Any]:
        """What stays the same from call to call of both kernels, beside their tile."""
        return {
            "stride_q": self.q.stride(),
            "stride_k": self.k.stride(),
            "stride_v": self.v.stride(),
            "stride_do": self.dout.stride(),
            "softmax_scale": self.softmax_scale,
            "size": self.layout.size,
            "stride": self.layout.stride,
            "HEADS": Heads.of(self.q, self.v),
            "WINDOW": self.layout.window,
        }


def range_dq(backward: RangeBackward, tile: Tile) -> None:
    """First half of the backward: dq and, for the second half, delta and the gated lse."""
    q, k, v, layout, gated = backward.q, backward.k, backward.v, backward.layout, backward.gated
    num_q, num_kv_heads = q.shape[0], v.shape[1]
    group_size = q.shape[1] // num_kv_heads
    if num_q == 0 or k.shape[0] == 0:
        if not gated.adds:
            backward.dq.zero_()
        return
    tile = fitting(tile, k, v)
    num_tiles = layout.num_tiles(num_q * group_size, tile.rows, layout.len_q * group_size)
    range_dq_kernel[(num_tiles, num_kv_heads)](
        q,
        source(k, tile.keys, tile),
        source(v, tile.keys, tile),
        backward.out,
        backward.dout,
        backward.lse,
        backward.delta,
        backward.dq,
        gated.pointers(backward.gated_lse),
        *layout.arguments(),
        num_q,
        **backward.constants,
        TILE=tile,
        ADD=gated.adds,
        **tile.launch_options(),
    )


def range_dkv(backward: RangeBackward, tile: Tile) -> tuple[Tensor, Tensor]:
    """Second half of the backward, after dQ: dk, dv in the shapes of k, v, contiguous."""
    q, k, v, dout = backward.q, backward.k, backward.v, backward.dout
    layout = backward.layout
    num_q, num_key, num_kv_heads = q.shape[0], k.shape[0], k.shape[1]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    num_blocks = layout.num_tiles(num_key, tile.keys, layout.len_key)
    if not layout.window or num_q == 0:
        # Rows that no block owns are not visited.
        dk.zero_()
        dv.zero_()
    if num_q == 0 or num_blocks == 0:
        return dk, dv
    most = min(layout.len_q, layout.size) if layout.window else layout.len_q
    num_chunks, chunk_rows = chunks_of(
        layout.len_q, most, layout.window, num_blocks * num_kv_heads, tile.rows
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
        *layout.arguments(),
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
            *layout.arguments(),
            *(chunk_rows, num_key, layout.size, layout.stride),
            HEADS=constants["HEADS"],
            BLOCK_N=tile.keys,
            WINDOW=layout.window,
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
