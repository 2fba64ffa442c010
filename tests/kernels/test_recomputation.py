"""A layer that keeps what its attention computed: the kernels' operator runs once, and the
gradients are the same.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import nsa.attention
from nsa.lm.model import LanguageModel
from tests.train.cases import MODEL, PATTERN
from tests.train.execution.test_activations import Count

pytestmark = pytest.mark.filterwarnings(
    "ignore:All-NaN slice encountered",
    "ignore:overflow encountered in exp2",
    "ignore:invalid value encountered in subtract",
)


def test_attention_is_kept(monkeypatch):
    monkeypatch.setattr(nsa.attention, "choose_backend", lambda backend, tensor: "triton")
    torch.manual_seed(0)
    pattern = dataclasses.replace(PATTERN, phi="mean", share_kv=True)
    model = LanguageModel(dataclasses.replace(MODEL, nsa=pattern))
    (layer,) = model.decoder_layers()
    cu_seqlens = torch.tensor([0, 31, 70], dtype=torch.int32)
    found: dict[str, tuple[int, int, list[Tensor]]] = {}
    for keeps in ("everything", "attention", "input"):
        layer.keeps = keeps
        with Count() as count:
            hidden = model.hidden_states(torch.arange(70), cu_seqlens, 39)
            gradients = list(torch.autograd.grad(hidden.square().sum(), list(layer.parameters())))
        runs = count.of(torch.ops.nsa.attention.default), count.of(torch.ops.nsa.compress.default)
        found[keeps] = (*runs, gradients)
    assert [runs[:2] for runs in found.values()] == [(1, 1), (1, 2), (2, 2)]
    for _, _, gradients in found.values():
        assert all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(gradients, found["everything"][2], strict=True)
        )
