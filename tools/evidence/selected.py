"""What sparse models select: gates, distances, and how much neighbouring queries share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.bench.points import RECORDED
from nsa.bench.rows import measured, read_rows
from nsa.config import NSAConfig
from nsa.lm.recorded import load_selections
from nsa.ops.selected.types import queries_of_tile
from nsa.train.load import load_config
from tools.evidence.arms import BROKEN, Arm, Group, broken_line
from tools.evidence.parts import Figures, Part, table_of

LAYERS = (
    "layer | compressed=cmp:.3f | selected=slc:.3f | window=win:.3f | "
    "tokens back=distance_mean:,.0f | overlap=shared:.1% | overlap of free blocks=kept:.1% | "
    "blocks of a tile=of_tile:.1f"
)
ABOUT = (
    "`nsa inspect` of one sequence, the beginning of the validation text: mean gates, how far back "
    "the selected keys lie, and the share of a query's blocks that the query before selected too. "
    "Overlap of free blocks: the same share of the free, that is, not forced, blocks of queries "
    "that have more than n blocks with their own, but for the first of them. Blocks of a tile: "
    "how many different ones the queries of a tile of the kernels select together, on average "
    "(what it decides: [selected branch](../kernels/selected.md#which-algorithm-runs)). Both from "
    "`selected-*.npz` beside the named file. Last row: what a selector would have that draws its "
    "free blocks at random, each query anew."
)
TIMES = "mode | S=seq_len:, | ms, recorded=recorded:.3f | ms, random=random:.3f | ratio=ratio:.2f"


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
    num_tokens = found["num_tokens"]
    path, kept, of_tiles = arm.folder / f"selected-{name}.npz", list[float | None](), list[float]()
    if path.exists():
        layers = [layer.numpy() for layer in load_selections(path)[0]]
        kept, of_tiles = free_overlap(layers, pattern), blocks_of_tiles(layers, pattern)
    rows: list[Figures] = [
        {
            "layer": layer["layer"],
            **{branch: gates["mean"] for branch, gates in layer["gates"].items()},
            "distance_mean": layer["selection"]["distance_mean"],
            "shared": layer["selection"]["overlap"][0]["share"],
            "kept": kept[n] if kept else None,
            "of_tile": of_tiles[n] if of_tiles else None,
        }
        for n, layer in enumerate(found["layers"])
    ]
    shared, of_free = random_overlap(pattern, num_tokens)
    of_tile = random_blocks_of_tiles(pattern, num_tokens)
    rows.append({"layer": "random", "shared": shared, "kept": of_free, "of_tile": of_tile})
    forced, number = pattern.num_init_blocks + pattern.num_local_blocks, pattern.num_selected_blocks
    about = (
        f"{num_tokens:,} tokens; n = {number} blocks a query, {forced} of them forced "
        f"({forced / number:.1%}); {queries_of_tile(pattern.group_size)} queries a tile. "
        f"From {arm.code(f'inspect-{name}.json')}."
    )
    return [about, table_of(LAYERS, rows)]


def free_overlap(layers: Sequence[NDArray[Any]], pattern: NSAConfig) -> list[float | None]:
    """Share of the blocks selected freely that the query before had selected too, of each layer.

    Queries with at most n blocks before them select all, and do not count.

    Args:
        layers: selections ``[T, Hkv, n]`` of each layer, -1 where a query has fewer blocks.
        pattern: of the model.

    Returns:
        None for a layer in which no query counts.
    """
    found, size = list[float | None](), pattern.block_size
    first = pattern.num_selected_blocks * size
    for layer in layers:
        blocks = layer[first:]
        own = np.arange(first, first + len(blocks))[:, None, None] // size
        is_local = blocks > own - pattern.num_local_blocks
        is_free = ~(is_local | (blocks < pattern.num_init_blocks))[1:]
        is_kept = (blocks[1:, :, :, None] == blocks[:-1, :, None, :]).any(-1)
        found.append(float(is_kept[is_free].mean()) if is_free.any() else None)
    return found


def blocks_of_tiles(layers: Sequence[NDArray[Any]], pattern: NSAConfig) -> list[float]:
    """Mean number of different blocks that the queries of a tile select, of each layer.

    Args:
        layers: see :func:`free_overlap`.
        pattern: of the model.
    """
    found = []
    for layer in layers:
        # By tile and KV head; block 0 stands for none.
        tiles = _tiles(layer + 1, pattern).transpose(0, 2, 1, 3)
        blocks = np.sort(tiles.reshape(*tiles.shape[:2], -1))
        is_new = np.diff(blocks, prepend=0) > 0
        found.append(float(is_new.sum(-1).mean()))
    return found


def _tiles(x: NDArray[Any], pattern: NSAConfig) -> NDArray[Any]:
    """Rows of queries ``[T, ..]`` as ``[tiles, queries, ..]``, the last tile filled with 0."""
    queries = queries_of_tile(pattern.group_size)
    missing = np.zeros((-len(x) % queries, *x.shape[1:]), x.dtype)
    return np.concatenate([x, missing]).reshape(-1, queries, *x.shape[1:])


def _chances(pattern: NSAConfig, num_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of a selector that draws its free blocks at random: ``[T, blocks]`` probabilities, twice.

    That a query selects a block, and that it does so freely.
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
    free = is_free * np.minimum(drawn, 1.0)[:, None]
    return is_forced + free, free


def random_overlap(pattern: NSAConfig, num_tokens: int) -> tuple[float, float | None]:
    """The expected overlaps of a selector that draws its free blocks at random, each query anew.

    Args:
        pattern: how many blocks there are and which are forced.
        num_tokens: of the text.

    Returns:
        Share of a query's blocks that the query before selected too, and that of the free blocks
        as :func:`free_overlap` counts them; None where no query counts.
    """
    chance, free = _chances(pattern, num_tokens)
    both = chance[1:] * chance[:-1]
    first = pattern.num_selected_blocks * pattern.block_size
    late = (free[1:] * chance[:-1])[first:].sum(), free[1:][first:].sum()
    return float(both.sum() / chance[1:].sum()), float(late[0] / late[1]) if late[1] else None


def random_blocks_of_tiles(pattern: NSAConfig, num_tokens: int) -> float:
    """What :func:`blocks_of_tiles` is expected to find of a selector that draws at random."""
    chance, _ = _chances(pattern, num_tokens)
    return float((1 - (1 - _tiles(chance, pattern)).prod(1)).sum(1).mean())


def timed(results: Path) -> list[Part]:
    """Time of the selected branch on selections of a trained model beside random ones.

    Args:
        results: folder with rows of ``nsa bench`` in ``*-recorded.jsonl``.
    """
    parts = list[Part]()
    for path in sorted(results.glob("*-recorded.jsonl")):
        rows = measured(read_rows([path]))
        ms = {(row.choice, row.mode, row.seq_len): row.ms_p50 or 0 for row in rows}
        compared: list[Figures] = [
            {"mode": mode, "seq_len": seq_len, "recorded": own, "random": random}
            | {"ratio": own / random}
            for (choice, mode, seq_len), own in ms.items()
            if choice == RECORDED and (random := ms.get(("random", mode, seq_len)))
        ]
        if compared:
            first = rows[0]
            about = (
                "Time of the selected branch on recorded selections of a trained model, beside "
                f"random ones of the same run: {first.gpu}, shape {first.shape}, {first.dtype}; "
                "which recorded file was read, the rows do not say. "
                f"From `{path.name}` of `benchmarks/results`."
            )
            parts += [about, table_of(TIMES, compared)]
    return parts
