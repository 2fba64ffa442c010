"""Launchers of the decode kernels. They do not validate user input and never synchronize."""

from __future__ import annotations

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
from nsa.ops.selection.kernels import Scoring
from nsa.ops.selection.launch import Selection
from nsa.rope import Rope, frequency_table

# Maxima: rows (queries by heads) per program, keys per step, and pipeline stages.
MAX_ROWS = 64
STEP_KEYS = 64
STAGES = 3
# Maximum number of output elements of a program, so that registers remain for everything else.
MAX_OUTPUTS = 64 * 64
# Selection: maxima of scores per warp, of blocks per sequence and heads per group for which one
# warp suffices, and of blocks ranked by a program. Merge: maximum number of splits of a branch, and
# minimum number of compressed or scored keys per split if there are many.
MAX_SCORES = 4096
MAX_BLOCKS, MAX_HEADS = 2048, 16
MAX_RANKED = 256
MAX_SPLITS = 64
SPLIT_KEYS = 128
# Bytes of scored keys per step.
SCORED_BYTES = 16_384
# Maximum number of compressed or scored keys per program, whatever their total; window programs,
# which run concurrently, have about as many.
LONG_SPLIT_KEYS = 512
# Tokens of all sequences in a small step.
FEW_TOKENS = 2
# Programs of a branch, two per multiprocessor of an H100 or H200 (close enough elsewhere), and
# programs that score keys.
PROGRAMS = SCORED_PROGRAMS = 2 * 132


def pattern_of(config: NSAConfig, cache: CacheTensors, queries: int) -> Pattern:
    """Return the compile-time constants of the kernels."""
    return Pattern(
        config.num_kv_heads,
        config.group_size,
        queries,
        config.compress_block_size,
        config.compress_stride,
        config.block_size,
        config.window_size,
        0 if cache.k_win is None else cache.k_win.shape[0] // cache.num_sequences,
        config.num_selected_blocks,
        config.num_branches,
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
    weights = [x.contiguous() for part in phi or () for x in vars(part).values() if x is not None]
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
    config = NSAConfig.from_text(config_text)
    pairs = [
        (x.contiguous(), target)
        for x, target in zip(new, cache[: len(new)], strict=True)
        if x is not None and target is not None
    ]

    def make() -> Launch:
        streams = list[Stream]()
        for name, x, target in zip(new._fields, new, cache[: len(new)], strict=True):
            if x is None or target is None:
                continue
            size = x.shape[-1]
            paged = name.endswith(("slc", "idx"))
            rows = 0 if paged else target.shape[0] // cache.num_sequences
            compresses = ("k_raw", "v_raw").index(name) if name.endswith("raw") else -1
            rotary = rope.dim if rope is not None and name == "k_raw" else 0
            hidden = config.compress_hidden_size or 2 * size
            sizes = (x.shape[1], size, block_of(size))
            streams.append(Stream(rows, *sizes, compresses, rotary, hidden))
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

    once(make)(
        cache.table,
        cache.lengths,
        tuple(x for x, _ in pairs),
        tuple(target for _, target in pairs),
        tuple(x for x in (cache.k_cmp, cache.v_cmp) if x is not None) or None,
        tuple(weights) or None,
        None if rope is None else frequency_table(rope, cache.table.device),
        cache.table.shape[1],
        1.0 if rope is None else rope.magnitude,
        rotated_place(config) + (0 if rope is None else rope.position_offset),
    )


def choose_splits(config: NSAConfig, groups: int, queries: int, most_tokens: int) -> Splits:
    """Choose the number of programs per branch.

    Args:
        config: the sparse pattern.
        groups: sequences times KV heads.
        queries: tokens per sequence in the step.
        most_tokens: upper bound on the tokens of a sequence.
    """
    wanted = max(PROGRAMS // groups, 1)

    def splits_of(keys: int, wanted: int, limit: int) -> int:
        # Powers of two, so that few kernels are compiled for caches of all sizes.
        least, most = (next_power_of_2(cdiv(keys, each)) for each in (LONG_SPLIT_KEYS, SPLIT_KEYS))
        return min(max(wanted, min(least, MAX_SPLITS)), limit, most)

    compressed = scored = 0
    if config.compresses_keys:
        compressed = splits_of(most_tokens // config.compress_stride, wanted, MAX_SPLITS)
    if config.scores_tokens:
        sequences = groups // config.num_kv_heads
        each = max(SCORED_PROGRAMS // (sequences * config.scoring.num_kv_heads), 1)
        each = 1 << (each.bit_length() - 1)
        scored = splits_of(most_tokens, each, SCORED_PROGRAMS)

    win = max(wanted // len(config.branches), 1)
    win = min(win, MAX_SPLITS, cdiv(config.window_size + queries - 1, STEP_KEYS))
    slc = min(max(wanted // queries, 1), config.num_selected_blocks)
    slc = cdiv(config.num_selected_blocks, cdiv(config.num_selected_blocks, slc))
    on = config.branches
    return Splits(compressed, win if "win" in on else 0, slc if "slc" in on else 0, scored)


def attend(
    q: Tensor,
    q_cmp: Tensor | None,
    q_idx: Tensor | None,
    gates: Tensor | None,
    cache: CacheTensors,
    config: NSAConfig,
    queries: int,
    reads: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of tokens that have just been appended to the cache, in three launches.

    Args:
        q: rotated queries ``[B * queries, Hq, D]``, contiguous.
        q_cmp: queries of the compressed branch and the block scores; None means ``q``.
        q_idx: rotated index queries, contiguous; None without an index.
        gates: ``[B * queries, Hq, 3]``, contiguous; None means 1 / the number of branches.
        cache: the layer's cache; ``lengths`` do not include the new tokens yet.
        config: the sparse pattern.
        queries: tokens per sequence.
        reads: int64 ``[B * Hkv, 4]``: the kernels add the number of keys that they load with their
            values, order (cmp, slc, win), and without them, to score tokens.
            Keys of selected blocks count once per query, others once per step. None: nothing is
            counted.

    Returns:
        out ``[B * queries, Hq, Dv]`` and the selected blocks, int32 ``[B * queries, Hkv, n]``; None
        without the selected branch.
    """
    groups = cache.num_sequences * config.num_kv_heads
    splits = choose_splits(config, groups, queries, cache.table.shape[1] * config.block_size)
    out: tuple[Tensor, Tensor | None]
    out = _attend(q, q_cmp, q_idx, gates, cache, config.text, queries, splits, reads)
    return out


class _StepPlan(NamedTuple):
    """Plan of :func:`attend`.

    Attributes:
        parts: shape of the partial outputs of every row (queries by heads).
        scores: shape of the scores, ``[B * Hkv, queries * G, max blocks]``; with an index in its
            heads.
        score_lse: shape of the log-sum-exp of forced tokens, ``[B * Hkv, programs, queries * G]``.
        best: shape of the best blocks that each program of the selection finds.
        scan: the compressed branch, the window and scores of tokens; None without them.
        select: the selection, concurrently with a merge of the other branches; None without it.
        merge: the selected branch, and the gated sum.
    """

    parts: tuple[int, ...]
    scores: tuple[int, ...]
    score_lse: tuple[int, ...]
    best: tuple[int, ...]
    scan: Launch | None
    select: Launch | None
    merge: Launch


@guarded
@planned
def _attend(
    q: Tensor,
    q_cmp: Tensor | None,
    q_idx: Tensor | None,
    gates: Tensor | None,
    cache: CacheTensors,
    config_text: str,
    queries: int,
    split_numbers: tuple[int, int, int, int],
    reads: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    config = NSAConfig.from_text(config_text)
    plan = once(lambda: _plan_step(q, cache, config, queries, Splits(*split_numbers)))
    table, lengths, scale = cache.table, cache.lengths, float(config.head_dim**-0.5)
    out = q.new_empty(*q.shape[:2], config.value_dim)
    # Partial results [B * Hkv, programs, queries * G, Dv], and unscaled scores.
    part = q.new_empty(plan.parts, dtype=torch.float32)
    lse = q.new_empty(plan.parts[:3], dtype=torch.float32)
    scores = q.new_empty(plan.scores, dtype=torch.float32)
    score_lse = q.new_empty(plan.score_lse, dtype=torch.float32)
    if plan.scan is not None:
        heads = (q if x is None else x for x in (q, q_cmp, q_idx))
        scored = cache.k_slc if cache.k_idx is None else cache.k_idx
        stored = (cache.k_cmp, cache.v_cmp, scored, cache.k_win, cache.v_win, table, lengths)
        made = (scores, part, lse, score_lse, reads)
        scales = (scale, float(config.scoring.head_dim**-0.5))
        numbers = (
            table.shape[1],
            scores.shape[-1],
            *scales,
            config.num_init_blocks,
            config.num_local_blocks,
        )
        plan.scan(*heads, *stored, *made, *numbers)
    ids, others = None, lse.new_empty(0)
    if plan.select is not None:
        ids, others = _select(plan, gates, cache, config, (scores, score_lse), (part, lse))
    plan.merge(
        q,
        gates,
        ids,
        cache.k_slc,
        cache.v_slc,
        table,
        lengths,
        part,
        lse,
        others,
        cache.counters[1],
        out,
        reads,
        table.shape[1],
        scale,
    )
    return out, ids


def _select(
    plan: _StepPlan,
    gates: Tensor | None,
    cache: CacheTensors,
    config: NSAConfig,
    scored: tuple[Tensor, Tensor],
    parts: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Selected blocks, int32 ``[T, Hkv, n]``, and the gated sum of the other branches."""
    assert plan.select is not None
    (scores, score_lse), (part, lse) = scored, parts
    groups, _, rows, value_dim = plan.parts
    best = lse.new_empty(plan.best, dtype=torch.int64)
    num_tokens = groups * rows // config.num_heads
    shape = (num_tokens, config.num_kv_heads, config.num_selected_blocks)
    ids = lse.new_empty(shape, dtype=torch.int32)
    others = lse.new_empty(groups, rows, value_dim)
    plan.select(
        scores,
        part,
        lse,
        score_lse,
        gates,
        cache.lengths,
        best,
        cache.counters[0],
        ids,
        others,
        scores.shape[-1],
        plan.best[1],
        float(config.scoring.head_dim**-0.5),
        config.num_init_blocks,
        config.num_local_blocks,
    )
    return ids, others


def _plan_step(
    q: Tensor, cache: CacheTensors, config: NSAConfig, queries: int, splits: Splits
) -> _StepPlan:
    pattern, heads = pattern_of(config, cache, queries), heads_of(config)
    scoring, score_heads = pattern_of(config.scoring, cache, queries), heads_of(config.scoring)
    constants: dict[str, Any] = {"P": pattern, "HEADS": heads, "SPLITS": splits}
    groups, rows = cache.num_sequences * pattern.HKV, queries * pattern.G
    # Small tiles for wide or fp32 heads, whose matmuls are unrolled.
    width = max(heads.BLOCK_D, heads.BLOCK_DV, score_heads.BLOCK_D)
    element_size = q.element_size()
    most_rows = MAX_ROWS if element_size == 2 and width <= 128 else 16
    keys = max(min(STEP_KEYS, 16_384 // (width * element_size**2)), 16)
    # Kernels that read keys start while the previous one is still running only in small steps.
    is_small = cache.num_sequences * queries <= FEW_TOKENS
    options = {
        "num_warps": 4,
        "num_stages": STAGES,
        "launch_pdl": is_small and starts_early(cache.table),
    }
    scan = select = None
    programs = splits.cmp + splits.win + splits.scored
    if programs:
        most = queries * max(pattern.G, scoring.G if splits.scored else 0)
        is_fp8 = config.score_precision == "fp8"
        # Two products of a step have half as many rows each, so that nothing spills.
        block_m = min(most_rows // 2 if is_fp8 else most_rows, next_power_of_2(most))
        block_m = max(block_m, 16)
        # Register limit of a program: outputs, and scores of a step.
        block_n = keys if block_m * width <= MAX_OUTPUTS else keys // 2
        score_n = max(block_n, min(SCORED_BYTES // (score_heads.BLOCK_D * element_size), 256))
        if is_fp8 and splits.scored:  # the keys of a block share a scale
            score_n = max(block_n, config.block_size)
        grid = (groups, programs, cdiv(most, block_m))
        tile = {"S": scoring, "SCORE_HEADS": score_heads, "BLOCK_M": block_m, "BLOCK_N": block_n}
        tile |= {"SCORE_N": score_n, "FP8": is_fp8}
        scan = Launch(decode_scan_kernel, grid, **constants, **tile, **options)
    constants["HAS_CMP"] = cache.v_cmp is not None
    best: tuple[int, ...] = ()
    if splits.slc:
        best, select = _plan_select(cache, config, groups * queries, {**constants, "S": scoring})
    block_g = min(next_power_of_2(pattern.G), most_rows, MAX_OUTPUTS // width)
    merge = Launch(
        decode_merge_kernel,
        (groups * queries, max(splits.slc, 1), cdiv(pattern.G, block_g)),
        **constants,
        BLOCK_M=max(16, block_g),
        BLOCK_G=block_g,
        BLOCK_N=min(keys, config.block_size),
        BLOCK_S=max(4096 // (block_g * heads.BLOCK_DV), 1),
        BLOCK_IDS=next_power_of_2(config.num_selected_blocks),
        **options,
    )
    scored = (cache.num_sequences * scoring.HKV, queries * scoring.G)
    scores = (*scored, cache.table.shape[1] * _scores_per_block(config, splits))
    parts = (groups, splits.number, rows, config.value_dim)
    score_lse = (scored[0], splits.scored, scored[1])
    return _StepPlan(parts, scores, score_lse, best, scan, select, merge)


def heads_of(config: NSAConfig) -> Heads:
    """Return the compile-time numbers and sizes of a pattern's heads."""
    sizes = (config.head_dim, config.value_dim)
    return Heads(config.num_heads, config.group_size, *sizes, *(block_of(size) for size in sizes))


def _scores_per_block(config: NSAConfig, splits: Splits) -> int:
    if splits.scored:
        return 1
    return config.block_size // config.compress_stride if splits.cmp else 0


def _plan_select(
    cache: CacheTensors, config: NSAConfig, programs: int, constants: dict[str, Any]
) -> tuple[tuple[int, int, int], Launch]:
    """Shape of the best blocks of each program ``[programs, chunks, n]``, and the selection."""
    selection, most_blocks = Selection.of(config), cache.table.shape[1]
    heads, splits = constants["HEADS"], constants["SPLITS"]
    group, scored = (next_power_of_2(x.group_size) for x in (config, config.scoring))
    # A single warp sorts fastest as long as the data fits in its registers.
    is_large = most_blocks > MAX_BLOCKS or scored > MAX_HEADS
    scores = MAX_SCORES * (2 if is_large else 1)
    ranked = scores // (scored * _scores_per_block(config, splits))
    block_j = min(next_power_of_2(most_blocks + 1), next_power_of_2(ranked), MAX_RANKED)
    block_j = max(block_j, selection.widths[1], 16)
    chunks = cdiv(most_blocks, block_j - 1)
    block_o = next_power_of_2(max(splits.cmp, splits.win, 1))
    block_o = max(min(block_o, MAX_OUTPUTS // heads.BLOCK_DV), 1)
    block_h = max(min(group, MAX_OUTPUTS // (heads.BLOCK_DV * block_o)), 1)
    launch = Launch(
        decode_select_kernel,
        (programs, chunks + cdiv(config.group_size, block_h)),
        **constants,
        SCORING=Scoring(1, 1, config.block_size, selection.num_blocks, *selection.widths),
        COUNTS=selection.counts,
        BLOCK_G=scored,
        BLOCK_S=next_power_of_2(splits.scored or splits.cmp),
        BLOCK_J=block_j,
        BLOCK_CHUNKS=next_power_of_2(chunks),
        BLOCK_H=block_h,
        BLOCK_O=block_o,
        num_warps=4 if is_large else 1,
        launch_pdl=starts_early(cache.table),
    )
    return (programs if chunks > 1 else 0, chunks, selection.widths[1]), launch
