"""``nsa::selected_attention``, registered with PyTorch: schema, fake, autograd. Triton is loaded when it first runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops._range import rows

_WHERE = "Tensor? cu_q, Tensor? cu_k, SymInt num_sequences, SymInt len_q, SymInt len_k, int block_size, float softmax_scale"


def _forward(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from nsa.ops._triton.layout import Layout
    from nsa.ops._triton.tuning import tile_for
    from nsa.ops.selected.triton_launch import selected_forward

    *where, block_size, softmax_scale = rest
    q, k, v = (rows(x) for x in (q, k, v))
    tile = tile_for("selected_attention_fwd", q, v)
    return selected_forward(q, k, v, block_indices, Layout(*where), softmax_scale, block_size, tile)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from nsa.ops._triton.layout import Layout
    from nsa.ops._triton.tuning import tile_for
    from nsa.ops.selected.triton_launch import selected_backward

    *where, block_size, softmax_scale = rest
    q, k, v, dout = (rows(x) for x in (q, k, v, dout))
    tiles = (tile_for(f"selected_attention_{kind}", q, v) for kind in ("dq", "dkv"))
    return selected_backward(q, k, v, block_indices, out, dout, lse, Layout(*where), softmax_scale, block_size, *tiles)


selected_attention_op = torch.library.custom_op(
    "nsa::selected_attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor block_indices, {_WHERE}) -> (Tensor, Tensor)",
)
selected_attention_backward_op = torch.library.custom_op(
    "nsa::selected_attention_backward",
    _backward,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor out, Tensor lse, Tensor dout, "
        f"{_WHERE}) -> (Tensor, Tensor, Tensor)"
    ),
)


@selected_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)


@selected_attention_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, block_indices, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, block_indices, *output, cu_q, cu_k)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * (3 + len(ctx.rest))
    if dout is None:
        return None, None, None, *none
    *saved, cu_q, cu_k = ctx.saved_tensors
    return *selected_attention_backward_op(*saved, dout, cu_q, cu_k, *ctx.rest), *none


selected_attention_op.register_autograd(_differentiate, setup_context=_setup_context)
