"""``nsa::selected_attention``, registered with PyTorch: schema, fake, autograd.

Triton is loaded when it first runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa.ops._limits import check_keys, check_numbers, check_queries
from nsa.ops._range import rows
from nsa.ops._register import register

if TYPE_CHECKING:
    from nsa.ops._triton.layout import Gated

# out, lse, order, tile_stats.
Results = tuple[Tensor, Tensor, Tensor, Tensor]

_WHERE = (
    "Tensor? cu_q, Tensor? cu_k, SymInt num_sequences, SymInt len_q, SymInt len_k, "
    "int block_size, float softmax_scale, str algorithm"
)


def selected_call(q: Tensor, v: Tensor, *where: Any, unique: bool = False) -> Any:
    """The ``Call`` of the launchers, from what the registered operator is told beside tensors.

    ``unique``: whether no query names a block twice; of caller-made indices it is not known.
    """
    from nsa.ops._triton.layout import Layout
    from nsa.ops._triton.tuning import tile_for
    from nsa.ops.selected.launch import Call

    *layout, block_size, softmax_scale, algorithm = where
    tiles = partial(tile_for, q=q, v=v)
    return Call(Layout(*layout), softmax_scale, block_size, tiles, algorithm, unique=unique)


def _forward(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *where: Any) -> Results:
    results = new_results(q, k, v, block_indices, *where)
    run_selected_forward(q, k, v, block_indices, results, *where)
    return results


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    order: Tensor,
    tile_stats: Tensor,
    dout: Tensor,
    *where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    run_selected_backward(
        q, k, v, block_indices, (out, lse, order, tile_stats), dout, grads, *where
    )
    return grads


def new_results(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *where: Any) -> Results:
    """Memory for the results of the registered operator; ``where``: what follows the tensors."""
    results = selected_call(q, v, *where).results(q, k, v, block_indices)
    if results.order is None or results.tile_stats is None:
        return results.out, results.lse, *no_index(block_indices, *where)
    return results.out, results.lse, results.order, results.tile_stats


def run_selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    results: Results,
    *where: Any,
    unique: bool = False,
) -> None:
    """The kernels of the registered operator.

    Args:
        q: queries.
        k: keys.
        v: values.
        block_indices: the selected blocks.
        results: of :func:`new_results`.
        where: what the operator takes after the tensors.
        unique: whether no query names a block twice.
    """
    from nsa.ops.selected.launch import selected_forward

    check_queries("selected_attention", q)
    check_keys("selected_attention", "k", k)
    selections = block_indices.numel()
    check_numbers(
        "selected_attention",
        "block_indices",
        selections,
        "selections (tokens times KV heads times slots)",
    )
    q, k, v = (rows(x) for x in (q, k, v))
    call = selected_call(q, v, *where, unique=unique)
    read = call.read(q, k, block_indices.shape[-1], results)
    selected_forward(q, k, v, block_indices, call, read)


def run_selected_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    results: Results,
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    *where: Any,
    gated: Gated | None = None,
    unique: bool = False,
) -> None:
    """The kernels of the registered operator's backward.

    Args:
        q: queries, and so the other inputs of the forward.
        k: keys.
        v: values.
        block_indices: the selected blocks.
        results: of the forward.
        dout: gradient of out; with ``gated`` that of the branches' gated sum.
        grads: where dq, dk and dv go, contiguous.
        where: what the operator takes after the tensors.
        gated: the branch's part in the gated sum.
        unique: as in the forward.
    """
    from nsa.ops._triton.layout import Gated
    from nsa.ops.selected.launch import selected_backward

    q, k, v, dout = (rows(x) for x in (q, k, v, dout))
    call = selected_call(q, v, *where, unique=unique)
    read = call.read(q, k, block_indices.shape[-1], results)
    selected_backward(q, k, v, block_indices, dout, call, read, grads, gated or Gated())


def no_index(block_indices: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    """The forward's last outputs, order and tile_stats, where they are not read.

    Whether they are read depends on the lengths too, their shapes do not: what is compiled for one
        length serves all.
    """
    count = 0 if where[-1] == "tiled" else block_indices.numel()
    return block_indices.new_zeros(count, dtype=torch.int32), block_indices.new_zeros(
        2, dtype=torch.int64
    )


def _fake(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *where: Any
) -> tuple[Tensor, ...]:
    out, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)
    return out, lse, *no_index(block_indices, *where)


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, block_indices, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, block_indices, *output, cu_q, cu_k)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * (3 + len(ctx.rest))
    if dout is None:
        return None, None, None, *none
    *saved, cu_q, cu_k = ctx.saved_tensors
    return *selected_attention_backward_op(*saved, dout, cu_q, cu_k, *ctx.rest), *none


selected_attention_op = register(
    "selected_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor block_indices, {_WHERE}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_differentiate,
)
selected_attention_backward_op = register(
    "selected_attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor out, Tensor lse, Tensor order, "
    f"Tensor tile_stats, Tensor dout, {_WHERE}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
