"""Models small enough that a step of the reference takes milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.hf import NSAForCausalLM, NSALMConfig
from nsa.lm.config import LMConfig
from tests.ops.cases import small

VOCAB = 40
SIZES = {"vocab_size": VOCAB, "width": 24, "num_layers": 2, "mlp_hidden_size": 32, "init_std": 0.2}


def tiny(**changes: Any) -> NSAForCausalLM:
    """In fp64, with every parameter drawn at random."""
    pattern = {key: changes.pop(key) for key in list(changes) if hasattr(small(), key)}
    config = LMConfig(**{**SIZES, "nsa": small(**pattern), **changes})
    torch.manual_seed(0)
    return NSAForCausalLM(NSALMConfig.of(config)).double().eval()


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
