"""What ``nsa inspect`` says about a model and a text: lines, JSON and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa.errors import check
from nsa.lm.inspection import HISTOGRAM_BINS, QUANTILES, LayerFigures, inspect_text, merged
from nsa.lm.recorded import save_selections
from nsa.train.checkpoint import find_checkpoint
from nsa.train.config import TrainConfig
from nsa.train.data import Tokenizer, load_tokenizer, open_data
from nsa.train.execution.precision import autocast, choose_device
from nsa.train.run_folder import RunFolder
from nsa.train.runs.inference import load_model
from nsa.train.runs.page import figure_element, page, table
from nsa.train.runs.selection import heat_maps
from nsa.train.runs.texts import read_text

_NUM_QUERIES = 8
_EXCERPT = 60  # characters


@dataclass(frozen=True)
class Inspection:
    """What the layers of a model did with a text.

    Attributes:
        run: folder of the run.
        step: optimizer steps that the model was trained for.
        device: where it was computed.
        compute_dtype: ``bf16`` or ``fp32``.
        text: what was read.
        tokens: of the text.
        tokenizer: of the run.
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
        """One line: which checkpoint, which text."""
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
        """All figures but the heat maps."""
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
            ValueError: the selected branch is off.
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
    """Run a checkpoint over a text and look at what its layers do.

    Args:
        folder: the run, of a model with Native Sparse Attention.
        checkpoint: ``last``, ``best`` or a number of optimizer steps.
        text: file or folder of text, ``-`` for standard input; None takes the run's validation
            data.
        device: ``auto``, ``cpu`` or ``cuda``.
        num_tokens: tokens at most, the first ones; None takes the run's ``seq_len``. Where the run
            kept documents apart, the longest document among them is the text.

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
    """At most ``count`` tokens of one sequence, as the model was trained on, and their name."""
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
        enough, rule = data.validation.num_windows(count) > 0, "fit into the validation text"
        check(enough, "inspect", "--tokens", rule, count, "Give fewer, or another --text.")
        tokens, name = data.validation.window(count, 0)[:count], "validation text"
        separator_id = data.validation.separator_id
    if config.data.document_mask and separator_id is not None:
        ends = np.flatnonzero(tokens == separator_id) + 1
        tokens = max(np.split(tokens, ends), key=len)
    return tokens.tolist(), name


# --- the page -------------------------------------------------------------------------------------
def inspection_page(inspection: Inspection) -> str:
    """The page as HTML; it needs no other file.

    Args:
        inspection: what was found.
    """
    layers, sections = inspection.layers, dict[str, str]()
    sections["Summary"] = f"<p>{escape(inspection.about)}</p>\n{_summary(layers)}"
    if layers[0].selection is not None:
        caption = (
            "Where each layer looks: share of the blocks in a stretch of the text (to the right) "
            "that the queries of a stretch (downwards) selected, over all KV heads."
        )
        sections["Selected blocks"] = figure_element(
            heat_maps(layers, len(inspection.tokens)), caption
        )
        sections["Ranges of the last query"] = _ranges(inspection)
        caption = (
            "Left: how far back the selected blocks lie, share of all of them. Right: share of a "
            "query's blocks that the query so many tokens before it selected too."
        )
        sections["Distance and overlap"] = figure_element(_distances(layers), caption)
    caption = (
        "Gates of each branch over tokens and query heads. Above: median (line), 25% to 75% and 5% "
        "to 95% of them by layer. Below: their distribution, a line for each layer."
    )
    sections["Gates"] = figure_element(_gates(layers), caption)
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


def _by_layer(axes: Axes, layers: Sequence[LayerFigures], curve: Callable[..., Any]) -> None:
    """A line for each layer, dark to light."""
    shades = mpl.colormaps["viridis"].resampled(len(layers) + 1)
    for number, layer in enumerate(layers):
        x, y = curve(layer)
        label = f"layer {layer.layer}"
        axes.plot(x, y, color=shades(number), linewidth=1.2, marker=".", label=label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(layers) <= 12:
        axes.legend(fontsize=7)


def _distances(layers: Sequence[LayerFigures]) -> Figure:
    def distance(layer: LayerFigures) -> tuple[list[str], list[float]]:
        assert layer.selection is not None
        counts = layer.selection.distance_counts
        labels = [f"{tokens:,}" for tokens in layer.selection.distance_tokens]
        return labels, [count / sum(counts) for count in counts]

    def overlap(layer: LayerFigures) -> tuple[list[str], list[float]]:
        assert layer.selection is not None
        return [str(lag) for lag in layer.selection.overlap], [*layer.selection.overlap.values()]

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _by_layer(left, layers, distance)
    left.set_xlabel("from so many tokens back on")
    left.set_ylabel("share of the selected blocks")
    _by_layer(right, layers, overlap)
    right.set_xlabel("tokens between two queries")
    right.set_ylabel("share of blocks in common")
    return figure


def _gates(layers: Sequence[LayerFigures]) -> Figure:
    branches = list(layers[0].gates)
    figure = Figure(figsize=(11, 6), layout="constrained")
    above, below = figure.subplots(2, len(branches), squeeze=False)
    numbers = [layer.layer for layer in layers]
    middles = [(part + 0.5) / HISTOGRAM_BINS for part in range(HISTOGRAM_BINS)]
    for upper, lower, branch in zip(above, below, branches, strict=True):
        low, lower_half, median, upper_half, high = zip(
            *(layer.gates[branch].quantiles for layer in layers), strict=True
        )
        upper.fill_between(numbers, low, high, color="#4477aa", alpha=0.2)
        upper.fill_between(numbers, lower_half, upper_half, color="#4477aa", alpha=0.4)
        upper.plot(numbers, median, color="#4477aa", marker=".")
        upper.set_title(branch, fontsize=10)
        upper.set_xlabel("layer")
        upper.xaxis.get_major_locator().set_params(integer=True)
        upper.set_ylim(0, 1)
        _by_layer(lower, layers, lambda layer, of=branch: (middles, layer.gates[of].histogram))
        lower.set_xlabel("gate")
    return figure
