"""Models small enough that a step of the reference takes milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.hf import NSAForCausalLM, NSALMConfig
from tests.lm.test_decoder import make

VOCAB = 40


def tiny(**changes: Any) -> NSAForCausalLM:
    """In fp64, with every parameter drawn at random."""
    model = make(**changes)
    return NSAForCausalLM(NSALMConfig.of(model.config), model).eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Random ids."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """A batch of rows, padded on the left."""
    longest = max(map(len, rows))
    masks = [torch.ones(len(row), dtype=torch.int64) for row in rows]
    padded = [
        torch.stack([torch.nn.functional.pad(x, (longest - len(x), 0)) for x in parts])
        for parts in (rows, masks)
    ]
    return {"input_ids": padded[0], "attention_mask": padded[1]}
