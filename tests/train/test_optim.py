"""Decay groups, fp32 masters, and updates that the device can cancel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsa.lm.model import LanguageModel
from nsa.plan import BYTES_PER_UPDATED
from nsa.train import optim
from nsa.train.config import OptimConfig
from nsa.train.optim import ModelOptimizer, lr_factor, parameter_groups
from tests.train.cases import MODEL, PATTERN, all_equal

NAMES = pytest.mark.parametrize("name", ["adamw", "muon"])


def make_model(seed: int = 0, **changes: Any) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(dataclasses.replace(MODEL, **changes))


def fill_gradients(model: LanguageModel, seed: int, first: float = 0.0) -> None:
    """Random gradients, each with ``first`` as its first element."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad.view(-1)[0] = first


def snapshot(model: LanguageModel, optimizer: ModelOptimizer) -> list[Tensor]:
    tensors = (*model.parameters(), *optimizer.state_tensors().values())
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize(("phi", "tie_head"), [("linear", False), ("mlp", True)])
def test_matrices_decay_and_nothing_else(phi, tie_head):
    pattern = dataclasses.replace(PATTERN, phi=phi, gate_hidden_size=8)
    model = make_model(tie_head=tie_head, nsa=pattern)
    groups = parameter_groups(model, OptimConfig())
    assert not groups.muon
    assert {*groups.decayed, *groups.plain} == {name for name, _ in model.named_parameters()}
    assert not set(groups.decayed) & set(groups.plain)
    never = (".bias", "embedding.weight", ".position")
    matrices_of_phi = ("phi_k.weight", "phi_v.weight")
    assert all("norm" in n or n.endswith((*never, *matrices_of_phi)) for n in groups.plain)
    assert not any("norm" in n or n.endswith(never) for n in groups.decayed)
    assert ("head.weight" in groups.decayed) is not tie_head
    assert ("layers.0.attention.phi_k.w1" in groups.decayed) == (phi == "mlp")


def test_muon_takes_the_projections():
    groups = parameter_groups(make_model(), OptimConfig("muon"))
    projections = {name.split(".")[-2] for name in groups.muon}
    keys_and_values = {f"{x}_{branch}_proj" for x in "kv" for branch in ("cmp", "slc", "win")}
    assert projections == {"q_proj", "o_proj", "up_proj", "down_proj", *keys_and_values}
    assert {"head.weight", "layers.0.attention.gate.net.weight"} == set(groups.decayed)


def test_weights_that_are_not_fp32_are_refused():
    message = r"embedding\.weight must be an fp32 master weight, got torch\.bfloat16"
    with pytest.raises(ValueError, match=message):
        ModelOptimizer(make_model().bfloat16(), OptimConfig())


@NAMES
def test_steps_are_those_of_pytorch(name, monkeypatch):
    """Bit for bit where Muon multiplies in bf16, as on a GPU."""
    monkeypatch.setattr(optim, "product_dtype", lambda device: torch.bfloat16)
    config = OptimConfig(name=name, lr=0.01, muon_lr=0.02, weight_decay=0.1)
    ours, theirs = make_model(), make_model()
    optimizer = ModelOptimizer(ours, config)
    groups = parameter_groups(theirs, OptimConfig(name))
    parts: list[Any] = [
        torch.optim.AdamW(
            part.values(), lr=0.01, betas=config.betas, weight_decay=decay, fused=True
        )
        for part, decay in ((groups.decayed, 0.1), (groups.plain, 0.0))
    ]
    if groups.muon:
        parts.append(torch.optim.Muon(groups.muon.values(), lr=0.02, weight_decay=0.1))
    for step in range(3):
        fill_gradients(ours, step)
        fill_gradients(theirs, step)
        optimizer.step(torch.zeros(()))
        for part in parts:
            part.step()
    assert all_equal(ours.parameters(), theirs.parameters())
    states = {key: state for part in parts for key, state in part.state.items()}
    wanted = {
        f"{name}.{entry}": value
        for name, parameter in theirs.named_parameters()
        for entry, value in states[parameter].items()
    }
    found = optimizer.state_tensors()
    assert found.keys() == wanted.keys()
    assert all_equal(wanted.values(), (found[name] for name in wanted))


@pytest.mark.parametrize("shape", [(96, 32), (32, 96)])
def test_muon_makes_matrices_orthogonal_in_fp32_on_a_cpu(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    (found,) = optim.orthogonalized(x[None])
    assert found.dtype == torch.float32
    left, singular, right = torch.linalg.svd(found, full_matrices=False)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    expected_left, _, expected_right = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(left @ right, expected_left @ expected_right, atol=1e-3, rtol=0)


def test_muon_multiplies_matrices_of_one_shape_together(monkeypatch):
    shapes = [(32, 96), (96, 32), (32, 96), (32, 96), (96, 32)]
    matrices = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    numbers = {matrix: number for number, matrix in enumerate(matrices)}
    for size, wanted in (
        (optim.BATCH_ELEMENTS, [[0, 2, 3], [1, 4]]),
        (2 * 32 * 96 + 1, [[0, 2], [3], [1, 4]]),
        (1, [[0], [2], [3], [1], [4]]),
    ):
        monkeypatch.setattr(optim, "BATCH_ELEMENTS", size)
        batches = optim.batches_of(matrices)
        assert [[numbers[matrix] for matrix in batch] for batch in batches] == wanted


def most_bytes(run):
    """Largest number of bytes that a function allocates at a time on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(changes, key=lambda x: x[0])))


@pytest.mark.parametrize("shapes", [[(64, 64)] * 4, [(64, 64)] * 8 + [(32, 128)] * 8, [(132, 128)]])
def test_muon_holds_what_is_planned(shapes, monkeypatch):
    monkeypatch.setattr(optim, "BATCH_ELEMENTS", 4 * 64 * 64)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    optimizer = optim.Muon(matrices, 0.01, 0.1)
    largest = max(sum(x.numel() for x in batch) for batch in optim.batches_of(matrices))
    found = most_bytes(lambda: optimizer.step(torch.zeros(()))) / largest
    # Planned is bf16, and on a CPU products are fp32.
    assert found == pytest.approx(2 * BYTES_PER_UPDATED, rel=0.05)


@NAMES
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_cancelled_update_keeps_every_bit(name, poison):
    model = make_model()
    optimizer = ModelOptimizer(model, OptimConfig(name=name))
    for step in range(3):  # before the first update, too
        before = snapshot(model, optimizer)
        fill_gradients(model, step, poison)
        optimizer.step(torch.ones(()))
        assert all_equal(before, snapshot(model, optimizer))
        fill_gradients(model, step)
        optimizer.step(torch.zeros(()))
        after = snapshot(model, optimizer)
        assert not all_equal(before, after)
        assert all(tensor.isfinite().all() for tensor in after)


# --- learning rate --------------------------------------------------------------------------------
def test_warmup_rises_by_equal_steps_to_the_peak():
    assert [lr_factor(step, 100, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert lr_factor(0, 10, 0) == 1.0
    assert [lr_factor(step, 4, 8) for step in (0, 3, 8)] == [1 / 8, 4 / 8, 1.0]


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine(floor):
    """Its end comes after the last step, whose update is not wasted."""
    for step in range(10, 111):
        expected = floor + (1 - floor) * (1 + math.cos(math.pi * (step - 10) / 100)) / 2
        assert lr_factor(step, 110, 10, floor) == pytest.approx(expected, rel=1e-12)
    assert lr_factor(115, 110, 10, floor) == pytest.approx(floor)
