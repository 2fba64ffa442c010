"""Launchers of the block selection kernels. No autograd; only index limits are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops._checks import check_keys, check_queries
from nsa.ops._layout import Heads, block_of, by_head, next_power_of_2, rows
from nsa.ops._operator import Call, KeyRange
from nsa.ops._plan import once
from nsa.ops._triton.kernel import Launch
from nsa.ops._triton.token_lse import token_lse
from nsa.ops._triton.tuning import MOST_REGISTERS, Tile, tile_for
from nsa.ops.selection.kernels import Scoring, select_kernel
from nsa.ops.selection.random import select_random_kernel
from nsa.ops.selection.reference import (
    SelectionInputs,
    blocks_to_fp8,
    coarse_keys,
    to_fp8,
)
from nsa.ops.selection.token_max import select_token_max_kernel

# Compressed keys per block in the tile measurements: 64 tokens, one key per 16 tokens.
USUAL_KEYS = 4
# Least tokens, and most bytes of keys, in one product of the scores by tokens; heads of a group for
# which products have more tokens, as many as registers allow.
PRODUCT_KEYS, PRODUCT_BYTES, FEW_HEADS = 64, 32 * 1024, 3
# Tile of the log-sum-exp over forced blocks, and that of fp32 or heads wider than 128.
LSE_TILE, LSE_WIDE = Tile(64, 64, 4, 2), Tile(64, 32, 8, 1)
# Most scores in one step of the selection by tokens or at random.
STEP_SCORES = 2048
# Blocks in one step of the selection at random.
RANDOM_BLOCKS = 32
# Limit on the shared memory for queries that stay on chip, for each query of a tile.
KEPT_BYTES = 1024


@dataclass(frozen=True)
class Selection:
    """Rules of a selection, see ``NSAConfig``.

    Attributes:
        block_size: tokens of a selection block.
        num_blocks: n, the number of indices per query.
        num_init, num_local: number of forced first and most recent blocks.
        counts: flat tuple ``(length, n, length, n ..)``: a query selects n blocks of the first pair
            with position < length.
        precision: ``exact`` or ``fp8``.
        factor: selection blocks per coarse block, in the second of two stages.
    """

    block_size: int
    num_blocks: int
    num_init: int
    num_local: int
    counts: tuple[int, ...] = ()
    precision: str = "exact"
    factor: int = 0

    @property
    def widths(self) -> tuple[int, int]:
        """Padded numbers of selected and of ranked blocks, which are not forced."""
        ranked = max(next_power_of_2(self.num_blocks - self.num_init - self.num_local), 2)
        return max(next_power_of_2(self.num_blocks), ranked), ranked

    @classmethod
    def of(cls, config: NSAConfig) -> Selection:
        """Selection rules of a pattern; with two stages, those of the second."""
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
        """Rules of the first of two stages, which is cheap and always exact."""
        assert config.coarse_block_size is not None
        return cls(config.coarse_block_size, config.num_coarse_blocks, *config.forced_coarse_blocks)


def fitted(tile: Tile, selection: Selection, keys: KeyRange, two_stages: bool) -> Tile:
    """Adapt the tile so that its blocks per step match the number of selected blocks.

    Fewer queries, and more warps, keep the scores of a step in registers.
    """
    step = max(tile.keys, selection.widths[1])
    # Scores per query; tiles are measured with USUAL_KEYS compressed keys per block.
    scores = step * -(-selection.block_size // keys.stride)
    if two_stages:
        scores *= 2  # the list of coarse blocks needs registers, too
    usual = tile.keys * USUAL_KEYS
    num_rows = max(16, min(tile.rows, tile.rows * usual // scores))
    warps = max(tile.warps, min(8, tile.warps * num_rows * scores // (tile.rows * usual)))
    return tile._replace(rows=num_rows, keys=step, warps=warps)


def check_fp8(capability: tuple[int, int]) -> None:
    """Check that the GPU supports fp8 matmuls."""
    rule = "be exact on a GPU of compute capability below 8.9"
    got = f"fp8 on {capability[0]}.{capability[1]}"
    check(capability >= (8, 9), "config.score_precision", rule, got)


def run_selection(inputs: SelectionInputs, call: Call, out: Tensor) -> None:
    """Write the selected blocks to ``out``, int32 ``[T, Hkv, n]``."""
    config, by_token = call.config, call.config.scoring.scores == "token_max"
    if config.scores == "random":
        _select_at_random(out, call)
        return
    keys = KeyRange.of_tokens(call) if by_token else KeyRange.of_blocks(call)
    check_queries(inputs.q)
    check_keys("k_cmp", inputs.k, keys.stride)
    if config.score_precision == "fp8" and inputs.q.is_cuda:
        check_fp8(torch.cuda.get_device_capability(inputs.q.device))
    q, k = rows(inputs.q), rows(inputs.k)
    if by_token:
        is_shared = k.shape[1] < out.shape[1]  # one index for all KV heads
        found = torch.empty_like(out[:, :1]) if is_shared else out
        _select_by_token(q, k, found, keys, config)
        if is_shared:
            out.copy_(found)
        return
    assert inputs.lse is not None
    lse, coarse = by_head(inputs.lse), None
    if config.coarse_block_size is not None:
        means, cu_coarse = coarse_keys(inputs.k, config, call.sequences)
        first = Selection.of_coarse(config)
        coarse = q.new_empty(q.shape[0], k.shape[1], first.num_blocks, dtype=torch.int32)
        _select(q, means, lse, coarse, keys.of_coarse(first.block_size, cu_coarse), first)
    _select(q, k, lse, out, keys, Selection.of(config), coarse)


def _select(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    out: Tensor,
    keys: KeyRange,
    selection: Selection,
    coarse: Tensor | None = None,
) -> None:
    """Write out, int32 ``[T, Hkv, n]``; lse is ``[Hq, T]``.

    With ``coarse``, int32 ``[T, Hkv, m]``, ascending, only the forced blocks and the blocks inside
    these coarse blocks (of ``selection.factor`` blocks each) are candidates.
    """
    if q.shape[0] == 0:
        return
    inputs = q, k
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    if selection.precision == "fp8":
        (q, q_scale), (k, k_scale) = to_fp8(q), to_fp8(k)

    def plan() -> Launch:
        tile = fitted(tile_for("select_blocks", *inputs), selection, keys, coarse is not None)
        constants = constants_of(q, k, keys, selection, tile)
        constants["NUM_COARSE"] = 0 if coarse is None else coarse.shape[-1]
        grid = (keys.sequences.num_tiles(q.shape[0], tile.rows, keys.sequences.len_q), k.shape[1])
        return Launch(select_kernel, grid, **constants, FACTOR=selection.factor)

    once(plan)(q, k, lse, q_scale, k_scale, coarse, out, *keys.arguments(), q.shape[0])


def _select_by_token(q: Tensor, k: Tensor, out: Tensor, keys: KeyRange, config: NSAConfig) -> None:
    """Write out, int32 ``[T, Hkv, n]``, by the largest product of a token of each block."""
    if q.shape[0] == 0:
        return
    selection, sequences = Selection.of(config), keys.sequences
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    low, low_k, q_scale, k_scale = q, k, None, None
    if selection.precision == "fp8":
        (low, q_scale), (low_k, k_scale) = to_fp8(q), blocks_to_fp8(k, config, sequences)

    def plans() -> tuple[Launch, Launch]:
        tile = tile_for("select_token_max", q, k)
        step = max(tile.keys, selection.widths[1])
        # The scores and the ranking of a step stay in registers.
        num_rows = max(16, min(tile.rows, STEP_SCORES // step))
        if num_rows < tile.rows:  # each warp has as many rows, and needs more registers for scores
            fewer = max(4, tile.warps * num_rows // tile.rows)
            tile = tile._replace(rows=num_rows, warps=fewer, max_registers=MOST_REGISTERS)
        tile = tile._replace(keys=step)
        tiles = sequences.num_tiles(q.shape[0], tile.rows, sequences.len_q)
        of_lse = LSE_WIDE if q.element_size() > 2 or q.shape[2] > 128 else LSE_TILE
        first = token_lse(
            q,
            k,
            keys.softmax_scale,
            sequences,
            config,
            queries=of_lse.rows,
            keys=of_lse.keys,
            forced=True,
            natural=True,
            num_stages=of_lse.stages,
            **of_lse.launch_options(),
        )
        constants = constants_of(low, low_k, keys, selection, tile)
        # Whole blocks, or a part of one if its keys do not fit. Queries that are loaded for each
        # product are used for more keys, whose products need more registers.
        more = 1 if constants["TILE"].keep_queries else 4
        if more > 1:
            constants["maxnreg"] = MOST_REGISTERS
        most = min(more, 2) * PRODUCT_BYTES // (block_of(k.shape[2]) * low_k.element_size())
        columns = max(more * PRODUCT_KEYS, selection.block_size)
        if more == 1 and q.shape[1] <= FEW_HEADS * k.shape[1]:
            is_limited = (tile.max_registers or MOST_REGISTERS) < MOST_REGISTERS
            columns = max(columns, PRODUCT_KEYS * (2 if is_limited else 4))
        columns = min(columns, max(most, 16), step * selection.block_size)
        second = Launch(select_token_max_kernel, (tiles, k.shape[1]), **constants, COLUMNS=columns)
        return first, second

    numbers = (*sequences.arguments(), q.shape[0])
    first, second = once(plans)
    first(q, k, lse, *numbers)
    second(low, low_k, q_scale, k_scale, lse, out, *numbers)


def _select_at_random(out: Tensor, call: Call) -> None:
    """Write out, int32 ``[T, Hkv, n]``."""
    if out.shape[0] == 0:
        return

    def plan() -> Launch:
        selection, size = Selection.of(call.config), call.config.block_size
        step = max(selection.widths[1], RANDOM_BLOCKS)
        rows = max(16, STEP_SCORES // step)
        tiles = call.sequences.num_tiles(out.shape[0], rows, call.sequences.len_q)
        return Launch(
            select_random_kernel,
            (tiles, out.shape[1]),
            num_init=selection.num_init,
            num_local=selection.num_local,
            HKV=out.shape[1],
            SCORING=Scoring(1, 1, size, selection.num_blocks, *selection.widths),
            COUNTS=selection.counts,
            BLOCK_Q=rows,
            BLOCK_J=step,
        )

    once(plan)(out, *call.sequences.arguments())


def constants_of(
    q: Tensor, k: Tensor, keys: KeyRange, selection: Selection, tile: Tile
) -> dict[str, Any]:
    """Constants and launch options of both kernels; ``q`` and ``k`` in kernel layout."""
    _, num_heads, head_dim = q.shape
    group_size, block_d = num_heads // k.shape[1], block_of(head_dim)
    if selection.precision == "fp8":
        block_d = max(block_d, 32)  # the smallest inner dimension of an fp8 matmul
    # The queries of all heads of a group fit on chip only if they are few.
    if group_size * block_d * q.element_size() > KEPT_BYTES:
        tile = tile._replace(keep_queries=False)
    num_blocks, block_size = selection.num_blocks, selection.block_size
    return {
        "stride_q": q.stride(),
        "stride_k": k.stride(),
        "softmax_scale": keys.softmax_scale,
        "num_init": selection.num_init,
        "num_local": selection.num_local,
        "HEADS": Heads(num_heads, group_size, head_dim, head_dim, block_d, block_d),
        "SCORING": Scoring(keys.size, keys.stride, block_size, num_blocks, *selection.widths),
        "COUNTS": selection.counts,
        "TILE": tile,
        **tile.launch_options(),
    }
