"""Attention branches and their gated sum, without compression."""

from __future__ import annotations

from nsa.ops._operator import Call
from nsa.ops.attention.ops import AttentionResult, BranchInputs, attention_op
from nsa.ops.combination import combine
from nsa.ops.range import run_compressed_attention, run_window_attention
from nsa.ops.range.reference import RangeInputs
from nsa.ops.selected import SelectedInputs, run_selected_attention
from nsa.ops.selection import run_select_blocks


def attention_by_branch(
    inputs: BranchInputs, call: Call, backend: str, window: Call | None = None
) -> AttentionResult:
    """Attention of packed, validated inputs; backend ``reference`` is the specification.

    ``window`` is the call of the window branch if its keys are other tokens, as with a cache.
    """
    q, _, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = inputs
    out_cmp = lse = out_slc = out_win = block_indices = None
    if k_cmp is not None:
        queries = inputs.scoring_queries
        out_cmp, lse = run_compressed_attention(queries, k_cmp, v_cmp, call, backend)
    if k_slc is not None and v_slc is not None:
        block_indices = run_select_blocks(inputs.scored(call.config, lse), call, backend)
        selected = SelectedInputs(q, k_slc, v_slc, block_indices)
        out_slc, _ = run_selected_attention(selected, call, backend)
    if k_win is not None and v_win is not None:
        keys = RangeInputs(q, k_win, v_win)
        out_win, _ = run_window_attention(keys, window or call, backend)
    out = combine(out_cmp, out_slc, out_win, gates, backend=backend)
    return AttentionResult(out, block_indices, None)


__all__ = ["AttentionResult", "BranchInputs", "attention_by_branch", "run_attention"]


def run_attention(inputs: BranchInputs, call: Call, backend: str) -> AttentionResult:
    """Attention of packed, validated inputs; backend ``triton`` runs one fused operator."""
    if backend == "reference":
        return attention_by_branch(inputs, call, backend)
    results = attention_op(inputs, call)
    if inputs.k_slc is None:
        return AttentionResult(results.out, None, None)
    return AttentionResult(results.out, results.block_indices, results.tile_stats)
