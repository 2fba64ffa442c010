"""Inspection of a model on a text: lines for a terminal, JSON, heat maps and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from nsa.errors import check
from nsa.lm.config import LMConfig
from nsa.lm.inspection import (
    HISTOGRAM_BINS,
    QUANTILES,
    LayerFigures,
    Range,
    inspect_text,
    merged,
)
from nsa.lm.recorded import save_selections
from nsa.train.checkpoint import find_checkpoint
from nsa.train.config import TrainConfig
from nsa.train.data import Tokenizer, load_tokenizer, open_data
from nsa.train.execution.precision import autocast, choose_device
from nsa.train.run_folder import RunFolder
from nsa.train.runs.inputs import load_model, read_text
from nsa.train.runs.page import figure_element, page, table

_NUM_QUERIES = 8
_EXCERPT = 60  # characters
_BAR_WIDTH = 64
_SHADES = " ░▒▓█"
_MAPS_PER_ROW = 4


@dataclass(frozen=True)
class Inspection:
    """Gates and selected blocks of each layer of a model on a text.

    Attributes:
        run: folder of the run.
        step: optimizer steps of the checkpoint.
        device: where it was computed.
        compute_dtype: ``bf16`` or ``fp32``.
        text: name of the text.
        tokens: tokens of the text.
        tokenizer: tokenizer of the run.
        layers: figures of each layer.
    """

    run: str
    step: int
    device: str
    compute_dtype: str
    text: str
    tokens: list[int]
    tokenizer: Tokenizer
    layers: list[LayerFigures]

    @property
    def about(self) -> str:
        """Checkpoint and text in one line."""
        where = f"step {self.step} of {self.run}, on {self.device} in {self.compute_dtype}"
        return f"{where}; {len(self.tokens):,} tokens of {self.text}"

    def lines(self) -> Iterator[str]:
        """A line for each layer."""
        yield f"checkpoint: {self.about}"
        for layer in self.layers:
            means = (f"{branch} {gates.mean:.3f}" for branch, gates in layer.gates.items())
            line, selection = f"layer {layer.layer}: gates {', '.join(means)}", layer.selection
            if selection is not None:
                line += f" | selected: {selection.keys_mean:,.1f} keys a query, "
                line += f"{selection.distance_mean:,.1f} tokens back, "
                line += f"{selection.overlap.get(1, 0.0):.1%} shared with the query before"
            yield line

    def json(self) -> dict[str, Any]:
        """All figures except the heat maps."""
        return {
            "run": self.run,
            "checkpoint_step": self.step,
            "device": self.device,
            "compute_dtype": self.compute_dtype,
            "text": self.text,
            "num_tokens": len(self.tokens),
            "gate_quantiles": list(QUANTILES),
            "layers": [_layer_json(layer) for layer in self.layers],
        }

    def record(self, path: Path) -> None:
        """Write the selections of all layers, see :func:`nsa.lm.recorded.save_selections`.

        Raises:
            ValueError: the selected branch is disabled.
        """
        found = [layer.selection for layer in self.layers if layer.selection is not None]
        rule = "be given for a model with the selected branch"
        check(bool(found), "inspect", "--record", rule, path)
        save_selections(path, [each.blocks for each in found], found[0].block_size)


def _layer_json(layer: LayerFigures) -> dict[str, Any]:
    found = asdict(layer)
    if layer.selection is not None:
        selection = found["selection"]
        del selection["heat_map"], selection["first_query"], selection["blocks"]
        ranges = layer.selection.ranges.items()
        selection["overlap"] = [
            {"lag_tokens": lag, "share": share} for lag, share in layer.selection.overlap.items()
        ]
        selection["ranges"] = [{"query": query, "kv_heads": heads} for query, heads in ranges]
    return found


def inspect_run(
    folder: RunFolder,
    *,
    checkpoint: str = "last",
    text: str | None = None,
    device: str = "auto",
    num_tokens: int | None = None,
) -> Inspection:
    """Run a checkpoint over a text and record what its layers do.

    Args:
        folder: the run, of a model with Native Sparse Attention.
        checkpoint: ``last``, ``best`` or a number of optimizer steps.
        text: file or folder of text, ``-`` for standard input; None takes the run's validation
            data.
        device: ``auto``, ``cpu`` or ``cuda``.
        num_tokens: first tokens to read at most; None takes the run's ``seq_len``. If the run masks
            documents, only the longest document of these tokens is read.

    Raises:
        ValueError: no such checkpoint or device, a dense model, no text or too little of it.
    """
    config = folder.load_config()
    rule = "be a run of a model with attention nsa"
    check(config.model.attention == "nsa", "inspect", "RUN", rule, config.model.attention)
    check(num_tokens is None or num_tokens > 1, "inspect", "--tokens", "be above 1", num_tokens)
    place, path = choose_device(device), find_checkpoint("inspect", folder.checkpoints, checkpoint)
    count = num_tokens or config.seq_len
    tokens, name = _tokens(folder, config, text, count)
    model, step = load_model(config.model, path, place)
    size = len(tokens)
    queries = sorted({(part + 1) * size // _NUM_QUERIES - 1 for part in range(_NUM_QUERIES)} - {-1})
    with autocast(place, config.compute_dtype):
        layers = inspect_text(model, tokens, queries=queries)
    tokenizer = load_tokenizer(folder.tokenizer)
    dtype, run = config.compute_dtype, str(folder.path)
    return Inspection(run, step, place.type, dtype, name, tokens, tokenizer, layers)


def _tokens(
    folder: RunFolder, config: TrainConfig, text: str | None, count: int
) -> tuple[list[int], str]:
    """Return at most ``count`` tokens of one training-like sequence, and their name."""
    if text is not None:
        source = read_text("inspect", folder, text)
        tokens, separator_id = source.tokens[:count].astype(np.int64), source.separator_id
        name = "standard input" if text == "-" else text
    else:
        data = open_data(
            config.data,
            seed=config.seed,
            seq_len=config.seq_len,
            run_folder_tokenizer=folder.tokenizer,
        )
        enough, rule = data.validation.num_sequences(count) > 0, "fit into the validation text"
        check(enough, "inspect", "--tokens", rule, count, "Give fewer, or another --text.")
        tokens, name = data.validation.sequence(count, 0)[:count], "validation text"
        separator_id = data.validation.separator_id
    if config.data.document_mask and separator_id is not None:
        ends = np.flatnonzero(tokens == separator_id) + 1
        tokens = max(np.split(tokens, ends), key=len)
    return tokens.tolist(), name


# --- the page -------------------------------------------------------------------------------------
def inspection_page(inspection: Inspection) -> str:
    """Return the page as HTML; it needs no other file.

    Args:
        inspection: the figures.
    """
    layers, sections = inspection.layers, dict[str, str]()
    sections["Summary"] = f"<p>{escape(inspection.about)}</p>\n{_summary(layers)}"
    if layers[0].selection is not None:
        caption = (
            "Share of the blocks in a part of the text (to the right) that the queries in a part "
            "of it (downwards) selected, over all KV heads."
        )
        sections["Selected blocks"] = figure_element(
            heat_maps(layers, len(inspection.tokens)), caption
        )
        sections["Ranges of the last query"] = _ranges(inspection)
        caption = (
            "Left: how far back the selected blocks lie, share of all of them. Right: share of a "
            "query's blocks that the query so many tokens before it selected too."
        )
        sections["Distance and overlap"] = figure_element(
            _panels(
                layers,
                ("selected blocks by distance, tokens", _distances),
                ("blocks shared with the query so many tokens before", _overlaps),
            ),
            "Left: share of the selected blocks by their distance. Right: share of the blocks of a "
            "query that the earlier query selected too.",
        )
    bins = [(part + 0.5) / HISTOGRAM_BINS for part in range(HISTOGRAM_BINS)]
    sections["Gates"] = figure_element(
        _panels(
            layers,
            *(
                (f"gate {branch}", lambda layer, of=branch: (bins, layer.gates[of].histogram))
                for branch in layers[0].gates
            ),
        ),
        "Distribution of the gates of each branch over tokens and query heads.",
    )
    return page(f"Inspection of {inspection.run}", sections)


def _summary(layers: Sequence[LayerFigures]) -> str:
    branches = list(layers[0].gates)
    head = ["layer", *(f"gate {branch}, mean" for branch in branches)]
    rows: list[list[object]] = [
        [layer.layer, *(round(layer.gates[branch].mean, 4) for branch in branches)]
        for layer in layers
    ]
    if layers[0].selection is not None:
        head += ["selected keys a query", "distance, tokens", "shared with the query before"]
    for row, layer in zip(rows, layers, strict=True):
        selection = layer.selection
        if selection is not None:
            row += [round(selection.keys_mean, 1), round(selection.distance_mean, 1)]
            row.append(round(selection.overlap.get(1, 0.0), 4))
    return table(head, rows)


def _ranges(inspection: Inspection) -> str:
    query, rows = len(inspection.tokens) - 1, list[list[object]]()
    for layer in inspection.layers:
        assert layer.selection is not None
        for start, end in merged(layer.selection.ranges[query]):
            content = inspection.tokenizer.decode(inspection.tokens[start:end])
            text = content.decode(errors="replace")
            shown = text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
            rows.append([layer.layer, f"{start:,} to {end - 1:,}", shown])
    return table(("layer", "tokens that any KV head selected", "text"), rows)


def _distances(layer: LayerFigures) -> tuple[list[str], list[float]]:
    assert layer.selection is not None
    counts = layer.selection.distance_counts
    labels = [f"{tokens:,}" for tokens in layer.selection.distance_tokens]
    return labels, [count / sum(counts) for count in counts]


def _overlaps(layer: LayerFigures) -> tuple[list[str], list[float]]:
    assert layer.selection is not None
    return [str(lag) for lag in layer.selection.overlap], [*layer.selection.overlap.values()]


def _panels(layers: Sequence[LayerFigures], *panels: tuple[str, Callable[..., Any]]) -> Figure:
    """Plots side by side, each with its title and a curve per layer, dark to light."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    shades = mpl.colormaps["viridis"].resampled(len(layers) + 1)
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, curve) in zip(places, panels, strict=True):
        for number, layer in enumerate(layers):
            style = {"color": shades(number), "label": f"layer {layer.layer}", "marker": "."}
            axes.plot(*curve(layer), linewidth=1.2, **style)
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(layers) <= 12:
            axes.legend(fontsize=7)
    return figure


# --- selections -----------------------------------------------------------------------------------
def check_selects(function: str, argument: str, config: LMConfig) -> None:
    """Raise an error for a model that selects no blocks.

    Args:
        function: the command.
        argument: argument that needs the selected blocks.
        config: the model.

    Raises:
        UserError: the model is dense, or its selected branch is disabled.
    """
    selects = config.attention == "nsa" and "slc" in config.nsa.branches
    rule, found = "be left out for a model without the selected branch", f"{config.attention}"
    check(selects, function, argument, rule, f"attention {found}, branches {config.nsa.branches}")


def selection_lines(layers: Sequence[LayerFigures], query: int) -> list[str]:
    """Lines that show the blocks of one query in each layer: a bar and the merged token ranges.

    Args:
        layers: figures with the ranges of this query.
        query: position of the query.
    """
    lines = list[str]()
    for figures in layers:
        selection = figures.selection
        assert selection is not None
        heads, size = selection.ranges[query], selection.block_size
        if not lines:
            title = f"blocks selected for token {query + 1:,} of the text"
            lines.append(f"{title} (blocks of {size} tokens; bar: share of KV heads and blocks)")
        ranges = " ".join(f"{start}:{end}" for start, end in merged(heads))
        lines.append(f"layer {figures.layer:2} |{_bar(heads, query + 1, size)}| {ranges}")
    return lines


def _bar(heads: Sequence[Sequence[Range]], num_tokens: int, block_size: int) -> str:
    """Bar of the text so far, darker where more KV heads selected more blocks."""
    num_blocks = -(-num_tokens // block_size)
    hits = [0] * num_blocks
    for start, end in (piece for head in heads for piece in head):
        for block in range(start // block_size, -(-end // block_size)):
            hits[block] += 1
    width = min(num_blocks, _BAR_WIDTH)
    bounds = [-(-column * num_blocks // width) for column in range(width + 1)]
    shares = [sum(hits[a:b]) / ((b - a) * len(heads)) for a, b in pairwise(bounds)]
    # Rounded up, so that a single selected block is visible.
    return "".join(_SHADES[ceil(share * (len(_SHADES) - 1))] for share in shares)


def heat_maps(layers: Sequence[LayerFigures], num_tokens: int) -> Figure:
    """Draw a heat map for each layer: queries downwards, keys to the right.

    Args:
        layers: figures with selected blocks, at least one.
        num_tokens: tokens of the text.
    """
    across = min(len(layers), _MAPS_PER_ROW)
    down = -(-len(layers) // across)
    figure = Figure(figsize=(3.2 * across + 1, 2.8 * down + 0.4), layout="constrained")
    places = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat
    colours = mpl.colormaps["viridis"]
    for axes, figures in zip(places, layers, strict=False):
        selection = figures.selection
        assert selection is not None
        first, right = selection.first_query, -(-num_tokens // selection.block_size)
        image = axes.imshow(
            selection.heat_map.numpy(),
            vmin=0,
            vmax=1,
            cmap=colours,
            aspect="auto",
            interpolation="nearest",
            extent=(0, right * selection.block_size, num_tokens, first),
        )
        axes.set_title(f"layer {figures.layer}", fontsize=9)
    for axes in [*places][len(layers) :]:
        axes.set_visible(False)
    figure.supxlabel("key, token", fontsize=9)
    figure.supylabel("query, token", fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="share that was selected", shrink=0.8)
    return figure
