"""What each kernel needs in each case, and what it may need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from nsa import NSAConfig
from nsa.ops._triton.tuning import RELATIVES, TABLES, Tile, TileKey, TileTable, default_tile, load_table, tiles_chosen_by
from tools.compile_only.driver import SHARED_MEMORY_LIMIT, Usage, absent_gpu
from tools.compile_only.launches import LONG, PARTS, SHORT, Batch, combine, compress, compressed, select, selected, window

MOST_STACK = 256  # bytes of a thread
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Bytes of stack that are no spilled registers, by kernel: room for the argument reduction of cosine and sine.
ARRAYS = {"compress_fwd_kernel": 32, "compress_dx_kernel": 32, "compress_dw_kernel": 32}


@dataclass(frozen=True)
class Shape:
    """Sizes of heads that a kernel is compiled for.

    Attributes:
        head_dim: D.
        value_dim: Dv.
        group_size: G.
        dtype: key of ``DTYPES``.
    """

    head_dim: int
    value_dim: int
    group_size: int
    dtype: str = "bf16"

    def __str__(self) -> str:
        sizes = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return f"D {sizes} G {self.group_size} {self.dtype}"

    def config(self) -> NSAConfig:
        """The default pattern with two KV heads of these sizes."""
        return NSAConfig(
            num_heads=2 * self.group_size, num_kv_heads=2, head_dim=self.head_dim, value_dim=self.value_dim
        )  # fmt: skip


# The kernels at their defaults: what `make test` compiles.
SHAPES = tuple(Shape(*sizes, group_size) for sizes in ((64, 64), (192, 128)) for group_size in (6, 16))
ARCHS = (80, 89, 90, 100)


@dataclass(frozen=True)
class Variant:
    """One way to launch an operator.

    Attributes:
        name: what is special about it; empty for the default.
        launch: see ``launches``.
        changes: fields of the config that differ from the default.
        batch: the sequences.
    """

    name: str
    launch: Callable[[NSAConfig, torch.dtype, Batch], None]
    batch: Batch = PARTS
    changes: tuple[tuple[str, Any], ...] = ()


USUAL = {
    "window": [Variant("", window)],
    "compressed": [Variant("", compressed), Variant("long", compressed, LONG)],
    "select": [Variant("", select)],
    "selected": [Variant("", selected, SHORT), Variant("gathered", selected, LONG)],
    "compress": [Variant("", compress), Variant("linear", compress, changes=(("phi", "linear"),)),
                 Variant("mlp", compress, changes=(("phi", "mlp"),))],
    "combine": [Variant("", combine)],
}  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """Where tiles come from: a committed table with the defaults of its GPU behind it, or the defaults alone.

    Attributes:
        arch: compute capability as two or three digits.
        table: None for the defaults alone.
    """

    arch: int
    table: TileTable | None = None

    def tile(self, key: TileKey) -> Tile:
        """What a GPU of this kind looks up."""
        return (None if self.table is None else self.table.find(key)) or default_tile(key, divmod(self.arch, 10))

    def spilling_wins(self, key: TileKey) -> bool:
        """Whether a committed measurement says that this tile beats all that need no stack.

        A row of a table says so by ``ms_without_stack``: the best time of a tile without stack, measured as ``ms`` was.
        """
        return False


def tunings(arch: int) -> list[Tuning]:
    """The defaults of an architecture, and its committed tables."""
    paths = [TABLES / f"{name}.json" for capability, name in RELATIVES.items() if capability == divmod(arch, 10)]
    return [Tuning(arch), *(Tuning(arch, load_table(path)) for path in paths)]
