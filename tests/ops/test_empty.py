"""No token at all: references and module give empty results and gradients of 0, never None."""

from __future__ import annotations

import pytest
import torch

from nsa import NativeSparseAttention
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from tests.ops.cases import small
from tests.ops.empty import CASES, CHECKS


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operator", CHECKS)
def test_operator(operator, case):
    CHECKS[operator](CASES[case], "reference")


SHAPES = [(0, 30), (0, 0), (2, 0), (0,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
def test_module(phi, shape):
    module = NativeSparseAttention(48, small(phi=phi, gate_hidden_size=8))
    x = torch.randn(*shape, 48).requires_grad_()
    y = module(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert [name for name, p in module.named_parameters() if p.grad is None or p.grad.any()] == []


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_language_model(attention, shape):
    config = LMConfig(
        vocab_size=20, width=48, num_layers=1, attention=attention, nsa=small(), mlp_hidden_size=16
    )
    model = LanguageModel(config)
    logits = model(torch.zeros(shape, dtype=torch.int64))
    assert logits.shape == (*shape, 20)
    logits.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.any()] == []
