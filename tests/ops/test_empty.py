"""No token at all: references and module give empty results and gradients of 0, never None."""

from __future__ import annotations

import pytest
import torch

from nsa import NativeSparseAttention, Sequences, check_inputs, window_attention
from nsa.ops._backend import as_on_gpu
from tests.ops.cases import offsets, small
from tests.ops.empty import CASES, CHECKS, WHERE, check_language_model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operator", CHECKS)
def test_operator(operator, case):
    CHECKS[operator](CASES[case], "reference")


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
    assert [name for name, p in module.named_parameters() if p.grad is None or p.grad.any()] == []


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
        with pytest.raises(ValueError, match="sequences must hold as many tokens as x"):
            NativeSparseAttention(48, config)(torch.zeros(5, 48), sequences=Sequences.packed(cu, 8))
    check_inputs(config, cu_seqlens_q=cu)
