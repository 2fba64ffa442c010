"""Two GPUs in one process: operators run where their tensors lie, whichever device is current."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa import NativeSparseAttention
from tests.gpu.matrix import MATRIX, SEED, seed_case
from tests.gpu.test_execution import Step
from tests.ops.checks import CHECKS

SECOND = "cuda:1"

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.mark.parametrize("operator", CHECKS)
def test_operator_on_the_second_gpu(operator):
    assert torch.cuda.current_device() == 0
    CHECKS[operator](dataclasses.replace(MATRIX["bf16 G6 D64"], device=SECOND))
    assert torch.cuda.current_device() == 0


def same_bits(run: Callable[[], list[Tensor]]) -> None:
    """``run`` on the second GPU, with the first as the current device and with the second."""
    found = run()
    with torch.cuda.device(1):
        expected = run()
    for x, y in zip(found, expected, strict=True):
        assert x.device == torch.device(SECOND)
        assert torch.equal(x, y)


@pytest.mark.parametrize("lengths", [(1200, 0, 70), (20_000, 70)], ids=["short", "long"])
def test_whole_on_the_second_gpu(lengths):
    """On two streams, and on a third where the selected blocks decide the algorithm."""
    same_bits(Step(dataclasses.replace(seed_case(*lengths), device=SECOND)).run)


def test_module_on_the_second_gpu():
    torch.manual_seed(0)
    module = NativeSparseAttention(256, SEED).to(SECOND, torch.bfloat16)
    x = torch.randn(2, 700, 256, device=SECOND, dtype=torch.bfloat16, requires_grad=True)

    def run() -> list[Tensor]:
        out = module(x)
        return [
            out.detach(),
            *torch.autograd.grad(out, [x, *module.parameters()], torch.ones_like(out)),
        ]

    same_bits(run)
