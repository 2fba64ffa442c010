"""What sparse models select: gates, distances, and how much neighbouring queries share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nsa.config import NSAConfig
from nsa.lm.recorded import load_selections
from nsa.train.load import load_config
from tools.evidence.arms import BROKEN, Arm, Group, broken_line
from tools.evidence.parts import Figures, Part, table_of

LAYERS = (
    "layer | compressed=cmp:.3f | selected=slc:.3f | window=win:.3f | "
    "tokens back=distance_mean:,.0f | overlap=shared:.1% | overlap of free blocks=kept:.1%"
)
ABOUT = (
    "`nsa inspect` of one sequence, the beginning of the validation text: mean gates, how far back "
    "the selected keys lie, and the share of a query's blocks that the query before selected too. "
    "Last column: the same share of the free, that is, not forced, blocks of queries that have "
    "more than n blocks with their own, but for the first of them, from `selected-*.npz` beside "
    "the named file. Last row: what a selector would have that draws its free blocks at random, "
    "each query anew."
)


def selection(groups: Iterable[Group]) -> list[Part]:
    """Gates and selected blocks of each layer of each sparse model."""
    parts = list[Part]()
    for arm in (arm for group in groups for arm in group.arms):
        for path in sorted(
            arm.folder.glob("inspect-*.json"), key=lambda path: (len(path.name), path)
        ):
            try:
                parts += _inspected(arm, path.stem.partition("-")[2])
            except BROKEN as error:
                parts.append(broken_line(arm.rows, path, error))
    return [ABOUT, *parts] if parts else []


def _inspected(arm: Arm, name: str) -> list[Part]:
    """A sentence and a table on ``inspect-<name>.json``."""
    found, pattern = (
        arm.read(f"inspect-{name}.json"),
        load_config(arm.folder / "config.yaml").model.nsa,
    )
    num_tokens, kept = found["num_tokens"], free_overlap(arm, name, pattern)
    rows: list[Figures] = [
        {
            "layer": layer["layer"],
            **{branch: gates["mean"] for branch, gates in layer["gates"].items()},
            "distance_mean": layer["selection"]["distance_mean"],
            "shared": layer["selection"]["overlap"][0]["share"],
            "kept": kept[n] if kept else None,
        }
        for n, layer in enumerate(found["layers"])
    ]
    shared, of_free = random_overlap(pattern, num_tokens)
    rows.append({"layer": "random", "shared": shared, "kept": of_free})
    forced, number = pattern.num_init_blocks + pattern.num_local_blocks, pattern.num_selected_blocks
    about = (
        f"{num_tokens:,} tokens; n = {number} blocks a query, {forced} of them forced "
        f"({forced / number:.1%}). From {arm.code(f'inspect-{name}.json')}."
    )
    return [about, table_of(LAYERS, rows)]


def free_overlap(arm: Arm, name: str, pattern: NSAConfig) -> list[float | None]:
    """Share of the blocks selected freely that the query before had selected too, of each layer.

    Queries with at most n blocks before them select all, and do not count.

    Args:
        arm: the run.
        name: of the recorded text: ``selected-<name>.npz``.
        pattern: of the model.

    Returns:
        None for a layer in which no query counts; nothing without the recorded file.
    """
    path, found = arm.folder / f"selected-{name}.npz", list[float | None]()
    if not path.exists():
        return []
    layers, size = load_selections(path)
    first = pattern.num_selected_blocks * size
    for layer in layers:
        blocks = layer.numpy()[first:]
        own = np.arange(first, first + len(blocks))[:, None, None] // size
        is_local = blocks > own - pattern.num_local_blocks
        is_free = ~(is_local | (blocks < pattern.num_init_blocks))[1:]
        is_kept = (blocks[1:, :, :, None] == blocks[:-1, :, None, :]).any(-1)
        found.append(float(is_kept[is_free].mean()) if is_free.any() else None)
    return found


def random_overlap(pattern: NSAConfig, num_tokens: int) -> tuple[float, float | None]:
    """The expected overlaps of a selector that draws its free blocks at random, each query anew.

    Args:
        pattern: how many blocks there are and which are forced.
        num_tokens: of the text.

    Returns:
        Share of a query's blocks that the query before selected too, and that of the free blocks
        as :func:`free_overlap` counts them; None where no query counts.
    """
    size, number = pattern.block_size, pattern.num_selected_blocks
    own = np.arange(num_tokens)[:, None] // size
    blocks = np.arange(own[-1, 0] + 1)
    is_past = blocks <= own
    is_forced = is_past & (
        (blocks < pattern.num_init_blocks) | (blocks > own - pattern.num_local_blocks)
    )
    is_free = is_past & ~is_forced
    drawn = np.maximum(number - is_forced.sum(1), 0) / np.maximum(is_free.sum(1), 1)
    free = is_free * np.minimum(drawn, 1.0)[:, None]  # [T, num_blocks] probabilities
    chance = is_forced + free
    both = chance[1:] * chance[:-1]
    first = number * size
    late = (free[1:] * chance[:-1])[first:].sum(), free[1:][first:].sum()
    return float(both.sum() / chance[1:].sum()), float(late[0] / late[1]) if late[1] else None
