"""The branches and their gated sum, after compression."""

from __future__ import annotations

from nsa.ops._operator import Call
from nsa.ops.attention.by_branch import attention_by_branch
from nsa.ops.attention.inputs import AttentionResult, BranchInputs
from nsa.ops.attention.ops import attention_op

__all__ = ["AttentionResult", "BranchInputs", "attention_by_branch", "run_attention"]


def run_attention(inputs: BranchInputs, call: Call, backend: str) -> AttentionResult:
    """Attention of packed, checked inputs; ``triton`` runs one operator."""
    if backend == "reference":
        return attention_by_branch(inputs, call, backend)
    results = attention_op(inputs, call)
    if inputs.k_slc is None:
        return AttentionResult(results.out, None, None)
    return AttentionResult(results.out, results.block_indices, results.tile_stats)
