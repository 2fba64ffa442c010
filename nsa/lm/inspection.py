"""Selected blocks and gates of each layer on one text, from a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nsa.config import BRANCHES, NSAConfig
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops.selection import blocks_to_ranges

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LAGS = (1, 2, 4, 8, 16, 32, 64)  # tokens
HISTOGRAM_BINS = 20
MAP_SIZE = 128
_QUERIES_AT_A_TIME = 1 << 14

Range = tuple[int, int]
# Called with the index and pattern of a layer, its gates and its block indices.
Note = Callable[[int, NSAConfig, Tensor, Tensor | None], None]


@dataclass(frozen=True)
class GateFigures:
    """Gates of one branch over all tokens and query heads.

    Attributes:
        mean: mean of the gates.
        quantiles: quantiles at ``QUANTILES``, by nearest rank.
        histogram: fraction of the gates in each of ``HISTOGRAM_BINS`` equal parts of 0 to 1.
        head_means: mean of each query head.
    """

    mean: float
    quantiles: list[float]
    histogram: list[float]
    head_means: list[float]


@dataclass(frozen=True)
class SelectionFigures:
    """Selected blocks of a layer.

    Attributes:
        block_size: tokens of a block.
        keys_mean: visible selected keys of a query, mean over queries and KV heads.
        distance_mean: mean distance from a query back to its selected keys, tokens.
        distance_tokens: lower bounds of the bins of ``distance_counts``: 0, 1, 2, 4, .. blocks
            before the query's own, in tokens.
        distance_counts: number of selected blocks in each bin.
        overlap: by lag in tokens, fraction of a query's blocks that the query ``lag`` tokens
            before it also selected, per KV head.
        ranges: selected blocks of some queries by position, for each KV head as token ranges
            ``[start, end)``, adjacent blocks merged.
        heat_map: fp32 ``[rows, columns]`` on the CPU: fraction of the blocks in an interval of the
            text (columns) that the queries in an interval (rows) selected, over KV heads.
        first_query: position of the query in the first row.
        blocks: block indices int32 ``[T, Hkv, n]`` on the CPU, -1 for unused entries.
    """

    block_size: int
    keys_mean: float
    distance_mean: float
    distance_tokens: list[int]
    distance_counts: list[int]
    overlap: dict[int, float]
    ranges: dict[int, list[list[Range]]]
    heat_map: Tensor
    first_query: int
    blocks: Tensor


@dataclass(frozen=True)
class LayerFigures:
    """Gates and selection of a layer on a text.

    Attributes:
        layer: index of the layer, from 0.
        gates: figures of the enabled branches.
        selection: figures of the selected branch, None if it is disabled.
    """

    layer: int
    gates: dict[str, GateFigures]
    selection: SelectionFigures | None


@contextmanager
def observed(model: LanguageModel, note: Note) -> Iterator[None]:
    """Context manager: observe each sparse layer in every forward pass without a cache.

    Args:
        model: the language model, not compiled.
        note: called by each layer with its index, its pattern, the gates ``[T, Hq, 3]``, order
            (cmp, slc, win), and the block indices int32 ``[T, Hkv, n]``, None if the selected
            branch is disabled.
    """
    layers = [layer.attention for layer in model.decoder_layers()]
    sparse = [
        (number, layer)
        for number, layer in enumerate(layers)
        if isinstance(layer, NativeSparseAttention)
    ]
    try:
        for number, layer in sparse:
            layer.observer = partial(note, number, layer.config)
        yield
    finally:
        for _, layer in sparse:
            layer.observer = None


@torch.no_grad()
def inspect_text(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    queries: Sequence[int] = (),
    first_query: int = 0,
) -> list[LayerFigures]:
    """Return gates and selection of each sparse layer on one text.

    Args:
        model: the language model; call this under autocast if it was trained under autocast.
        tokens: tokens of the text, at least one.
        queries: positions whose ranges are returned.
        first_query: first position in the heat map.

    Returns:
        Figures of each layer; none for a dense model.
    """
    found = list[LayerFigures]()

    def note(layer: int, config: NSAConfig, gates: Tensor, blocks: Tensor | None) -> None:
        selection = None
        if blocks is not None:
            selection = selection_figures(blocks, config, queries, first_query)
        found.append(LayerFigures(layer, gate_figures(gates, config), selection))

    was_training = model.training
    try:
        with observed(model.eval(), note):
            model.hidden_states(torch.tensor(tokens, device=model.embedding.weight.device))
    finally:
        model.train(was_training)
    return found


def gate_figures(gates: Tensor, config: NSAConfig) -> dict[str, GateFigures]:
    """Figures of the enabled branches.

    Args:
        gates: ``[T, Hq, 3]``, order (cmp, slc, win).
        config: the sparse pattern.
    """
    found = dict[str, GateFigures]()
    for branch in config.branches:
        values = gates[..., BRANCHES.index(branch)].float()
        ordered = values.flatten().sort().values
        last = ordered.shape[0] - 1
        histogram = torch.histc(ordered, HISTOGRAM_BINS, 0.0, 1.0) / ordered.shape[0]
        found[branch] = GateFigures(
            float(values.double().mean()),
            [float(ordered[round(quantile * last)]) for quantile in QUANTILES],
            histogram.tolist(),
            values.double().mean(0).tolist(),
        )
    return found


def selection_figures(
    blocks: Tensor,
    config: NSAConfig,
    queries: Sequence[int] = (),
    first_query: int = 0,
) -> SelectionFigures:
    """Figures of the blocks that the queries of one text selected.

    Args:
        blocks: block indices int32 ``[T, Hkv, n]``, -1 for unused entries.
        config: the sparse pattern.
        queries: positions whose ranges are returned.
        first_query: first position in the heat map.
    """
    num_tokens, size = blocks.shape[0], config.block_size
    num_blocks = -(-num_tokens // size)
    edges = [1 << power for power in range(max(num_blocks - 1, 0).bit_length())]
    rows, columns = min(num_tokens - first_query, MAP_SIZE), min(num_blocks, MAP_SIZE)
    device = blocks.device
    bounds = torch.tensor(edges, dtype=torch.int64, device=device)
    counts = torch.zeros(len(edges) + 1, dtype=torch.int64, device=device)
    hits = torch.zeros(rows * columns, dtype=torch.int64, device=device)
    keys, distances = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    for start in range(0, num_tokens, _QUERIES_AT_A_TIME):
        ids = blocks[start : start + _QUERIES_AT_A_TIME].long()
        position = torch.arange(start, start + ids.shape[0], device=device)[:, None, None]
        present = ids >= 0
        back = (position // size - ids)[present]
        counts += torch.bincount(torch.bucketize(back, bounds, right=True), minlength=len(counts))
        seen = (position + 1 - ids * size).clamp(max=size) * present
        keys += seen.sum()
        distances += (seen * (position - ids * size) - seen * (seen - 1) // 2).sum()
        row = (position - first_query) * rows // (num_tokens - first_query)
        place = row * columns + ids * columns // num_blocks
        shown = present & (position >= first_query)
        hits += torch.bincount(place[shown], minlength=rows * columns)
    heads, num_keys = blocks.shape[1], int(keys)
    in_row = _stretches(num_tokens - first_query, rows).to(device)
    in_column = _stretches(num_blocks, columns).to(device)
    possible = in_row[:, None] * in_column * heads
    return SelectionFigures(
        block_size=size,
        keys_mean=num_keys / (num_tokens * heads),
        distance_mean=int(distances) / num_keys,
        distance_tokens=[0, *(edge * size for edge in edges)],
        distance_counts=counts.tolist(),
        overlap={lag: overlap(blocks, lag) for lag in LAGS if lag < num_tokens},
        ranges=selected_ranges(blocks, config, queries),
        heat_map=(hits.view(rows, columns) / possible).float().cpu(),
        first_query=first_query,
        blocks=blocks.cpu(),
    )


def _stretches(count: int, parts: int) -> Tensor:
    """Number of items per part; item i of ``count`` is in part ``i * parts // count``."""
    return torch.bincount(torch.arange(count) * parts // count, minlength=parts)


def overlap(blocks: Tensor, lag: int) -> float:
    """Fraction of blocks that the query ``lag`` tokens before also selected.

    Args:
        blocks: int32 ``[T, Hkv, n]``, -1 for unused entries; T is more than ``lag``.
        lag: tokens.
    """
    shared = total = torch.zeros((), dtype=torch.int64, device=blocks.device)
    for start in range(lag, blocks.shape[0], _QUERIES_AT_A_TIME):
        end = min(start + _QUERIES_AT_A_TIME, blocks.shape[0])
        ids, before = blocks[start:end], blocks[start - lag : end - lag]
        both = (ids[..., :, None] == before[..., None, :]).any(-1)
        shared = shared + (both & (ids >= 0)).sum()
        total = total + (ids >= 0).sum()
    return int(shared) / int(total)


def selected_ranges(
    blocks: Tensor, config: NSAConfig, queries: Sequence[int]
) -> dict[int, list[list[Range]]]:
    """Blocks of some queries as token ranges ``[start, end)``, for each KV head.

    Args:
        blocks: int32 ``[T, Hkv, n]`` of one text.
        config: the sparse pattern.
        queries: positions.
    """
    if not queries:
        return {}
    chosen = torch.tensor(queries, device=blocks.device)
    # each query is the last token of its own sequence
    ends = (chosen + 1).cumsum(0)
    ranges = blocks_to_ranges(
        blocks[chosen],
        config,
        cu_seqlens_q=torch.arange(len(queries) + 1, dtype=torch.int32, device=blocks.device),
        cu_seqlens_k=torch.cat((ends.new_zeros(1), ends)).int(),
    ).tolist()
    return {
        query: [[(start, end) for start, end in head if start >= 0] for head in heads]
        for query, heads in zip(queries, ranges, strict=True)
    }


def merged(heads: Sequence[Sequence[Range]]) -> list[Range]:
    """Union of the ranges of all KV heads, ascending, without adjacent or overlapping ranges."""
    found = list[Range]()
    for start, end in sorted(piece for head in heads for piece in head):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
