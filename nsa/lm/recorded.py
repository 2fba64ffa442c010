"""Files of recorded block selections, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from nsa.errors import UserError, check
from nsa.files import new_file

_BLOCK_SIZE = "block_size"


def save_selections(path: Path, layers: Sequence[Tensor], block_size: int) -> None:
    """Write the selections of one text as a compressed ``.npz``.

    Args:
        path: file to write; its folder must exist.
        layers: int32 ``[T, Hkv, n]`` of each layer, -1 for unused entries.
        block_size: tokens of a block.
    """
    arrays = {f"layer{number}": blocks.cpu().numpy() for number, blocks in enumerate(layers)}
    # queries last: neighbours are nearly equal, which compresses well
    named: dict[str, Any] = {name: x.transpose(1, 2, 0) for name, x in arrays.items()}
    named[_BLOCK_SIZE] = np.array(block_size)
    with new_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **named)


def load_selections(path: Path) -> tuple[list[Tensor], int]:
    """Return selections of each layer, int32 ``[T, Hkv, n]``, and the block size in tokens.

    Raises:
        ValueError: the file does not exist or is malformed.
    """
    rule = "be a file of nsa inspect --record"
    check(path.is_file(), "nsa bench", "--recorded", rule, path)
    try:
        with np.load(path) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        block_size = int(found.pop(_BLOCK_SIZE))
        names = sorted(found, key=lambda name: int(name.removeprefix("layer")))
        layers = [found[name].transpose(2, 0, 1).astype(np.int32) for name in names]
    except (BadZipFile, KeyError, OSError, ValueError) as error:
        raise UserError("nsa bench", "--recorded", rule, path) from error
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in layers], block_size
