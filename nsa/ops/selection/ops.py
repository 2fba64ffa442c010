"""``nsa::select_blocks``, registered with PyTorch. It has no gradient.

Triton is imported at the first launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.errors import check
from nsa.ops._checks import check_keys, check_queries
from nsa.ops._layout import by_head, rows
from nsa.ops._operator import Call, FlatCall, KeyRange, schema_of
from nsa.ops._register import register
from nsa.ops.selection.reference import SelectionInputs, coarse_keys


def check_fp8(capability: tuple[int, int]) -> None:
    """Check that the GPU supports fp8 matmuls."""
    rule = "be exact on a GPU of compute capability below 8.9"
    got = f"fp8 on {capability[0]}.{capability[1]}"
    check(capability >= (8, 9), "select_blocks", "config.score_precision", rule, got)


def new_selection(q: Tensor, k: Tensor, num_blocks: int) -> Tensor:
    """Allocate the selected blocks, int32 ``[T, Hkv, n]``."""
    return q.new_empty(q.shape[0], k.shape[1], num_blocks, dtype=torch.int32)


def select_blocks_by_kernel(inputs: SelectionInputs, call: Call, out: Tensor) -> None:
    """Write the selection to ``out``, see :func:`new_selection`."""
    from nsa.ops.selection.launch import Selection, select_blocks_forward

    config, keys = call.config, KeyRange.of_blocks(call)
    check_queries("select_blocks", inputs.q)
    check_keys("select_blocks", "k_cmp", inputs.k_cmp, keys.stride)
    if config.score_precision == "fp8" and inputs.q.is_cuda:
        check_fp8(torch.cuda.get_device_capability(inputs.q.device))
    q, k, lse = rows(inputs.q), rows(inputs.k_cmp), by_head(inputs.lse)
    coarse = None
    if config.coarse_block_size is not None:
        means, cu_coarse = coarse_keys(inputs.k_cmp, config, call.sequences)
        first, ranges = Selection.of_coarse(config), keys.of_coarse(config, cu_coarse)
        coarse = new_selection(q, means, first.num_blocks)
        select_blocks_forward(q, means, lse, coarse, ranges, call.softmax_scale, first)
    selection = Selection.of(config)
    select_blocks_forward(q, k, lse, out, keys, call.softmax_scale, selection, coarse)


def _run(*flat: Any) -> Tensor:
    inputs, call = SelectionInputs(*flat[:3]), FlatCall(*flat[3:]).open(flat[0].device)
    out = new_selection(inputs.q, inputs.k_cmp, call.config.num_selected_blocks)
    select_blocks_by_kernel(inputs, call, out)
    return out


def _fake(*flat: Any) -> Tensor:
    inputs, call = SelectionInputs(*flat[:3]), FlatCall(*flat[3:]).open(flat[0].device)
    return new_selection(inputs.q, inputs.k_cmp, call.config.num_selected_blocks)


select_blocks_op = register(
    "select_blocks", f"({schema_of(SelectionInputs, FlatCall)}) -> Tensor", _run, _fake
)
