"""Activation checkpointing that keeps the results of attention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import SelectiveCheckpointContext, create_selective_checkpoint_contexts

Keeps = Literal["everything", "attention", "input"]

# Attention operators on a GPU, and of dense attention on a CPU; the sparse reference is not a
# single operator. They are listed by name, so that they need not be registered yet.
ATTENTION_OPERATORS = (
    "nsa.attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
)


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts of forward pass and recomputation that keep the results of attention.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; selective by
    operator as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", arXiv:2205.05198.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> Policy:
    return Policy.MUST_SAVE if str(operator) in ATTENTION_OPERATORS else Policy.PREFER_RECOMPUTE
