"""Activation checkpointing on a GPU: memory is as promised, compiled steps are near.

Gradients bit for bit: tests/kernels/test_recomputation.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.train.config import CheckpointingConfig
from nsa.train.execution.activations import checkpoint_activations, kept_bytes
from tests.train.cases import make_trainer, tiny_config

POLICIES = {
    "full": CheckpointingConfig("full"),
    "operators": CheckpointingConfig("operators"),
    "every": CheckpointingConfig("every"),
    "range": CheckpointingConfig("range", first=1, last=2),
}
SEQ_LEN, SEQUENCES = 2048, 8
TOKENS = SEQ_LEN * SEQUENCES


def make_model(attention: Any, policy: CheckpointingConfig, num_layers: int) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(attention=attention, num_layers=num_layers)).cuda()
    checkpoint_activations(model, policy)
    return model


def hidden_states(model: LanguageModel) -> Tensor:
    tokens = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(1)).cuda()
    cu_seqlens = torch.arange(0, TOKENS + 1, SEQ_LEN, dtype=torch.int32, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model.hidden_states(tokens, cu_seqlens, SEQ_LEN)


def held_after_forward(attention: Any, policy: CheckpointingConfig, num_layers: int) -> int:
    """Bytes in tensors after a forward pass, without what was there before."""
    model = make_model(attention, policy, num_layers)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    hidden = hidden_states(model)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert hidden.requires_grad
    return held


@pytest.mark.parametrize("policy", ["full", "operators"])
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_layer_keeps_what_is_promised(attention, policy):
    held_after_forward(attention, POLICIES[policy], 1)  # what libraries keep for themselves
    two, four = (held_after_forward(attention, POLICIES[policy], number) for number in (2, 4))
    promised = sum(kept_bytes(LMConfig(attention=attention), POLICIES[policy].keeps(0)).values())
    assert (four - two) / 2 / TOKENS == pytest.approx(promised, rel=0.05)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("policy", ["full", "operators"])
def test_compiled_steps_are_near(tmp_path, policy):
    results = []
    for checkpointing in (CheckpointingConfig(), CheckpointingConfig(policy)):
        config = tiny_config(tmp_path, device="cuda", compile=True, model={"num_layers": 2})
        config = dataclasses.replace(config, checkpointing=checkpointing)
        trainer = make_trainer(config, tmp_path / checkpointing.policy)
        results.append(torch.stack([trainer.train_step(trainer.next_batches()) for _ in range(3)]))
        torch.compiler.reset()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
