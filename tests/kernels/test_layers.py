"""A model of dense and sparse layers of several patterns: gradients of the kernels."""

from __future__ import annotations

import pytest
import torch

import nsa.attention
from nsa.testing import assert_within_budget
from tests.lm.test_decoder import MIXED, make

pytestmark = pytest.mark.filterwarnings(
    "ignore:All-NaN slice encountered", "ignore:overflow encountered in exp2"
)


def test_gradients_of_a_mixed_model(monkeypatch):
    """Few tokens, so that every block is selected and rounding decides nothing."""
    cu_seqlens, tokens = torch.tensor([0, 20, 70], dtype=torch.int32), torch.arange(70) % 40
    found = []
    for dtype, backend in (("float", "triton"), ("float", "reference"), ("double", "reference")):
        monkeypatch.setattr(nsa.attention, "choose_backend", lambda *_, chosen=backend: chosen)
        model = getattr(make(**MIXED, num_selected_blocks=5), dtype)()
        hidden = model.hidden_states(tokens, cu_seqlens, 50)
        parameters = [x for layer in model.layers for x in layer.parameters() if x.requires_grad]
        dout = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
        gradients = torch.autograd.grad(hidden, parameters, dout.to(hidden.dtype))
        found.append([hidden.detach(), *gradients])
    for ours, plain, exact in zip(*found, strict=True):
        assert_within_budget(ours, plain, exact, "gradient")
