"""Cross entropy: fp32, summed, whole or in chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa.train.data import IGNORED_TARGET
from nsa.train.loss import cross_entropy_sum


def inputs(
    num_tokens: int = 37, vocab: int = 50, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 16, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(vocab, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    targets[::5] = IGNORED_TARGET
    return hidden, head, targets


def test_formula():
    hidden, head, targets = inputs(dtype=torch.float64)
    logits = hidden @ head.T
    expected = sum(
        math.log(sum(math.exp(z) for z in row)) - row[target]
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True)
        if target != IGNORED_TARGET
    )
    assert cross_entropy_sum(hidden, head, targets).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 36, 100])
def test_chunks_change_nothing(chunk):
    results = []
    for size in (0, chunk):
        hidden, head, targets = inputs(dtype=torch.float64)
        loss = cross_entropy_sum(hidden, head, targets, size)
        loss.backward()
        results.append((loss.detach(), hidden.grad, head.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)


def test_full_logits_never_exist_in_chunks():
    hidden, head, targets = inputs(num_tokens=64, vocab=200)
    largest = []
    for chunk in (0, 8):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda nothing: nothing):
            cross_entropy_sum(hidden, head, targets, chunk)
        largest.append(max(map(Tensor.numel, kept), default=0))
    assert largest[0] == 64 * 200
    assert largest[1] <= 256 * 16  # the padded head


@pytest.mark.parametrize("chunk", [0, 4])
def test_bf16_products_fp32_loss(chunk):
    hidden, head, targets = inputs()
    exact = cross_entropy_sum(hidden, head, targets).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy_sum(hidden, head, targets, chunk)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=1e-2)
    low = cross_entropy_sum(hidden.detach().bfloat16(), head.detach().bfloat16(), targets, chunk)
    assert low.dtype == torch.float32
