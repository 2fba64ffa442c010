"""Sparse attention in an existing model of Llama's layout, through transformers' interface.

python -m examples.llama    # compares a small random Llama with and without it

Up to ``num_selected_blocks * block_size`` tokens every block is selected and the logits equal
those of dense attention. Beyond that the model sees less than it was trained with: expect it to be
worse until it is trained further, and measure it. Gates, the compressed branch and phi are not in
this layout; for those, train a model with ``nsa train``.

    nsa.hf.register(num_selected_blocks=16, block_size=64, branches=("slc",))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="nsa")
"""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nsa.hf


@torch.no_grad()
def main() -> None:
    """Print where the logits of the sparse and the dense model begin to differ."""
    nsa.hf.register(num_selected_blocks=4, block_size=32, branches=("slc",))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    dense = LlamaForCausalLM(config).eval()
    sparse = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="nsa").eval()
    sparse.load_state_dict(dense.state_dict())
    tokens = torch.randint(256, (1, 256))
    difference = (sparse(tokens).logits - dense(tokens).logits).abs().amax(-1)[0]
    print(f"equal for the first {int((difference < 1e-5).sum())} of {tokens.shape[1]} tokens")


if __name__ == "__main__":
    main()
