"""No token at all: module, model and ranges give empty results and gradients of 0, never None.

Operators without a token: tests/ops/properties.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import (
    NativeSparseAttention,
    Sequences,
    check_inputs,
    window_attention,
)
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.ops._backend import as_on_gpu
from tests.ops.cases import offsets, small

# Leading shapes of inputs of a module, and offsets.
WHERE: dict[str, tuple[tuple[int, ...], dict[str, Tensor]]] = {
    "batch of size 0": ((0, 30), {}),
    "batch of size 0, no length": ((0, 0), {}),
    "sequences of length 0": ((2, 0), {}),
    "no token": ((0,), {}),
    "no sequence": ((0,), {"cu_seqlens": offsets(())}),
}


def without_gradient(module: torch.nn.Module) -> list[str]:
    """Parameters whose gradient is missing or not 0."""
    return [name for name, p in module.named_parameters() if p.grad is None or p.grad.any()]


def check_language_model(attention: Any, shape: tuple[int, ...], where: dict[str, Tensor]) -> None:
    sizes: dict[str, Any] = {"vocab_size": 20, "width": 48, "num_layers": 1, "mlp_hidden_size": 16}
    model = LanguageModel(LMConfig(**sizes, attention=attention, nsa=small()))
    logits = model(torch.zeros(shape, dtype=torch.int64), **where)
    assert logits.shape == (*shape, 20)
    logits.sum().backward()
    assert without_gradient(model) == []


@pytest.mark.parametrize(("shape", "where"), WHERE.values(), ids=WHERE)
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
def test_module(phi, shape, where):
    module = NativeSparseAttention(48, small(phi=phi, gate_hidden_size=8))
    x = torch.randn(*shape, 48).requires_grad_()
    y = module(x, **where)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert without_gradient(module) == []


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(("shape", "where"), WHERE.values(), ids=WHERE)
def test_language_model(attention, shape, where):
    check_language_model(attention, shape, where)


def test_tokens_of_no_sequence():
    """Refused by metadata alone: on a GPU kernels would look for the sequence of each token."""
    q, k, cu = torch.zeros(5, 4, 16), torch.zeros(5, 2, 16), offsets(())
    config, rule = small(value_dim=16), r"have shape \[B \+ 1\] with B at least 1, got \(1,\)"
    with as_on_gpu():
        with pytest.raises(ValueError, match=rf"cu_seqlens_q must {rule}"):
            window_attention(q, k, k, config, cu_seqlens_q=cu, backend="reference")
        with pytest.raises(ValueError, match=rf"cu_seqlens must {rule}"):
            Sequences.packed(cu, 8, num_tokens=5)
        with pytest.raises(ValueError, match="sequences must contain as many tokens as x"):
            NativeSparseAttention(48, config)(torch.zeros(5, 48), sequences=Sequences.packed(cu, 8))
    check_inputs(config, cu_seqlens_q=cu)
