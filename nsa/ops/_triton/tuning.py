"""Tile sizes of the kernels, by kernel, head size, dtype and GPU.

Measured tiles are stored in ``tables/``, one JSON file per GPU name, written by ``nsa bench tune``.
A GPU without a file uses the table of the most similar GPU, or else defaults by compute
capability. Nothing is measured here, and each table is read once.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.errors import UserError, check

logger = logging.getLogger(__name__)

TABLES = Path(__file__).with_name("tables")

# Tables for GPUs without their own: same multiprocessors, different memory.
RELATIVES = {(9, 0): "nvidia-h200"}

# Compute capabilities with at least 163 KiB of shared memory per program; all others have 99.
LARGE_SHARED_MEMORY = {(8, 0), (9, 0), (10, 0), (10, 3)}
# Compute capabilities whose tensor cores read operands from shared memory. The others read them
# from registers, so a backward tile needs more registers.
OPERANDS_IN_SHARED_MEMORY = {(9, 0), (10, 0), (10, 3)}

# Compressed keys per sequence from which on the kernels use separate tiles.
LONG_KEYS = 1024

# Selections scatter if the mean list length of a tile exceeds this multiple of n: the gathered
# algorithm is faster then. For tiles without a measured value; the backward is that of dQ.
SCATTER = {"selected_attention_fwd": 2.75, "selected_attention_dq": 1.95}

# Registers per thread. With this limit ptxas does not spill a register just to fit one more
# program on a multiprocessor.
MOST_REGISTERS = 255


class Tile(NamedTuple):
    """Tile sizes and launch options of one kernel, passed to it as a constant.

    Attributes:
        rows: rows of a query tile (queries by heads; queries only in selection).
        keys: keys per step (selection blocks in selection).
        warps: warps per program.
        stages: depth of the software pipeline.
        tma: whether keys are loaded through tensor descriptors.
        keys_as_rows: dK and dV: whether the score tile has keys as rows.
        edge_stages: dK and dV of range attention: pipeline depth of the masked steps.
        keep_queries: selection: whether the queries of all heads of a group stay on chip.
        max_registers: limit on the registers per thread, so that more programs fit on a
            multiprocessor; None means no limit.
        scatter: selected attention, forward and dQ: see ``SCATTER``; None means its value.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False
    keys_as_rows: bool = False
    edge_stages: int = 1
    max_registers: int | None = None
    keep_queries: bool = False
    scatter: float | None = None

    def launch_options(self) -> dict[str, int]:
        """Keyword arguments of a kernel launch."""
        options = {"num_warps": self.warps}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


@dataclass(frozen=True)
class TileKey:
    """Key of a tile in the tables.

    Attributes:
        kernel: kernel name, for example ``window_attention_fwd``.
        head_size: the larger of D and Dv.
        element_size: bytes per element.
    """

    kernel: str
    head_size: int
    element_size: int


@dataclass(frozen=True)
class TileTable:
    """Measured tiles of one GPU.

    Attributes:
        gpu: GPU name as reported by CUDA.
        rows: tile by key.
        notes: other fields of each row by key: ``ms``, ``measured``, versions, date.
    """

    gpu: str
    rows: Mapping[TileKey, Tile]
    notes: Mapping[TileKey, Mapping[str, Any]]

    def find(self, key: TileKey) -> Tile | None:
        """Return the tile of ``key``, or that of the next larger head size, which fits too."""
        same = (
            k for k in self.rows if (k.kernel, k.element_size) == (key.kernel, key.element_size)
        )
        sizes = sorted(k.head_size for k in same if k.head_size >= key.head_size)
        return self.rows[TileKey(key.kernel, sizes[0], key.element_size)] if sizes else None


def table_name(gpu: str) -> str:
    """File name of a GPU's table without suffix: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def load_table(path: Path) -> TileTable:
    """Read a table.

    Args:
        path: JSON file: ``{"gpu": ..., "rows": [{"kernel": ..., "head_size": ..., "element_size":
            ..., "tile": {...}, ...}]}``.

    Raises:
        ValueError: the file is not a valid table; the message names the file and the row.
    """
    where, hint = f"tuning table {path.name}", "Make it again with: nsa bench tune"
    rows: dict[TileKey, Tile] = {}
    notes: dict[TileKey, Mapping[str, Any]] = {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        gpu = content["gpu"]
        for number, row in enumerate(content["rows"], start=1):
            where = f"tuning table {path.name}: row {number}"
            note = dict(row)
            key = TileKey(*(note.pop(name) for name in ("kernel", "head_size", "element_size")))
            tile = Tile(**note.pop("tile"))
            sizes = (key.head_size, key.element_size, *tile[:4])
            is_new = key not in rows
            check(is_new, where, "name a kernel and sizes of its own", key)
            is_sound = all(type(size) is int and size > 0 for size in sizes)
            check(is_sound, where, "have positive whole numbers as sizes", sizes)
            rows[key], notes[key] = tile, note
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        rule = "be JSON with gpu, rows, and in each row kernel, head_size, element_size and tile"
        raise UserError(where, rule, error, hint) from error
    return TileTable(gpu, rows, notes)


def table_text(table: TileTable) -> str:
    """Serialize the table to JSON, one row per line."""
    rows = [
        json.dumps({**asdict(key), "tile": _given(tile), **table.notes.get(key, {})})
        for key, tile in sorted(
            table.rows.items(),
            key=lambda row: (row[0].element_size, row[0].head_size, row[0].kernel),
        )
    ]
    return f'{{"gpu": {json.dumps(table.gpu)}, "rows": [\n' + ",\n".join(rows) + "\n]}\n"


def _given(tile: Tile) -> dict[str, Any]:
    """Sizes of a tile, and its other fields that differ from their defaults."""
    plain = Tile(0, 0, 0, 0)
    return {name: value for name, value in tile._asdict().items() if value != getattr(plain, name)}


def find_table(gpu: str, capability: tuple[int, int]) -> TileTable | None:
    """Table of a GPU or of the most similar one; None if both are missing."""
    for name in (table_name(gpu), RELATIVES.get(capability)):
        path = TABLES / f"{name}.json"
        if name is not None and path.is_file():
            return load_table(path)
    return None


def default_tile(key: TileKey, capability: tuple[int, int] | None) -> Tile:
    """Default tile for a compute capability, used without a measured one.

    Args:
        key: key of the tile.
        capability: major and minor; None means the smallest GPU.
    """
    tile = _default_sizes(key, capability)
    # Block selection with two-byte elements spills with the register limit and does not without it;
    # on 12.x it is the other way round.
    selects = key.kernel.startswith("select_") and key.element_size == 2
    limited = not selects or (capability or (0, 0))[0] == 12
    return tile._replace(max_registers=MOST_REGISTERS) if limited else tile


def _default_sizes(key: TileKey, capability: tuple[int, int] | None) -> Tile:
    # Nothing spills up to head size 128, nor at 192 with values of 128 in two bytes (checked by
    # `make test-compile`). These sizes are not timed.
    warps = 4 if key.head_size <= 128 else 8
    if key.kernel == "select_blocks":
        return Tile(16, 16, 8 if key.head_size <= 128 else 4, 1)
    if key.kernel == "select_token_max":
        if key.element_size == 4:
            return Tile(16, 16, 8, 1)
        rows = 64 if capability in OPERANDS_IN_SHARED_MEMORY else 32
        return Tile(rows, 16, 4, 2 if key.head_size <= 128 else 1)
    if key.element_size == 4:
        return Tile(32, 16, 4, 1) if key.head_size <= 64 else Tile(16, 16, 8, 1)
    if key.head_size > 128:
        if capability in OPERANDS_IN_SHARED_MEMORY and "_fwd" in key.kernel:
            return Tile(64, 64, warps, 2)
        if capability in OPERANDS_IN_SHARED_MEMORY and "_dq" in key.kernel:
            return Tile(64, 32, warps, 2, tma=True)
        return Tile(32, 32, warps, 1)
    if "_fwd" in key.kernel:
        if key.head_size <= 64:
            return Tile(64, 64, warps, 3 if capability in LARGE_SHARED_MEMORY else 2)
        return Tile(64, 32, 8 if key.kernel == "selected_attention_fwd" else warps, 2)
    if key.head_size > 64:
        return Tile(32, 32, warps, 1)
    if capability in OPERANDS_IN_SHARED_MEMORY:
        return Tile(64, 64, warps, 2)
    return Tile(32, 64, warps, 2) if key.kernel == "selected_gather_dkv" else Tile(64, 32, warps, 2)


@cache
def device_table(index: int) -> tuple[TileTable | None, tuple[int, int]]:
    """Table and compute capability of a CUDA device; read or logged as missing once."""
    capability, gpu = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
    table = find_table(gpu, capability)
    if table is None:
        found = f"defaults of compute capability {'.'.join(map(str, capability))}"
        logger.info("no tuning table for %s: %s; `nsa bench tune` makes one", gpu, found)
    elif table.gpu != gpu:
        found = f"that of {table.gpu}"
        logger.info("no tuning table for %s: %s; `nsa bench tune` makes one", gpu, found)
    return table, capability


@cache
def _tile(key: TileKey, cuda_index: int | None) -> Tile:
    if cuda_index is None:
        return default_tile(key, None)
    table, capability = device_table(cuda_index)
    return (None if table is None else table.find(key)) or default_tile(key, capability)


Choose = Callable[[TileKey, Tile], Tile]
_choose: Choose | None = None


@contextmanager
def tiles_chosen_by(choose: Choose) -> Iterator[None]:
    """Context manager: pass every lookup through ``choose(key, tile of the table)``.

    Used for benchmarks and tuning. It applies to the whole process rather than one thread, because
    autograd runs the backward pass in its own threads.
    """
    global _choose
    assert _choose is None, "choices of tiles do not nest"
    _choose = choose
    try:
        yield
    finally:
        _choose = None


def tiles_are_chosen() -> bool:
    """Whether :func:`tiles_chosen_by` is active, so that cached plans may have other tiles."""
    return _choose is not None


def tile_for(kernel: str, q: Tensor, v: Tensor) -> Tile:
    """Tile of ``kernel`` for these inputs, from the table of their GPU or the default."""
    key = TileKey(kernel, max(q.shape[-1], v.shape[-1]), q.element_size())
    index = None
    if q.device.type == "cuda":
        index = torch.cuda.current_device() if q.device.index is None else q.device.index
    return _chosen(key, index)


def _chosen(key: TileKey, index: int | None) -> Tile:
    tile = _tile(key, index)
    return tile if _choose is None else _choose(key, tile)


def scatter_of(kernel: str, head_size: int, element_size: int, index: int | None) -> float:
    """Threshold of a kernel of the selected branch, see ``SCATTER``; ``index`` of a CUDA device."""
    return _chosen(TileKey(kernel, head_size, element_size), index).scatter or SCATTER[kernel]


# Same effect as torch.compiler.assume_constant_result, without importing the compiler.
scatter_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
