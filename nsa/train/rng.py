"""Random number generators of a process: seeded, saved and restored together."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch (CPU and CUDA)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of all generators: tensors by name, and a few numbers as JSON types.

    Args:
        device: where the run computes; the CUDA generator is part of the state when it is a GPU.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "rng.python": torch.tensor(words, dtype=torch.int64),
        "rng.numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "rng.torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    numbers = {
        "python_version": version,
        "python_gauss": gauss,
        "numpy_kind": kind,
        "numpy_position": int(position),
        "numpy_has_gauss": int(has_gauss),
        "numpy_cached": float(cached),
        "device": device.type,
    }
    return tensors, numbers


def set_rng_state(
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Undo everything drawn since :func:`rng_state` gave these, on the same kind of device."""
    words = tuple(tensors["rng.python"].tolist())
    random.setstate((numbers["python_version"], words, numbers["python_gauss"]))
    keys = tensors["rng.numpy"].numpy().astype(np.uint32)
    rest = ("numpy_position", "numpy_has_gauss", "numpy_cached")
    np.random.set_state((numbers["numpy_kind"], keys, *(numbers[name] for name in rest)))
    torch.set_rng_state(tensors["rng.torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
