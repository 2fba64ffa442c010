"""Launcher of the kernel of scores and choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from nsa.ops._triton.range_launch import RangeLayout, block_of
from nsa.ops._triton.sizes import next_power_of_2
from nsa.ops._triton.tuning import Tile
from nsa.ops.selection.reference import to_fp8
from nsa.ops.selection.triton_fwd import select_kernel

# Compressed keys of a block where tiles were measured: 64 tokens, one key every 16.
USUAL_KEYS = 4
# Shared memory for queries that stay on chip.
KEPT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Choice:
    """What is chosen, and how; see ``NSAConfig``.

    Attributes:
        block_size: tokens of a selection block.
        num_blocks: n, the width of the indices.
        num_init, num_local: forced first and most recent blocks.
        counts: flat ``(length, n, length, n ..)``: a query at a position below length takes n
            blocks; the first that fits.
        precision: ``exact``, ``bf16`` or ``fp8``.
    """

    block_size: int
    num_blocks: int
    num_init: int
    num_local: int
    counts: tuple[int, ...] = ()
    precision: str = "exact"


def select_blocks_forward(
    q: Tensor, k: Tensor, lse: Tensor, out: Tensor, layout: RangeLayout, softmax_scale: float, choice: Choice, tile: Tile,
    coarse: Tensor | None = None, coarse_factor: int = 0,
) -> None:  # fmt: skip
    """Fill out, int32 ``[T, Hkv, n]``; see :func:`nsa.select_blocks`. lse is ``[Hq, T]``.

    ``tile.rows`` are queries, ``tile.keys`` blocks of a step.

    With ``coarse`` int32 ``[T, Hkv, m]``, ascending, only blocks inside these coarse blocks of
    ``coarse_factor`` blocks each are candidates, beside the forced ones.
    """
    num_q, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    width = next_power_of_2(choice.num_blocks)
    step = max(tile.keys, width)
    # A step must hold as many blocks as are chosen. Fewer queries, then more warps, keep its scores
    # in registers.
    # of a query; a tile is made for USUAL_KEYS compressed keys a block
    scores = step * -(-choice.block_size // layout.stride)
    if coarse is not None:
        scores *= 2  # the list of coarse blocks needs registers, too
    usual = tile.keys * USUAL_KEYS
    rows = max(16, min(tile.rows, tile.rows * usual // scores))
    tile = replace(
        tile, warps=max(tile.warps, min(8, tile.warps * rows * scores // (tile.rows * usual)))
    )
    grid = (layout.num_tiles(num_q, rows, layout.len_q), num_kv_heads)
    q_scale = k_scale = None
    block_d = block_of(head_dim)
    if choice.precision == "fp8":
        (q, q_scale), (k, k_scale) = to_fp8(q), to_fp8(k)
        block_d = max(block_d, 32)  # the least depth of an fp8 product
    # All heads of a group at once fit on chip only while they are few.
    keep = (
        tile.keep_queries
        and num_heads // num_kv_heads * rows * block_d * q.element_size() <= KEPT_BYTES
    )
    if num_q:
        select_kernel[grid](
            q, k, lse, q_scale, k_scale, coarse, out, *layout.arguments(), num_q, q.stride(0), q.stride(1), k.stride(0),
            k.stride(1), softmax_scale, choice.num_init, choice.num_local, HQ=num_heads, G=num_heads // num_kv_heads,
            D=head_dim, N=choice.num_blocks, L=layout.size, STRIDE=layout.stride, BLOCK_SIZE=choice.block_size,
            COUNTS=choice.counts, NUM_COUNTS=len(choice.counts) // 2, FACTOR=coarse_factor,
            NUM_COARSE=0 if coarse is None else coarse.shape[-1], BF16=choice.precision == "bf16", BLOCK_Q=rows,
            BLOCK_J=step, BLOCK_N=width, BLOCK_D=block_d, KEEP=keep, STAGES=tile.stages,
            **tile.launch_options(),
        )  # fmt: skip
