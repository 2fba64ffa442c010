"""Sparse attention in an existing Llama-layout model, by transformers' attention interface.

The model keeps its weights and gets none: the selected branch of NSA alone, whose blocks are
scored by the mean of their rotated keys, at a gate of 1. Up to n * l' tokens (the pattern's
``num_selected_blocks`` times ``block_size``) every block is selected and the logits are those of
dense attention. Beyond that the weights see less than they were trained with: expect a worse model
until it is trained further, and measure it. What NSA learns (gates, the compressed branch, the
window, phi) has no place in this layout: train a model with ``nsa train`` for those.

Rows may not be padded. With a cache every step scores all blocks anew, from all keys: this shows
the mechanism, not the speed of decoding.

    register(NSAConfig(num_selected_blocks=16, block_size=64))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="nsa")
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from nsa import NSAConfig, native_sparse_attention


def register(pattern: NSAConfig, name: str = "nsa") -> None:
    """Make ``attn_implementation=name`` select blocks by this pattern; heads are the model's."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,  # [B, Hq, T, D], rotated
        key: Tensor,  # [B, Hkv, S, D], rotated
        value: Tensor,  # [B, Hkv, S, D]
        attention_mask: None,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        config = replace(
            pattern,
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            branches=("slc",),
            phi="mean",
            compress_rope="none",  # the keys are rotated already
        )
        gates = q.new_ones(*q.shape[:3], 3)
        heads = (k, None, k, v, None, None)  # k_cmp_raw, v_cmp_raw, k_slc, v_slc, k_win, v_win
        out = native_sparse_attention(q, *heads, gates, None, config, softmax_scale=scaling)
        return out, None

    def no_mask(*args: Any, attention_mask: Tensor | None = None, **others: Any) -> None:
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("register: attention_mask must be without padding, got some")

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, no_mask)
