"""Selected blocks and gates of each layer on one text (``nsa inspect``), from a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from nsa.config import BRANCHES, NSAConfig
from nsa.errors import check
from nsa.files import new_file
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops.attention import BranchInputs
from nsa.ops.index_loss import block_recall, index_loss
from nsa.train.checkpoint import find_checkpoint
from nsa.train.config import TrainConfig
from nsa.train.execution.precision import autocast, choose_device
from nsa.train.run_folder import RunFolder
from nsa.train.runs.evaluation import load_model, open_run_data, read_text
from nsa.train.runs.report import Plot, figure_element, layers_figure, page, table
from nsa.train.telemetry.metrics import Row

LAGS = (1, 2, 4, 8, 16, 32, 64)  # tokens
HISTOGRAM_BINS = 20
MAP_SIZE = 128
RECALL_QUERIES = 256  # about as many, evenly spread
_NUM_QUERIES = 8
_BAR_WIDTH = 64
_SHADES = " ░▒▓█"
_MAPS_PER_ROW = 4

Range = tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """Gates and selection of a layer on a text.

    Attributes:
        layer: index of the layer, from 0.
        gates: by enabled branch over all tokens and query heads: ``mean``; ``histogram``,
            fraction in each of ``HISTOGRAM_BINS`` equal parts of 0 to 1.
        selection: None if the selected branch is disabled, otherwise ``block_size``;
            ``keys_mean``, visible selected keys of a query, mean over queries and KV heads;
            ``distance_mean``, mean distance from a query back to these keys, tokens;
            ``distance_tokens`` and ``distance_counts``, lower bounds of bins 0, 1, 2, 4, .. blocks
            before the query's own, in tokens, and the number of selected blocks in each bin;
            ``overlap``, fraction of a query's blocks that the query ``lag_tokens`` before it also
            selected, per KV head; ``ranges`` of some queries, selected blocks of each KV head as
            token ranges ``[start, end)``, adjacent blocks merged; ``recall``, kept attention mass
            outside the forced blocks, as a fraction of what the best blocks would keep, over some
            queries (None if all blocks are forced); with scores ``index`` also ``index_loss``, see
            :func:`nsa.index_loss`, nats.
        blocks: block indices int32 ``[T, Hkv, n]`` on the CPU, -1 for unused entries; without
            entries if the selected branch is disabled.
    """

    layer: int
    gates: dict[str, dict[str, Any]]
    selection: dict[str, Any] | None
    blocks: NDArray[np.int32]


@dataclass(frozen=True)
class Inspection:
    """Layers of a model on a text.

    Attributes:
        about: checkpoint and text, as in the JSON.
        tokens: tokens of the text.
        layers: the layers with sparse attention.
    """

    about: dict[str, Any]
    tokens: list[int]
    layers: list[Layer]

    def lines(self) -> Iterator[str]:
        """Lines for a terminal: the checkpoint, then each layer."""
        yield f"checkpoint: {_about(self)}"
        for layer in self.layers:
            means = (f"{branch} {gates['mean']:.3f}" for branch, gates in layer.gates.items())
            line = f"layer {layer.layer}: gates {', '.join(means)}"
            if layer.selection is not None:
                keys, distance, shared = _summary(layer.selection)
                line += f" | selected: {keys:,.1f} keys a query, {distance:,.1f} tokens back, "
                line += f"{shared:.1%} shared with the query before"
                if layer.selection["recall"] is not None:
                    line += f", recall {layer.selection['recall']:.1%}"
                if "index_loss" in layer.selection:
                    line += f", index loss {layer.selection['index_loss']:.4f}"
            yield line

    def json(self) -> dict[str, Any]:
        """All values except the blocks."""
        names = ("layer", "gates", "selection")
        layers = [{name: getattr(layer, name) for name in names} for layer in self.layers]
        return {**self.about, "layers": layers}

    def record(self, path: Path) -> None:
        """Write the block indices of each layer, ``[Hkv, n, T]``, and the block size as ``.npz``.

        The block size is a number, or one number per layer if layers differ.

        Queries come last: neighbours are nearly equal, which compresses well.

        Raises:
            UserError: the selected branch is disabled.
        """
        found = _with_selection(self.layers)
        rule = "be given for a model with the selected branch"
        check(bool(found), "--record", rule, path)
        arrays: dict[str, Any] = {
            f"layer{layer.layer}": layer.blocks.transpose(1, 2, 0) for layer in found
        }
        sizes = [layer.selection["block_size"] for layer in found if layer.selection]
        arrays["block_size"] = np.array(sizes if len({*sizes}) > 1 else sizes[0])
        with new_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)


def _with_selection(layers: Iterable[Layer]) -> list[Layer]:
    return [layer for layer in layers if layer.selection is not None]


@torch.no_grad()
def inspect_text(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    queries: Sequence[int] = (),
) -> list[Layer]:
    """Return gates and selection of each sparse layer on one text.

    Args:
        model: the language model, not compiled; call this under autocast if it was trained so.
        tokens: tokens of the text, at least one.
        queries: positions whose ranges are returned.

    Returns:
        The sparse layers; none for a dense model.
    """
    found = list[Layer]()

    def observe(layer: int, config: NSAConfig, inputs: BranchInputs, blocks: Tensor | None) -> None:
        ids, selection = np.empty((0, 0, 0), np.int32), None
        if blocks is not None:
            ids = blocks.cpu().numpy()
            selection = selection_figures(ids, config.block_size, queries)
            selection |= recall_figures(inputs, blocks, config)
        found.append(Layer(layer, gate_figures(inputs.gates, config), selection, ids))

    layers = [layer.attention for layer in model.decoder_layers()]
    was_training = model.training
    try:
        for number, layer in enumerate(layers):
            if isinstance(layer, NativeSparseAttention):
                layer.observer = partial(observe, number, layer.config)
        model.eval().hidden_states(torch.tensor(tokens, device=model.embedding.weight.device))
    finally:
        model.train(was_training)
        for layer in layers:
            if isinstance(layer, NativeSparseAttention):
                layer.observer = None
    return found


def gate_figures(gates: Tensor, config: NSAConfig) -> dict[str, dict[str, Any]]:
    """Values of :class:`Layer` for each enabled branch.

    Args:
        gates: ``[T, Hq, 3]``, order (cmp, slc, win).
        config: the sparse pattern.
    """
    found = dict[str, dict[str, Any]]()
    for branch in config.branches:
        values = gates[..., BRANCHES.index(branch)].float()
        histogram = torch.histc(values, HISTOGRAM_BINS, 0.0, 1.0) / values.numel()
        found[branch] = {"mean": float(values.double().mean()), "histogram": histogram.tolist()}
    return found


def recall_figures(
    inputs: BranchInputs, blocks: Tensor, config: NSAConfig
) -> dict[str, float | None]:
    """``recall`` and ``index_loss`` of :class:`Layer`.

    Args:
        inputs: inputs of the layer's attention for one text.
        blocks: block indices ``[T, Hkv, n]``, -1 for unused entries.
        config: the sparse pattern.
    """
    q, k = inputs.q, inputs.k_slc
    assert k is not None
    num_tokens = len(blocks)
    rows = torch.arange(0, num_tokens, max(1, num_tokens // RECALL_QUERIES), device=q.device)
    kept, best = block_recall(q, k, blocks, config, rows)
    figures = {"recall": float(kept.sum() / best.sum()) if best.any() else None}
    if inputs.q_idx is not None and inputs.k_idx is not None:
        total, number = index_loss(inputs.q_idx, inputs.k_idx, q, k, blocks, config)
        figures["index_loss"] = float(total / number.clamp(min=1))
    return figures


def selection_figures(
    blocks: NDArray[np.int32], size: int, queries: Sequence[int] = ()
) -> dict[str, Any]:
    """Values of :class:`Layer` for the blocks that the queries of one text selected.

    Args:
        blocks: block indices ``[T, Hkv, n]``, -1 for unused entries.
        size: tokens of a block.
        queries: positions whose ranges are returned.
    """
    ids = blocks.astype(np.int64)
    num_tokens, heads, _ = ids.shape
    position, present = np.arange(num_tokens)[:, None, None], ids >= 0
    edges = [1 << power for power in range(((num_tokens - 1) // size).bit_length())]
    bins = np.digitize((position // size - ids)[present], edges)
    seen = np.minimum(position + 1 - ids * size, size) * present
    distances = (seen * (position - ids * size) - seen * (seen - 1) // 2).sum()
    return {
        "block_size": size,
        "keys_mean": int(seen.sum()) / (num_tokens * heads),
        "distance_mean": int(distances) / int(seen.sum()),
        "distance_tokens": [0, *(edge * size for edge in edges)],
        "distance_counts": np.bincount(bins, minlength=len(edges) + 1).tolist(),
        "overlap": [
            {"lag_tokens": lag, "share": _overlap(ids, lag)} for lag in LAGS if lag < num_tokens
        ],
        "ranges": [
            {"query": query, "kv_heads": [_ranges([head], query, size) for head in ids[query]]}
            for query in queries
        ],
    }


def _overlap(ids: NDArray[np.int64], lag: int) -> float:
    """Fraction of blocks that the query ``lag`` tokens before also selected."""
    now, before = ids[lag:], ids[:-lag]
    shared = sum((now == before[..., n, None])[now >= 0].sum() for n in range(ids.shape[-1]))
    return int(shared) / int((now >= 0).sum())


def _ranges(heads: Iterable[Iterable[int]], query: int, size: int) -> list[Range]:
    """Token ranges that any of some KV heads selected, ascending, adjacent blocks merged."""
    found = list[Range]()
    for block in sorted({int(block) for head in heads for block in head} - {-1}):
        start, end = block * size, min(block * size + size, query + 1)
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found


def heat_map(blocks: NDArray[np.int32], size: int, first_query: int) -> NDArray[np.float32]:
    """Fraction of the blocks in an interval of a text that queries in an interval selected.

    Args:
        blocks: block indices ``[T, Hkv, n]``, -1 for unused entries.
        size: tokens of a block.
        first_query: position of the query in the first row.

    Returns:
        ``[rows, columns]``, intervals of queries and of blocks, over all KV heads.
    """
    num_tokens, heads, _ = blocks.shape
    num_queries, num_blocks = num_tokens - first_query, -(-num_tokens // size)
    rows, columns = min(num_queries, MAP_SIZE), min(num_blocks, MAP_SIZE)
    row = np.arange(num_queries) * rows // num_queries
    column = np.arange(num_blocks) * columns // num_blocks
    hits, shown = np.zeros((rows, columns), np.float32), blocks[first_query:]
    np.add.at(hits, (np.broadcast_to(row[:, None, None], shown.shape), column[shown]), shown >= 0)
    possible = np.outer(np.bincount(row), np.bincount(column)) * heads
    return hits / possible.astype(np.float32)


# --- a run ----------------------------------------------------------------------------------------
def inspect_run(
    folder: RunFolder,
    *,
    checkpoint: str = "last",
    text: str | None = None,
    device: str = "auto",
    num_tokens: int | None = None,
) -> Inspection:
    """Inspect the layers of a checkpoint on a text.

    Args:
        folder: the run, of a model with Native Sparse Attention.
        checkpoint: ``last``, ``best`` or a number of optimizer steps.
        text: file or folder of text, ``-`` for standard input; None takes the run's validation
            data.
        device: ``auto``, ``cpu`` or ``cuda``.
        num_tokens: first tokens to read at most; None takes the run's ``seq_len``. If the run masks
            documents, only the longest document of these tokens is read.

    Raises:
        UserError: no such checkpoint or device, a dense model, no text or too little of it.
    """
    config = folder.load_config()
    rule, kind = "be a run of a model with attention nsa", config.model.attention_kind
    check(kind != "dense", "RUN", rule, kind)
    check(num_tokens is None or num_tokens > 1, "--tokens", "be above 1", num_tokens)
    on, path = choose_device(device), find_checkpoint(folder.checkpoints, checkpoint)
    tokens, name = _tokens(folder, config, text, num_tokens or config.seq_len)
    model, step = load_model(config.model, path, on)
    ends = {(part + 1) * len(tokens) // _NUM_QUERIES - 1 for part in range(_NUM_QUERIES)}
    with autocast(on, config.compute_dtype):
        layers = inspect_text(model, tokens, queries=sorted(ends - {-1}))
    about = {
        "run": str(folder.path),
        "checkpoint_step": step,
        "device": on.type,
        "compute_dtype": config.compute_dtype,
        "text": name,
        "num_tokens": len(tokens),
    }
    return Inspection(about, tokens, layers)


def _tokens(
    folder: RunFolder, config: TrainConfig, text: str | None, count: int
) -> tuple[list[int], str]:
    """Return at most ``count`` tokens of one training-like sequence, and their name."""
    if text is not None:
        source = read_text(folder, text)
        tokens, separator_id = source.tokens[:count].astype(np.int64), source.separator_id
        name = "standard input" if text == "-" else text
    else:
        data = open_run_data(folder, config)
        enough, rule = data.validation.num_sequences(count) > 0, "fit into the validation text"
        check(enough, "--tokens", rule, count, "Give fewer, or another --text.")
        tokens, name = data.validation.sequence(count, 0)[:count], "validation text"
        separator_id = data.validation.separator_id
    if config.data.document_mask and separator_id is not None:
        ends = np.flatnonzero(tokens == separator_id) + 1
        tokens = max(np.split(tokens, ends), key=len)
    return tokens.tolist(), name


def _about(found: Inspection) -> str:
    return (
        "step {checkpoint_step} of {run}, on {device} in {compute_dtype}; "
        "{num_tokens:,} tokens of {text}"
    ).format(**found.about)


def _summary(selection: dict[str, Any]) -> tuple[float, float, float]:
    """Keys of a query, their distance, and the overlap with the query before."""
    shared = selection["overlap"][0]["share"] if selection["overlap"] else 0.0
    return selection["keys_mean"], selection["distance_mean"], shared


# --- the page -------------------------------------------------------------------------------------
def inspection_page(found: Inspection) -> str:
    """Return the page as HTML; it needs no other file."""
    layers, numbers = found.layers, [layer.layer for layer in found.layers]
    curves = [row for layer in layers for row in _curves(layer)]
    branches = [branch for branch in BRANCHES if any(branch in x.gates for x in layers)]
    head = ["layer", *(f"gate {branch}, mean" for branch in branches)]
    rows: list[list[object]] = [
        [x.layer, *(round(x.gates[b]["mean"], 4) if b in x.gates else None for b in branches)]
        for x in layers
    ]
    parts = dict[str, str]()
    if _with_selection(layers):
        head += ["selected keys a query", "distance, tokens", "shared with the query before"]
        head += ["recall"]
        for row, layer in zip(rows, layers, strict=True):
            if layer.selection is not None:
                figures = (*_summary(layer.selection), layer.selection["recall"])
                row += [None if value is None else round(value, 4) for value in figures]
        parts["Selected blocks"] = figure_element(
            heat_maps(layers),
            "Share of the blocks in a part of the text (to the right) that the queries in a part "
            "of it (downwards) selected, over all KV heads.",
        )
        plots = [Plot("blocks by distance", "distance"), Plot("blocks shared", "shared")]
        parts["Distance and overlap"] = figure_element(
            layers_figure(curves, numbers, plots, "tokens before the query"),
            "Left: share of the selected blocks by their distance. Right: share of the blocks of a "
            "query that the earlier query selected too.",
        )
    plots = [Plot(f"gate {branch}", f"gate_{branch}") for branch in branches]
    parts["Gates"] = figure_element(
        layers_figure(curves, numbers, plots, "gate, percent"),
        "Distribution of the gates of each branch over tokens and query heads.",
    )
    summary = f"<p>{escape(_about(found))}</p>\n{table(head, rows)}"
    return page(f"Inspection of {found.about['run']}", {"Summary": summary, **parts})


def _curves(layer: Layer) -> Iterator[Row]:
    """Points of the curves of a layer, as rows of metrics."""
    end = f"_layer_{layer.layer}"
    for branch, gates in layer.gates.items():
        for part, share in enumerate(gates["histogram"]):
            yield {"step": 100 * part // HISTOGRAM_BINS, f"gate_{branch}{end}": share}
    if layer.selection is None:
        return
    figures = layer.selection
    counts = figures["distance_counts"]
    for tokens, count in zip(figures["distance_tokens"], counts, strict=True):
        yield {"step": tokens, f"distance{end}": count / sum(counts)}
    for one in figures["overlap"]:
        yield {"step": one["lag_tokens"], f"shared{end}": one["share"]}


# --- selections of one query ----------------------------------------------------------------------
def check_selects(argument: str, config: LMConfig) -> None:
    """Raise an error for a model that selects no blocks.

    Args:
        argument: argument that needs the selected blocks.
        config: the model.

    Raises:
        UserError: the model is dense, or its selected branch is disabled.
    """
    kinds = [(kind.attention, kind.nsa.branches) for kind in config.kinds]
    selects = any(attention == "nsa" and "slc" in branches for attention, branches in kinds)
    rule = "be left out for a model without the selected branch"
    check(selects, argument, rule, "attention {}, branches {}".format(*kinds[0]))


def selection_lines(layers: Sequence[Layer]) -> Iterator[str]:
    """Lines that show the blocks of the last query in each layer: a bar and the token ranges."""
    for number, layer in enumerate(_with_selection(layers)):
        assert layer.selection is not None
        size, query, heads = layer.selection["block_size"], len(layer.blocks) - 1, layer.blocks[-1]
        if number == 0:
            title = f"blocks selected for token {query + 1:,} of the text"
            yield f"{title} (blocks of {size} tokens; bar: share of KV heads and blocks)"
        ranges = " ".join(f"{start}:{end}" for start, end in _ranges(heads, query, size))
        yield f"layer {layer.layer:2} |{_bar(heads.tolist(), query // size + 1)}| {ranges}"


def _bar(heads: Sequence[Sequence[int]], num_blocks: int) -> str:
    """Bar of the text so far, darker where more KV heads selected more blocks."""
    hits = [sum(block in head for head in heads) for block in range(num_blocks)]
    width = min(num_blocks, _BAR_WIDTH)
    bounds = [-(-column * num_blocks // width) for column in range(width + 1)]
    fractions = [sum(hits[a:b]) / ((b - a) * len(heads)) for a, b in pairwise(bounds)]
    # Rounded up, so that a single selected block is visible.
    return "".join(_SHADES[ceil(one * (len(_SHADES) - 1))] for one in fractions)


def heat_maps(layers: Sequence[Layer], first_query: int = 0) -> Figure:
    """Draw a heat map for each layer: queries downwards, keys to the right.

    Args:
        layers: layers, of which at least one has selected blocks.
        first_query: position of the query in the first row.
    """
    layers = _with_selection(layers)
    across = min(len(layers), _MAPS_PER_ROW)
    down = -(-len(layers) // across)
    figure = Figure(figsize=(3.2 * across + 1, 2.8 * down + 0.4), layout="constrained")
    every = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, layer in zip(every, layers, strict=False):
        assert layer.selection is not None
        size, num_tokens = layer.selection["block_size"], len(layer.blocks)
        image = axes.imshow(
            heat_map(layer.blocks, size, first_query),
            vmin=0,
            vmax=1,
            cmap="viridis",
            aspect="auto",
            interpolation="nearest",
            extent=(0, -(-num_tokens // size) * size, num_tokens, first_query),
        )
        axes.set_title(f"layer {layer.layer}", fontsize=9)
    for axes in every[len(layers) :]:
        axes.set_visible(False)
    figure.supxlabel("key, token", fontsize=9)
    figure.supylabel("query, token", fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="share that was selected", shrink=0.8)
    return figure
