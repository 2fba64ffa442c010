"""Tile sizes of the kernels, by kernel, head size, dtype and compute capability."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut.

    Attributes:
        rows: rows of a tile of queries (queries by heads; queries alone in the choice of blocks).
        keys: keys of a step (selection blocks in the choice).
        warps: warps a program.
        stages: depth of the software pipeline.
        tma: whether keys are loaded through tensor descriptors.
        keys_as_rows: dK and dV: whether the score tile has keys as rows.
        edge_stages: depth of the pipeline in the masked edges of a range.
        keep_queries: the choice of blocks: whether the queries of all heads of a group stay on chip.
        max_registers: limit on the registers of a thread, so that more programs share a multiprocessor; None leaves it open.
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

    def launch_options(self) -> dict[str, int]:
        """Keywords of a kernel launch."""
        options = {"num_warps": self.warps}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


# Measured on one H200 (see docs/log.md); keyed by kernel and the larger head size, rounded up to a power of two.
HOPPER = {
    ("window_attention_fwd", 64): Tile(128, 64, 8, 3, tma=True),
    ("window_attention_dq", 64): Tile(64, 64, 4, 3, tma=True, edge_stages=3),
    ("window_attention_dkv", 64): Tile(128, 64, 4, 2, keys_as_rows=True),
    ("compressed_attention_fwd", 64): Tile(64, 64, 4, 3, tma=True, edge_stages=3),
    ("compressed_attention_dq", 64): Tile(64, 64, 4, 2, tma=True, edge_stages=2),
    ("compressed_attention_dkv", 64): Tile(64, 64, 4, 3),
    ("select_blocks", 64): Tile(64, 16, 4, 3, max_registers=128),
    ("window_attention_fwd", 128): Tile(64, 64, 4, 3, tma=True, edge_stages=3),
    ("window_attention_dq", 128): Tile(64, 64, 4, 2, edge_stages=2),
    ("window_attention_dkv", 128): Tile(64, 64, 4, 2, keys_as_rows=True),
    ("compressed_attention_fwd", 128): Tile(64, 64, 4, 3, tma=True),
    ("compressed_attention_dq", 128): Tile(64, 64, 4, 2, edge_stages=2),
    ("compressed_attention_dkv", 128): Tile(64, 64, 4, 2, keys_as_rows=True),
    ("select_blocks", 128): Tile(64, 32, 4, 2),
}


@cache
def default_tile(kernel: str, block_d: int, itemsize: int) -> Tile:
    """A tile that fits every supported GPU: small enough for 99 KiB of shared memory, without tensor descriptors."""
    if itemsize == 4:
        edge = 32 if block_d <= 64 else 16
        return Tile(edge, 16, 4, 1)
    if kernel == "select_blocks":
        return Tile(32, 16, 4, 1)
    if block_d <= 64:
        return Tile(64, 64, 4, 2)
    if block_d <= 128:
        return Tile(64, 32, 4, 2) if kernel.endswith("fwd") else Tile(32, 32, 4, 1)
    return Tile(32, 32, 4, 1)


def tile_for(kernel: str, q: Tensor, v: Tensor) -> Tile:
    """The tile of ``kernel`` for these inputs: by the tables of the GPU, or the default."""
    size = max(q.shape[-1], v.shape[-1])
    block_d = max(16, 1 << (size - 1).bit_length())
    if q.device.type == "cuda" and q.element_size() == 2 and torch.cuda.get_device_capability(q.device)[0] == 9:
        found = HOPPER.get((kernel, max(block_d, 64)))
        if found is not None:
            return found
    return default_tile(kernel, block_d, q.element_size())
