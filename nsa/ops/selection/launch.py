"""Launchers of the kernels that select blocks. No autograd, no checks of user input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._range import KeyRange
from nsa.ops._triton.layout import Heads, block_of
from nsa.ops._triton.sizes import next_power_of_2
from nsa.ops._triton.tuning import Tile
from nsa.ops.selection.approximate import select_approximate_kernel
from nsa.ops.selection.exact import select_kernel
from nsa.ops.selection.reference import to_fp8
from nsa.ops.selection.scores import Scoring

# Compressed keys of a block where tiles were measured: 64 tokens, one key every 16.
USUAL_KEYS = 4
# Shared memory for queries that stay on chip.
KEPT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Selection:
    """What is selected, and how; see ``NSAConfig``.

    Attributes:
        block_size: tokens of a selection block.
        num_blocks: n, the width of the indices.
        num_init, num_local: forced first and most recent blocks.
        counts: flat ``(length, n, length, n ..)``: a query at a position below length selects n
            blocks; the first that fits.
        precision: ``exact`` or ``fp8``.
        factor: selection blocks of a coarse block, in the second of two stages.
    """

    block_size: int
    num_blocks: int
    num_init: int
    num_local: int
    counts: tuple[int, ...] = ()
    precision: str = "exact"
    factor: int = 0

    @classmethod
    def of(cls, config: NSAConfig) -> Selection:
        """The selection of a pattern; with two stages the second."""
        width = config.coarse_block_size
        return cls(
            config.block_size,
            config.num_selected_blocks,
            config.num_init_blocks,
            config.num_local_blocks,
            tuple(number for pair in config.block_counts for number in pair),
            config.score_precision,
            0 if width is None else width // config.block_size,
        )

    @classmethod
    def of_coarse(cls, config: NSAConfig) -> Selection:
        """The first of two stages. It is cheap, and exact whatever the precision of the second."""
        assert config.coarse_block_size is not None
        return cls(config.coarse_block_size, config.num_coarse_blocks, *config.forced_coarse_blocks)


def fitted(tile: Tile, selection: Selection, keys: KeyRange, two_stages: bool) -> Tile:
    """The tile with as many blocks a step as are selected.

    Fewer queries, then more warps, keep the scores of a step in registers.
    """
    step = max(tile.keys, next_power_of_2(selection.num_blocks))
    # Scores of a query; a tile is made for USUAL_KEYS compressed keys a block.
    scores = step * -(-selection.block_size // keys.stride)
    if two_stages:
        scores *= 2  # the list of coarse blocks needs registers, too
    usual = tile.keys * USUAL_KEYS
    rows = max(16, min(tile.rows, tile.rows * usual // scores))
    warps = max(tile.warps, min(8, tile.warps * rows * scores // (tile.rows * usual)))
    return tile._replace(rows=rows, keys=step, warps=warps)


def select_blocks_forward(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    out: Tensor,
    keys: KeyRange,
    softmax_scale: float,
    selection: Selection,
    tile: Tile,
    coarse: Tensor | None = None,
) -> None:
    """Fill out, int32 ``[T, Hkv, n]``; see :func:`nsa.select_blocks`. lse is ``[Hq, T]``.

    ``tile.rows`` are queries, ``tile.keys`` blocks of a step.

    With ``coarse`` int32 ``[T, Hkv, m]``, ascending, only blocks inside these coarse blocks of
    ``selection.factor`` blocks each are candidates, and the forced ones.
    """
    num_q, num_heads, head_dim = q.shape
    if num_q == 0:
        return
    group_size = num_heads // k.shape[1]
    tile = fitted(tile, selection, keys, coarse is not None)
    block_d = block_of(head_dim)
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    if selection.precision == "fp8":
        (q, q_scale), (k, k_scale) = to_fp8(q), to_fp8(k)
        block_d = max(block_d, 32)  # the least depth of an fp8 product
    # All heads of a group at once fit on chip only while they are few.
    if group_size * tile.rows * block_d * q.element_size() > KEPT_BYTES:
        tile = tile._replace(keep_queries=False)
    width = next_power_of_2(selection.num_blocks)
    constants: dict[str, Any] = {
        "stride_q": q.stride(),
        "stride_k": k.stride(),
        "softmax_scale": softmax_scale,
        "num_init": selection.num_init,
        "num_local": selection.num_local,
        "HEADS": Heads(num_heads, group_size, head_dim, head_dim, block_d, block_d),
        "SCORING": Scoring(
            keys.size, keys.stride, selection.block_size, selection.num_blocks, width
        ),
        "COUNTS": selection.counts,
        "TILE": tile,
        **tile.launch_options(),
    }
    grid = (keys.sequences.num_tiles(num_q, tile.rows, keys.sequences.len_q), k.shape[1])
    if q_scale is None and coarse is None:
        select_kernel[grid](q, k, lse, out, *keys.arguments(), num_q, **constants)
        return
    select_approximate_kernel[grid](
        q,
        k,
        lse,
        q_scale,
        k_scale,
        coarse,
        out,
        *keys.arguments(),
        num_q,
        **constants,
        FACTOR=selection.factor,
        NUM_COARSE=0 if coarse is None else coarse.shape[-1],
    )
