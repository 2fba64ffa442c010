"""The example that puts NSA into Llama's attention: dense up to n * l' tokens, sparse beyond."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hf.tiny import left_padded, tokens
from tests.ops.cases import small

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/llama_nsa.py"


def test_logits_are_dense_up_to_the_selected_tokens() -> None:
    spec = importlib.util.spec_from_file_location("llama_nsa", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    pattern = small()
    example.register(pattern)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    dense = LlamaForCausalLM(config).eval()
    state = dense.state_dict()
    other = copy.deepcopy(config)
    sparse = LlamaForCausalLM._from_config(other, attn_implementation="nsa").eval()
    sparse.load_state_dict(state)
    same = pattern.num_selected_blocks * pattern.block_size
    x = tokens(2, 3 * same)
    found, wanted = sparse(x).logits, dense(x).logits
    torch.testing.assert_close(found[:, :same], wanted[:, :same], rtol=0, atol=1e-6)
    assert (found - wanted)[:, -same:].abs().amax((0, 2)).min() > 1e-4
    options = {"max_new_tokens": 8, "do_sample": False}
    texts = [model.generate(x[:, : same - 8], **options) for model in (sparse, dense)]
    assert torch.equal(*texts)
    with pytest.raises(ValueError, match="attention_mask must be without padding"):
        sparse(**left_padded([tokens(9), tokens(5)]))
