"""``nsa::select_blocks``, registered with PyTorch: schema and fake. It has no gradient.

Triton is loaded when the operator first runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.errors import check
from nsa.ops._limits import check_keys, check_queries
from nsa.ops._register import register


def check_fp8(capability: tuple[int, int]) -> None:
    """Scores in fp8 need a GPU that multiplies it."""
    rule = "be exact on a GPU of compute capability below 8.9"
    check(
        capability >= (8, 9),
        "select_blocks",
        "config.score_precision",
        rule,
        f"fp8 on {capability[0]}.{capability[1]}",
    )


def choice_result(q: Tensor, k: Tensor, num_blocks: int) -> Tensor:
    """Memory for the selected blocks, int32 ``[T, Hkv, n]``."""
    return q.new_empty(q.shape[0], k.shape[1], num_blocks, dtype=torch.int32)


def select_blocks_by_kernel(
    q: Tensor, k: Tensor, lse: Tensor, coarse: Tensor | None, *rest: Any, out: Tensor | None = None
) -> Tensor:
    """What the registered operator does, into ``out`` if it is given, see :func:`choice_result`."""
    from nsa.ops._range import by_head, rows
    from nsa.ops._triton.range_launch import RangeLayout
    from nsa.ops._triton.tuning import tile_for
    from nsa.ops.selection.launch import Selection, select_blocks_forward

    (
        *where,
        softmax_scale,
        coarse_factor,
        block_size,
        num_blocks,
        num_init,
        num_local,
        counts,
        precision,
    ) = rest
    check_queries("select_blocks", q)
    check_keys("select_blocks", "k_cmp", k, where[-1])
    q, k = rows(q), rows(k)
    if precision == "fp8" and q.is_cuda:
        check_fp8(torch.cuda.get_device_capability(q.device))
    selection = Selection(block_size, num_blocks, num_init, num_local, tuple(counts), precision)
    layout, tile = RangeLayout(False, *where), tile_for("select_blocks", q, k)
    out = choice_result(q, k, num_blocks) if out is None else out
    select_blocks_forward(
        q, k, by_head(lse), out, layout, softmax_scale, selection, tile, coarse, coarse_factor
    )
    return out


def _fake(q: Tensor, k: Tensor, lse: Tensor, coarse: Tensor | None, *rest: Any) -> Tensor:
    return choice_result(q, k, rest[-5])


select_blocks_op = register(
    "select_blocks",
    "(Tensor q, Tensor k, Tensor lse, Tensor? coarse, Tensor? cu_q, Tensor? cu_k, Tensor? cu_key, "
    "SymInt num_sequences, SymInt len_q, SymInt len_k, SymInt len_key, int size, int stride, "
    "float softmax_scale, int coarse_factor, int block_size, int num_blocks, int num_init, "
    "int num_local, int[] counts, str precision) -> Tensor",
    select_blocks_by_kernel,
    _fake,
)
