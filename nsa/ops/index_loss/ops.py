"""Registration of the loss of an index head with PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops._operator import OFFSETS, Call, FlatCall, open_flat, schema_of
from nsa.ops._register import register
from nsa.ops.index_loss.types import IndexLoss, IndexLossInputs

COUNT = len(IndexLossInputs._fields)


def new_state(inputs: IndexLossInputs, *, is_packed: bool = True) -> list[Tensor]:
    """Allocate what the gradient needs, see the kernels of the two phases.

    Packed inputs may have rows that belong to no sequence and are not visited.

    Selected blocks: slopes, rows of the index keys, the selections in the order of their key
    blocks, and these. All blocks: the gradient of the index queries, sums over the blocks, and lse.
    With several index heads, the last one is their lse of the forced blocks.
    """
    q_idx, k_idx, q, k, block_indices = inputs[:5]
    (num_q, num_heads, index_dim), num_kv_heads = q_idx.shape, k.shape[1]
    index_heads, shared = num_heads // k_idx.shape[1], num_kv_heads // k_idx.shape[1]
    if block_indices is None:
        shape = num_q, num_kv_heads * index_heads, index_dim
        shapes = [shape, (2, num_kv_heads, num_q), (q.shape[1], num_q)]
        state = [q_idx.new_zeros(shape, dtype=torch.float32) for shape in shapes]
    else:
        shape = num_q, num_heads, shared * block_indices.shape[-1]
        slope = q_idx.new_empty(shape, dtype=torch.float32)
        row = torch.empty_like(slope, dtype=torch.int32)
        if is_packed:
            slope.zero_()
            row.fill_(-1)
        state = [slope, row, *(row.new_empty(block_indices.numel()) for _ in range(2))]
    if index_heads > 1:
        state.append(q_idx.new_zeros(num_heads, num_q, dtype=torch.float32))
    return state


def _forward(*flat: Any) -> list[Tensor]:
    inputs, call = open_flat(IndexLossInputs, COUNT, flat)
    state = new_state(inputs, is_packed=call.sequences.offsets is not None)
    shape = inputs.q.shape[0], inputs.k.shape[1]
    loss = inputs.q.new_zeros(shape, dtype=torch.float32)
    counts = torch.zeros_like(loss, dtype=torch.int32)
    if state[0].numel():
        from nsa.ops.index_loss.launch import forward

        forward(inputs, call, loss, counts, state)
    return [loss.sum(), (counts > 0).sum(), *state]


def _fake(*flat: Any) -> list[Tensor]:
    inputs = IndexLossInputs(*flat[:COUNT])
    scalars = (inputs.q.new_empty((), dtype=x) for x in (torch.float32, torch.int64))
    return [*scalars, *new_state(inputs)]


def _backward(dout: Tensor, state: list[Tensor], *flat: Any) -> list[Tensor]:
    inputs, call = open_flat(IndexLossInputs, COUNT, flat)
    if not state[0].numel():
        return [torch.zeros_like(x) for x in inputs[:2]]
    from nsa.ops.index_loss.launch import backward

    return [*backward(inputs, call, dout, state)]


def _fake_backward(dout: Tensor, state: list[Tensor], *flat: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in flat[:2]]


def _setup_context(ctx: Any, flat: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = flat[COUNT + OFFSETS :]
    ctx.save_for_backward(*flat[: COUNT + OFFSETS], *output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    rest = (None,) * (COUNT - 2 + OFFSETS + len(ctx.settings))
    if dout is None:
        return None, None, *rest
    saved = ctx.saved_tensors
    flat, state = saved[: COUNT + OFFSETS], saved[COUNT + OFFSETS :]
    return *index_loss_backward_op(dout, list(state), *flat, *ctx.settings), *rest


_ARGUMENTS = schema_of(IndexLossInputs, FlatCall)
index_loss_op = register(
    "index_loss",
    f"({_ARGUMENTS}) -> Tensor[]",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_differentiate,
)
index_loss_backward_op = register(
    "index_loss_backward",
    f"(Tensor dout, Tensor[] state, {_ARGUMENTS}) -> Tensor[]",
    _backward,
    _fake_backward,
)


def run_operator(inputs: IndexLossInputs, call: Call) -> IndexLoss:
    """Run the operator on packed, validated inputs."""
    total, num_terms, *_ = index_loss_op(*inputs, *call.flat())
    return IndexLoss(total, num_terms)
