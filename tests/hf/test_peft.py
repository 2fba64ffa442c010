"""LoRA from peft on the projections of attention: gradients, and generation in every state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from nsa.hf import NSAForCausalLM
from nsa.lm.model import LanguageModel
from tests.hf.test_generate import GREEDY, model_of
from tests.hf.tiny import left_padded, tokens

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for peft

KINDS: list[dict[str, Any]] = [{}, {"share_kv": True}, {"attention": "dense"}]
TARGETS = r".*attention\.(q|o|k\w*|v\w*)_proj"  # k_cmp_proj, k_slc_proj, ...
RANK, ALPHA = 3, 6


def adapted(**changes: Any) -> tuple[Any, LanguageModel, list[str]]:
    """A model with adapters, its language model before, and the names of the projections."""
    model = model_of(**changes)
    before = copy.deepcopy(model.lm)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0)
    adapters = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, x in adapters.named_parameters():
        if "lora" in name:
            x.data = torch.randn(x.shape, generator=generator, dtype=torch.float64) / 5
    names = [name for name, part in before.named_modules() if is_target(name, part)]
    return adapters, before, names


def is_target(name: str, part: nn.Module) -> bool:
    last = name.rpartition(".")[2]
    kinds = ("q_proj", "o_proj", "k", "v")
    return ".attention." in name and isinstance(part, nn.Linear) and last.startswith(kinds)


def factors(adapters: Any, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    module = adapters.get_base_model().lm.get_submodule(name)
    return module.lora_A["default"].weight, module.lora_B["default"].weight


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_equal_those_of_the_merged_weights(kind):
    """The loss is that of W + 2 B A; dA = 2 B^T dW, dB = 2 dW A^T, and nothing else has one."""
    adapters, before, names = adapted(**kind)
    x = tokens(2, 60)
    loss = adapters(input_ids=x, labels=x).loss
    loss.backward()
    assert len(names) == (16 if not kind else 8)
    scale = ALPHA / RANK
    merged: dict[str, Tensor] = {}
    for name in names:
        a, b = factors(adapters, name)
        weight = before.get_parameter(f"{name}.weight")
        merged[f"{name}.weight"] = (weight + scale * b @ a).detach().requires_grad_()
    logits = functional_call(before, merged, (x,))
    wanted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(wanted, list(merged.values()))
    for name, gradient in zip(names, gradients, strict=True):
        a, b = factors(adapters, name)
        torch.testing.assert_close(a.grad, scale * b.T @ gradient, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(b.grad, scale * gradient @ a.T, rtol=1e-5, atol=1e-8)
    for name, parameter in adapters.named_parameters():
        assert (parameter.grad is not None) == ("lora" in name)


@pytest.mark.parametrize("kind", KINDS[::2], ids=str)
def test_generation_in_every_state(kind):
    """On, disabled, merged, unmerged and unloaded: with a cache the texts are those without one."""
    adapters, before, _ = adapted(**kind)
    batch = left_padded([tokens(50), tokens(23, seed=2)])

    def texts(model):
        found = model.generate(**batch, max_new_tokens=6, do_sample=False)
        plainly = model.generate(**batch, max_new_tokens=6, do_sample=False, use_cache=False)
        assert torch.equal(found, plainly)
        return found[:, -6:]

    plain = texts(NSAForCausalLM(adapters.config, before).eval())
    on = texts(adapters)
    assert not torch.equal(on, plain)
    with adapters.disable_adapter():
        assert torch.equal(texts(adapters), plain)
    assert torch.equal(texts(adapters), on)
    adapters.merge_adapter()
    assert torch.equal(texts(adapters), on)
    adapters.unmerge_adapter()
    assert torch.equal(texts(adapters), on)
    unloaded = adapters.merge_and_unload()
    assert type(unloaded) is NSAForCausalLM
    assert torch.equal(texts(unloaded), on)


@pytest.mark.parametrize(
    ("method", "kind"), [("PromptTuningConfig", KINDS[0]), ("PromptEncoderConfig", KINDS[2])]
)
def test_generation_behind_a_soft_prompt(method, kind):
    """With a cache, texts are those without one."""
    model = model_of(**kind)
    sizes = {"token_dim": model.config.width, "num_attention_heads": 4, "num_layers": 2}
    config = getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=5, **sizes)
    tuned = peft.get_peft_model(model, config).double().eval()
    x = tokens(2, 50)
    batch = {"input_ids": x, "attention_mask": torch.ones_like(x)}
    for options in (GREEDY, GREEDY | {"num_beams": 2}):
        found = tuned.generate(**batch, **options)
        assert torch.equal(found, tuned.generate(**batch, **options, use_cache=False))
    plain = tuned.get_base_model().generate(**batch, **GREEDY)
    assert not torch.equal(plain, tuned.generate(**batch, **GREEDY))
