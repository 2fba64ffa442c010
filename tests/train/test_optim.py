"""Decay groups, fp32 masters, and updates that the device can cancel."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.lm.model import LanguageModel
from nsa.train.config import OptimConfig
from nsa.train.optim import ModelOptimizer, parameter_groups
from tests.train.cases import MODEL, PATTERN

NAMES = pytest.mark.parametrize("name", ["adamw", "muon"])


def make_model(seed: int = 0, **changes: Any) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(dataclasses.replace(MODEL, **changes))


def fill_gradients(model: LanguageModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def zero() -> Tensor:
    return torch.zeros(())


def snapshot(model: LanguageModel, optimizer: ModelOptimizer) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *optimizer.state_tensors().values())]


@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
@pytest.mark.parametrize("tie_head", [False, True])
def test_matrices_decay_and_nothing_else(phi: Any, tie_head: bool) -> None:
    model = make_model(tie_head=tie_head, nsa=dataclasses.replace(PATTERN, phi=phi, gate_hidden_size=8))
    groups = parameter_groups(model)
    assert not groups.muon
    assert {*groups.decayed, *groups.plain} == {name for name, _ in model.named_parameters()}
    assert not set(groups.decayed) & set(groups.plain)
    assert all("norm" in n or n.endswith((".bias", "embedding.weight", "phi_k.weight", "phi_v.weight", ".position"))
               for n in groups.plain)  # fmt: skip
    assert not any("norm" in n or n.endswith((".bias", "embedding.weight", ".position")) for n in groups.decayed)
    assert ("head.weight" in groups.decayed) is not tie_head
    assert ("layers.0.attention.phi_k.w1" in groups.decayed) == (phi == "mlp")


def test_muon_takes_the_projections() -> None:
    groups = parameter_groups(make_model(), "muon")
    assert {name.split(".")[-2] for name in groups.muon} == {
        "q_proj", "k_cmp_proj", "v_cmp_proj", "k_slc_proj", "v_slc_proj", "k_win_proj", "v_win_proj", "o_proj",
        "up_proj", "down_proj",
    }  # fmt: skip
    assert {"head.weight", "layers.0.attention.gate.net.weight"} == set(groups.decayed)


def test_weight_decay_acts_on_its_group_alone() -> None:
    model = make_model()
    optimizer = ModelOptimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(zero())
    decayed = parameter_groups(model).decayed
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if name in decayed else 1.0))


def test_weights_that_are_not_fp32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embedding\.weight must be an fp32 master weight, got torch\.bfloat16"):
        ModelOptimizer(make_model().bfloat16(), OptimConfig())


def test_small_updates_are_not_lost() -> None:
    """What bf16 weights would lose: a step of 1e-5 beside weights of 1."""
    model = make_model()
    weight = model.norm.weight
    optimizer = ModelOptimizer(model, OptimConfig(lr=1e-5, weight_decay=0.0))
    for _ in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(zero())
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1 - 1e-4), rtol=0, atol=2e-6)


def test_adamw_formula() -> None:
    """Loshchilov and Hutter, arXiv:1711.05101, written out for one weight."""
    config = OptimConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    model = make_model()
    optimizer = ModelOptimizer(model, config)
    value, first, second = model.head.weight[0, 0].item(), 0.0, 0.0
    for step in range(1, 5):
        fill_gradients(model, step)
        assert model.head.weight.grad is not None
        gradient = model.head.weight.grad[0, 0].item()
        optimizer.set_lr(1 / step)
        optimizer.step(zero())
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        rate = 0.01 / step
        value -= rate * 0.1 * value
        value -= rate * (first / (1 - 0.8**step)) / (math.sqrt(second / (1 - 0.9**step)) + 1e-3)
        assert model.head.weight[0, 0].item() == pytest.approx(value, rel=1e-5)
        assert optimizer.learning_rate == pytest.approx(rate)


@NAMES
def test_state_made_at_the_start_is_what_pytorch_would_make(name: Any) -> None:
    config = OptimConfig(name=name, lr=0.01, muon_lr=0.02, weight_decay=0.1)
    ours, theirs = make_model(), make_model()
    optimizer = ModelOptimizer(ours, config)
    groups = parameter_groups(theirs, name)
    plain = [
        torch.optim.AdamW(list(part.values()), lr=0.01, betas=config.betas, weight_decay=decay, fused=True)
        for part, decay in ((groups.decayed, 0.1), (groups.plain, 0.0))
    ]
    muon = [torch.optim.Muon(list(groups.muon.values()), lr=0.02, weight_decay=0.1)] if groups.muon else []
    for step in range(3):
        fill_gradients(ours, step)
        fill_gradients(theirs, step)
        optimizer.step(zero())
        for part in (*plain, *muon):
            part.step()
    for (key, ours_p), theirs_p in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_p, theirs_p), key
        states = [part.state[theirs_p] for part in (*plain, *muon) if theirs_p in part.state]
        expected = {f"{key}.{entry}": value for entry, value in states[0].items()}
        found = {entry: value for entry, value in optimizer.state_tensors().items() if entry.rpartition(".")[0] == key}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[entry], expected[entry]) for entry in found)


@NAMES
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_cancelled_update_keeps_every_bit(name: Any, poison: float) -> None:
    model = make_model()
    optimizer = ModelOptimizer(model, OptimConfig(name=name))
    for step in range(3):  # before the first update, too
        before = snapshot(model, optimizer)
        fill_gradients(model, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = poison
        optimizer.step(torch.ones(()))
        assert all(torch.equal(old, new) for old, new in zip(before, snapshot(model, optimizer), strict=True))
        fill_gradients(model, step)
        optimizer.step(zero())
        assert not all(torch.equal(old, new) for old, new in zip(before, snapshot(model, optimizer), strict=True))
        assert all(tensor.isfinite().all() for tensor in snapshot(model, optimizer))


def test_frozen_parameters_are_left_alone() -> None:
    model = make_model(nsa=dataclasses.replace(PATTERN, branches=("slc", "win")))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"layers.0.attention.k_cmp_proj.weight"}
    optimizer = ModelOptimizer(model, OptimConfig())
    assert not frozen & set(optimizer.named)
    assert len(optimizer.parameters()) == sum(1 for p in model.parameters() if p.requires_grad)
