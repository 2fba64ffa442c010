"""Launchers of the decode kernels. They do not validate user input and never synchronize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._layout import Heads, block_of, cdiv, next_power_of_2
from nsa.ops._plan import once, planned
from nsa.ops._register import guarded
from nsa.ops._triton.kernel import Launch, starts_early
from nsa.ops.compression.reference import PhiWeights, rotated_place
from nsa.ops.decode import CacheTensors, NewTokens
from nsa.ops.decode.append import AppendPlan, Stream, decode_append_kernel
from nsa.ops.decode.layout import Pattern, Splits
from nsa.ops.decode.merge import decode_merge_kernel
from nsa.ops.decode.scan import decode_scan_kernel
from nsa.ops.decode.select import decode_select_kernel
from nsa.ops.selection.launch import Selection
from nsa.rope import Rope, frequency_table

# Maxima: rows (queries by heads) per program, keys per step, and pipeline stages.
MOST_ROWS = 64
STEP_KEYS = 64
STAGES = 3
# Maximum number of output elements of a program, so that registers remain for everything else.
MOST_OUTPUTS = 64 * 64
# Selection: maxima of scores per warp, of blocks per sequence and heads per group for which one
# warp suffices, and of blocks ranked by a program. Merge: maximum number of splits of a branch, and
# minimum number of compressed keys per split if there are many.
MOST_SCORES = 4096
MOST_BLOCKS, MOST_HEADS = 2048, 16
MOST_RANKED = 256
MOST_SHARES = 64
SHARE_KEYS = 128
# Maximum number of compressed keys per program, whatever their total; window programs, which run
# concurrently, have about as many.
LONG_SHARE_KEYS = 512
# Tokens of all sequences in a small step.
FEW_TOKENS = 2


def pattern_of(config: NSAConfig, cache: CacheTensors, queries: int) -> Pattern:
    """Return the compile-time constants of the kernels."""
    ring = 0 if cache.k_win is None else cache.k_win.shape[0] // cache.num_sequences
    return Pattern(
        config.num_kv_heads,
        config.num_heads // config.num_kv_heads,
        queries,
        config.compress_block_size,
        config.compress_stride,
        config.block_size,
        config.window_size,
        ring,
        config.num_selected_blocks,
    )


def append(
    new: NewTokens,
    cache: CacheTensors,
    phi: tuple[PhiWeights, PhiWeights] | None,
    rope: Rope | None,
    config: NSAConfig,
    queries: int,
) -> None:
    """Append ``queries`` tokens of each sequence, and compress the blocks that they complete."""
    weights = list[Tensor]()
    for part in phi or ():
        found = (part.weight, part.position, part.w1, part.w2)
        weights += [x.contiguous() for x in found if x is not None]
    rotation = "" if rope is None or config.compress_rope == "none" else rope.text
    _append(new, cache, weights, rotation, config.text, queries)


@guarded
@planned
def _append(
    new: NewTokens,
    cache: CacheTensors,
    weights: list[Tensor],
    rope_text: str,
    config_text: str,
    queries: int,
) -> None:
    rope = Rope.from_text(rope_text) if rope_text else None
    pairs = [
        (x, target)
        for x, target in zip(new, cache[: len(new)], strict=True)
        if x is not None and target is not None
    ]
    config = NSAConfig.from_text(config_text)
    launch = once(lambda: _plan_append(new, cache, rope, config, queries))
    offset = rotated_place(config) + (0 if rope is None else rope.position_offset)
    launch(
        cache.table,
        cache.lengths,
        tuple(x.contiguous() for x, _ in pairs),
        tuple(target for _, target in pairs),
        tuple(x for x in (cache.k_cmp, cache.v_cmp) if x is not None) or None,
        tuple(weights) or None,
        None if rope is None else frequency_table(rope, cache.table.device),
        cache.table.shape[1],
        1.0 if rope is None else rope.magnitude,
        offset,
    )


def _plan_append(
    new: NewTokens, cache: CacheTensors, rope: Rope | None, config: NSAConfig, queries: int
) -> Launch:
    streams = list[Stream]()
    for name in NewTokens._fields:
        x, target = getattr(new, name), getattr(cache, name)
        if x is None or target is None:
            continue
        is_raw, size = name.endswith("raw"), x.shape[-1]
        rows = 0 if name.endswith("slc") else target.shape[0] // cache.num_sequences
        rotary = rope.dim if rope is not None and name == "k_raw" else 0
        hidden = config.compress_hidden_size or 2 * size
        compresses = (0 if name[0] == "k" else 1) if is_raw else -1
        streams.append(Stream(rows, size, block_of(size), compresses, rotary, hidden))
    largest_hidden = next_power_of_2(max(stream.hidden for stream in streams))
    plan = AppendPlan(
        tuple(streams),
        config.phi,
        next_power_of_2(config.compress_block_size),
        next_power_of_2(queries),
        min(64, max(16, largest_hidden)),
    )
    return Launch(
        decode_append_kernel,
        (cache.num_sequences, config.num_kv_heads, len(streams)),
        P=pattern_of(config, cache, queries),
        launch_pdl=starts_early(cache.table),
        PLAN=plan,
    )


def choose_splits(config: NSAConfig, groups: int, queries: int, most_blocks: int) -> Splits:
    """Choose the number of programs per branch, so that there are two per multiprocessor.

    Args:
        config: the sparse pattern.
        groups: sequences times KV heads.
        queries: tokens per sequence in the step.
        most_blocks: upper bound on the compressed blocks of a sequence.
    """
    programs = 2 * 132  # for an H100 or H200; close enough elsewhere
    wanted = max(programs // groups, 1)
    # Powers of two, so that few kernels are compiled for caches of all sizes.
    least, most = (
        next_power_of_2(cdiv(max(most_blocks, 1), keys)) for keys in (LONG_SHARE_KEYS, SHARE_KEYS)
    )
    cmp = min(max(wanted, least), MOST_SHARES, most)
    win = max(wanted // len(config.branches), 1)
    win = min(win, MOST_SHARES, cdiv(config.window_size + queries - 1, STEP_KEYS))
    slc = min(max(wanted // queries, 1), config.num_selected_blocks)
    slc = cdiv(config.num_selected_blocks, cdiv(config.num_selected_blocks, slc))
    on = config.branches
    return Splits(
        cmp if config.scores_blocks else 0, win if "win" in on else 0, slc if "slc" in on else 0
    )


class Tiles(NamedTuple):
    """Tile sizes; small for wide or fp32 heads, whose matmuls are unrolled.

    Attributes:
        rows: maximum number of rows (queries by heads) per program.
        keys: keys per step.
        width: the larger head size, a power of two.
    """

    rows: int
    keys: int
    width: int

    @classmethod
    def of(cls, heads: Heads, element_size: int) -> Tiles:
        """Tile sizes for these heads and this element size in bytes."""
        width = max(heads.BLOCK_D, heads.BLOCK_DV)
        rows = MOST_ROWS if element_size == 2 and width <= 128 else 16
        return cls(rows, max(min(STEP_KEYS, 16_384 // (width * element_size**2)), 16), width)


class Shares(NamedTuple):
    """Partial results of a step, which other programs merge.

    Attributes:
        out: partial outputs for every row (queries by heads), fp32 ``[B * Hkv, cmp + win + slc,
            queries * G, Dv]``.
        lse: lse of the partial outputs, same shape without Dv.
        scores: unscaled compressed scores, fp32 ``[B * Hkv, queries * G, max blocks]``.
    """

    out: Tensor
    lse: Tensor
    scores: Tensor


def attend(
    q: Tensor,
    q_cmp: Tensor | None,
    gates: Tensor,
    cache: CacheTensors,
    config: NSAConfig,
    queries: int,
    reads: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of tokens that have just been appended to the cache, in three launches.

    Args:
        q: rotated queries ``[B * queries, Hq, D]``, contiguous.
        q_cmp: queries of the compressed branch and the block scores; None means ``q``.
        gates: ``[B * queries, Hq, 3]``, contiguous.
        cache: the layer's cache; ``lengths`` do not include the new tokens yet.
        config: the sparse pattern.
        queries: tokens per sequence.
        reads: int64 ``[B * Hkv, 3]``, order (cmp, slc, win): the kernels add the number of keys
            that they load with their values; window and compressed keys count once per step, keys
            of selected blocks once per query. None: nothing is counted.

    Returns:
        out ``[B * queries, Hq, Dv]`` and the selected blocks, int32 ``[B * queries, Hkv, n]``; None
        without the selected branch.
    """
    groups = cache.num_sequences * config.num_kv_heads
    most_blocks = cache.table.shape[1] * (config.block_size // config.compress_stride)
    splits = choose_splits(config, groups, queries, most_blocks)
    out: tuple[Tensor, Tensor | None]
    out = _attend(q, q_cmp, gates, cache, config.text, queries, splits, reads)
    return out


@guarded
@planned
def _attend(
    q: Tensor,
    q_cmp: Tensor | None,
    gates: Tensor,
    cache: CacheTensors,
    config_text: str,
    queries: int,
    split_numbers: tuple[int, int, int],
    reads: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    step = DecodeStep(
        cache, NSAConfig.from_text(config_text), queries, Splits(*split_numbers), reads
    )
    shares = step.new_shares(q)
    step.scan(q, q if q_cmp is None else q_cmp, shares)
    ids, others = None, shares.lse.new_empty(0)
    if step.splits.slc:
        ids, others = step.select(gates, shares)
    return step.merge(q, gates, ids, others, shares), ids


@dataclass(frozen=True)
class DecodeStep:
    """Launches of :func:`attend`.

    Attributes:
        cache: the layer's cache.
        config: the sparse pattern.
        queries: tokens per sequence.
        splits: number of programs per branch.
        reads: counters of loaded keys.
    """

    cache: CacheTensors
    config: NSAConfig
    queries: int
    splits: Splits
    reads: Tensor | None

    @property
    def softmax_scale(self) -> float:
        """Factor on all scores."""
        return float(self.config.head_dim**-0.5)

    def new_shares(self, q: Tensor) -> Shares:
        """Allocate partial results and scores."""
        config, splits = self.config, self.splits
        groups = self.cache.num_sequences * config.num_kv_heads
        rows = self.queries * config.group_size
        most_blocks = self.cache.table.shape[1] * (config.block_size // config.compress_stride)
        return Shares(
            q.new_empty(groups, sum(splits), rows, config.value_dim, dtype=torch.float32),
            q.new_empty(groups, sum(splits), rows, dtype=torch.float32),
            q.new_empty(
                (groups, rows, most_blocks) if config.scores_blocks else 0, dtype=torch.float32
            ),
        )

    def constants(self) -> dict[str, Any]:
        """Constants common to all three kernels."""
        config = self.config
        pattern, sizes = (
            pattern_of(config, self.cache, self.queries),
            (config.head_dim, config.value_dim),
        )
        heads = Heads(config.num_heads, pattern.G, *sizes, *(block_of(size) for size in sizes))
        return {"P": pattern, "HEADS": heads, "SPLITS": self.splits}

    def starts_early(self) -> bool:
        """Whether kernels that read keys start while the previous kernel is still running."""
        is_small = self.cache.num_sequences * self.queries <= FEW_TOKENS
        return is_small and starts_early(self.cache.table)

    def scan(self, q: Tensor, q_cmp: Tensor, shares: Shares) -> None:
        """Compute partial results of the compressed branch and the window, and the scores."""
        cache, splits = self.cache, self.splits
        if not splits.cmp + splits.win:
            return

        def plan() -> Launch:
            constants = self.constants()
            tiles, pattern = Tiles.of(constants["HEADS"], q.element_size()), constants["P"]
            rows = pattern.QUERIES * pattern.G
            block_m = min(tiles.rows, max(16, next_power_of_2(rows)))
            # Register limit of a program: outputs, and scores of a step.
            block_n = tiles.keys if block_m * tiles.width <= MOST_OUTPUTS else tiles.keys // 2
            groups = cache.num_sequences * pattern.HKV
            return Launch(
                decode_scan_kernel,
                (groups, splits.cmp + splits.win, cdiv(rows, block_m)),
                **constants,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                num_warps=4,
                launch_pdl=self.starts_early(),
                num_stages=STAGES,
            )

        once(plan)(
            q,
            q_cmp,
            cache.k_cmp,
            cache.v_cmp,
            cache.k_win,
            cache.v_win,
            cache.table,
            cache.lengths,
            shares.scores,
            shares.out,
            shares.lse,
            self.reads,
            cache.table.shape[1],
            shares.scores.shape[-1],
            self.softmax_scale,
        )

    def select(self, gates: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
        """Selected blocks, int32 ``[T, Hkv, n]``, and the gated sum of the other branches."""
        cache, config, lse = self.cache, self.config, shares.lse
        tokens, most_blocks = cache.num_sequences * self.queries, cache.table.shape[1]
        programs = tokens * config.num_kv_heads

        def plan() -> tuple[int, int, Launch]:
            constants, selection = self.constants(), Selection.of(config)
            heads, group = constants["HEADS"], next_power_of_2(config.group_size)
            block_k = next_power_of_2(selection.num_blocks)
            # A single warp sorts fastest as long as the data fits in its registers.
            is_large = most_blocks > MOST_BLOCKS or group > MOST_HEADS
            scores = MOST_SCORES * (2 if is_large else 1)
            ranked = scores // (group * (config.block_size // config.compress_stride))
            block_j = min(next_power_of_2(most_blocks + 1), next_power_of_2(ranked), MOST_RANKED)
            block_j = max(block_j, block_k, 16)
            chunks = cdiv(most_blocks, block_j - 1)
            block_o = next_power_of_2(max(self.splits.cmp, self.splits.win))
            block_o = max(min(block_o, MOST_OUTPUTS // heads.BLOCK_DV), 1)
            block_h = max(min(group, MOST_OUTPUTS // (heads.BLOCK_DV * block_o)), 1)
            launch = Launch(
                decode_select_kernel,
                (programs, chunks + cdiv(config.group_size, block_h)),
                **constants,
                HAS_CMP=cache.v_cmp is not None,
                COUNTS=selection.counts,
                BLOCK_G=group,
                BLOCK_S=next_power_of_2(self.splits.cmp),
                BLOCK_J=block_j,
                BLOCK_K=block_k,
                BLOCK_CHUNKS=next_power_of_2(chunks),
                BLOCK_H=block_h,
                BLOCK_O=block_o,
                num_warps=4 if is_large else 1,
                launch_pdl=starts_early(cache.table),
            )
            return chunks, block_k, launch

        chunks, block_k, launch = once(plan)
        best = lse.new_empty(programs if chunks > 1 else 0, chunks, block_k, dtype=torch.int64)
        shape = (tokens, config.num_kv_heads, config.num_selected_blocks)
        ids = lse.new_empty(shape, dtype=torch.int32)
        others = lse.new_empty(*shares.out.shape[::2], config.value_dim)
        launch(
            shares.scores,
            shares.out,
            lse,
            gates,
            cache.lengths,
            best,
            cache.counters[0],
            ids,
            others,
            shares.scores.shape[-1],
            chunks,
            self.softmax_scale,
            config.num_init_blocks,
            config.num_local_blocks,
        )
        return ids, others

    def merge(
        self, q: Tensor, gates: Tensor, ids: Tensor | None, others: Tensor, shares: Shares
    ) -> Tensor:
        """Attention over the selected blocks, and the gated sum ``[T, Hq, Dv]``."""
        cache, config, slc = self.cache, self.config, self.splits.slc
        out = q.new_empty(*q.shape[:2], config.value_dim)

        def plan() -> Launch:
            constants = self.constants()
            heads, group_size = constants["HEADS"], config.group_size
            tiles = Tiles.of(heads, q.element_size())
            block_g = min(next_power_of_2(group_size), tiles.rows, MOST_OUTPUTS // tiles.width)
            programs = cache.num_sequences * config.num_kv_heads * self.queries
            return Launch(
                decode_merge_kernel,
                (programs, max(slc, 1), cdiv(group_size, block_g)),
                **constants,
                HAS_CMP=cache.v_cmp is not None,
                BLOCK_M=max(16, block_g),
                BLOCK_G=block_g,
                BLOCK_N=min(tiles.keys, config.block_size),
                BLOCK_S=max(4096 // (block_g * heads.BLOCK_DV), 1),
                BLOCK_IDS=next_power_of_2(config.num_selected_blocks),
                num_warps=4,
                launch_pdl=self.starts_early(),
                num_stages=STAGES,
            )

        once(plan)(
            q,
            gates,
            ids,
            cache.k_slc,
            cache.v_slc,
            cache.table,
            cache.lengths,
            shares.out,
            shares.lse,
            others,
            cache.counters[1],
            out,
            self.reads,
            cache.table.shape[1],
            self.softmax_scale,
        )
        return out
