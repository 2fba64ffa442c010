"""Two GPUs in one process: everything runs on the device of its tensors, whichever is current."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa.hf import NSAForCausalLM, NSALMConfig
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from tests.gpu.matrix import MATRIX, SEED, seed_case
from tests.gpu.test_execution import Step
from tests.hf.tiny import left_padded
from tests.ops.public import CHECKS

SECOND = "cuda:1"
MODEL = LMConfig(vocab_size=256, width=256, num_layers=2, nsa=SEED, mlp_hidden_size=512)
ATTENTION = pytest.mark.parametrize("attention", ["nsa", "dense"])

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.mark.parametrize("operator", CHECKS)
def test_operator_on_the_second_gpu(operator):
    assert torch.cuda.current_device() == 0
    CHECKS[operator](dataclasses.replace(MATRIX["bf16 G6 D64"], device=SECOND))
    assert torch.cuda.current_device() == 0


def same_bits(run: Callable[[], list[Tensor]]) -> None:
    """``run`` on the second GPU, with the first as the current device and with the second."""
    assert torch.cuda.current_device() == 0
    found = run()
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        expected = run()
    for x, y in zip(found, expected, strict=True):
        assert x.device == torch.device(SECOND)
        assert torch.equal(x, y)


@pytest.mark.parametrize("lengths", [(1200, 0, 70), (20_000, 70)], ids=["short", "long"])
def test_whole_on_the_second_gpu(lengths):
    """On two streams, and on a third where the selected blocks decide the algorithm."""
    same_bits(Step(dataclasses.replace(seed_case(*lengths), device=SECOND)).run)


def new_model(attention: str) -> NSAForCausalLM:
    """On the second GPU in bf16, with texts that do not stop at one token."""
    torch.manual_seed(0)
    config = dataclasses.replace(MODEL, attention=attention)  # type: ignore[arg-type]
    model = NSAForCausalLM(NSALMConfig.of(config)).eval()
    model.model.head.weight.data *= 20
    return model.to(SECOND, torch.bfloat16)


def new_tokens(length: int) -> Tensor:
    """int64 ``[2, length]`` on the second GPU."""
    return torch.randint(256, (2, length), generator=torch.Generator().manual_seed(1)).to(SECOND)


@ATTENTION
def test_model_on_the_second_gpu(attention):
    """Gradients only of sparse attention, whose bits are the same in every run."""
    model, tokens = new_model(attention).lm, new_tokens(700)

    def run():
        out = model(tokens)
        if attention == "dense":
            return [out.detach()]
        return [
            out.detach(),
            *torch.autograd.grad(out, [*model.parameters()], torch.ones_like(out)),
        ]

    same_bits(run)


@ATTENTION
def test_decoder_on_the_second_gpu(attention):
    """Prompts and recorded steps, after another capture on the first GPU."""
    model, tokens = new_model(attention).lm, new_tokens(1300)
    x = torch.zeros(1, device="cuda:0")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)

    def run():
        decoder = Decoder(model, 2, max_tokens=1300)
        found = [decoder.prefill(part.tolist()) for part in tokens[:, :1294].split(1200, dim=1)]
        found += [decoder.step(tokens[:, i : i + 1]).clone() for i in range(1294, 1300)]
        assert decoder._graphs[1] is not None
        return found

    same_bits(run)


@ATTENTION
def test_transformers_generate_on_the_second_gpu(attention):
    model, (row, other) = new_model(attention), new_tokens(1200).cpu()
    batch = {name: x.to(SECOND) for name, x in left_padded([row, other[:50]]).items()}
    same_bits(lambda: [model.generate(**batch, max_new_tokens=12, do_sample=False)])
