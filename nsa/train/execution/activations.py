"""Activation checkpointing: tensors that layers keep, and those that they recompute."""

from __future__ import annotations

from nsa.errors import check
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.lm.recomputation import Keeps
from nsa.train.config import CheckpointingConfig


def checkpoint_activations(model: LanguageModel, config: CheckpointingConfig) -> None:
    """Set what the layers of ``model`` keep, by the policy.

    Raises:
        ValueError: the policy is ``operators`` for sparse attention on a CPU, whose reference is no
            single operator.
    """
    is_single = model.config.attention_kind == "dense" or model.embedding.weight.is_cuda
    fits = config.policy != "operators" or is_single
    rule = "not be operators with attention nsa on a CPU"
    hint = "On a CPU attention is no single operator; take full."
    check(fits, "checkpointing.policy", rule, config.policy, hint)
    for index, layer in enumerate(model.decoder_layers()):
        layer.keeps = config.keeps(index)


def kept_bytes(config: LMConfig, keeps: Keeps, activation_bytes: int = 2) -> dict[str, int]:
    """Bytes per token that a recomputing layer keeps for its backward pass, by tensor.

    While a layer runs backward, its recomputed tensors exist as well, one layer at a time.

    Args:
        config: the model, from :meth:`LMConfig.layer`.
        keeps: ``attention`` or ``input``; for ``everything``, PyTorch and its compiler decide what
            is kept.
        activation_bytes: size of an element of a matrix product's result: 2 for bf16 compute, 4
            for fp32.
    """
    check(keeps != "everything", "keeps", "be attention or input", keeps)
    kept = {"input": 4 * config.width}  # the residual stream is fp32
    if keeps == "input":
        return kept
    pattern = config.nsa
    output = kept["out"] = activation_bytes * pattern.num_heads * pattern.value_dim
    statistics = 4 * pattern.num_heads
    if config.attention == "dense":
        return {**kept, "lse": statistics}
    for branch in pattern.branches:
        kept |= {f"out_{branch}": output, f"lse_{branch}": statistics}
    if "slc" in pattern.branches:
        kept["block_indices"] = 4 * pattern.num_kv_heads * pattern.num_selected_blocks
        kept["order"] = kept["block_indices"]
    if pattern.compresses_keys:
        kept["lse_cmp"] = statistics
    return kept
