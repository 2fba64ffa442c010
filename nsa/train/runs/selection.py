"""Where the layers of a model looked: lines for a terminal, and heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import matplotlib as mpl
from matplotlib.figure import Figure

from nsa.errors import check
from nsa.lm.config import LMConfig
from nsa.lm.inspection import LayerFigures, Range, merged

_BAR_WIDTH = 64
_SHADES = " ░▒▓█"
_ACROSS = 4  # heat maps beside each other


def check_selects(function: str, argument: str, config: LMConfig) -> None:
    """Refuse a model that selects no blocks.

    Args:
        function: the command.
        argument: what asks for the selected blocks.
        config: the model.

    Raises:
        UserError: it is dense, or its selected branch is off.
    """
    selects = config.attention == "nsa" and "slc" in config.nsa.branches
    rule, found = "be left out for a model without the selected branch", f"{config.attention}"
    check(selects, function, argument, rule, f"attention {found}, branches {config.nsa.branches}")


def selection_lines(layers: Sequence[LayerFigures], query: int) -> list[str]:
    """Where each layer looked for one query: a bar over the text, and the merged token ranges.

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
            title = f"where the layers look for token {query + 1:,} of the text"
            lines.append(f"{title} (blocks of {size} tokens; bar: share of KV heads and blocks)")
        ranges = " ".join(f"{start}:{end}" for start, end in merged(heads))
        lines.append(f"layer {figures.layer:2} |{_bar(heads, query + 1, size)}| {ranges}")
    return lines


def _bar(heads: Sequence[Sequence[Range]], num_tokens: int, block_size: int) -> str:
    """The text so far from left to right, darker where more KV heads selected more blocks."""
    num_blocks = -(-num_tokens // block_size)
    hits = [0] * num_blocks
    for start, end in (piece for head in heads for piece in head):
        for block in range(start // block_size, -(-end // block_size)):
            hits[block] += 1
    width = min(num_blocks, _BAR_WIDTH)
    bounds = [-(-column * num_blocks // width) for column in range(width + 1)]
    shares = [sum(hits[a:b]) / ((b - a) * len(heads)) for a, b in pairwise(bounds)]
    # Rounded up: a single block that was selected can be seen.
    return "".join(_SHADES[ceil(share * (len(_SHADES) - 1))] for share in shares)


def heat_maps(layers: Sequence[LayerFigures], num_tokens: int) -> Figure:
    """A heat map for each layer: queries downwards, the text that they may look at to the right.

    Args:
        layers: figures with selected blocks, at least one.
        num_tokens: of the text.
    """
    across = min(len(layers), _ACROSS)
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
    figure.supxlabel("token that may be read", fontsize=9)
    figure.supylabel("token that reads", fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="share that was selected", shrink=0.8)
    return figure
