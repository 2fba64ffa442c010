"""Generation by kernels, in CUDA graphs, writes what the model writes without a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from tests.gpu.matrix import SEED
from tests.lm.greedy import first_differences, greedy, make_prompts

PROMPTS, TOKENS = 100, 256
# A dense layer, smaller blocks, more KV heads.
MIXED: Any = [{"attention": "dense"}, {"block_size": 32}, {"num_kv_heads": 4, "window_size": 128}]


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp", "mixed"])
def test_a_hundred_prompts(phi, queries):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 256, "width": 256, "mlp_hidden_size": 512}
    if phi == "mixed":
        config = LMConfig(**sizes, num_layers=3, nsa=SEED, layers=MIXED)
    else:
        pattern = dataclasses.replace(SEED, phi=phi)
        config = LMConfig(**sizes, num_layers=2, nsa=pattern)
    model = LanguageModel(config).cuda().requires_grad_(False)
    model.head.weight.mul_(20)
    prompts = make_prompts([1 + 37 * i % 2000 for i in range(PROMPTS)], 256)
    drawn = greedy(model, prompts, TOKENS, chunk=700, queries=queries)
    differences = first_differences(model, prompts, drawn)
    print(f"\n{phi}, {queries} queries: " + ("no difference" if not differences else ""))
    for number, (place, margin) in differences.items():
        print(f"prompt {number}: token {place}, margin {margin:.2e}")
    # By rounding, of logits or of the scores of blocks, a text may part from the model's own.
    assert len(differences) <= PROMPTS // 20
