"""``nsa::embed``, registered with PyTorch: schema, fake, autograd. Triton is loaded when the backward first runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from nsa.ops._register import register


def _forward(tokens: Tensor, weight: Tensor) -> Tensor:
    return functional.embedding(tokens, weight)


def _backward(dout: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    from nsa.ops.embedding.triton_bwd import embed_backward

    return embed_backward(dout.flatten(0, -2).contiguous(), tokens.flatten(), num_rows)


def _fake(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[1])


def _fake_backward(dout: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    return dout.new_empty(num_rows, dout.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.save_for_backward(tokens)
    ctx.num_rows = weight.shape[0]


def _differentiate(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
    (tokens,) = ctx.saved_tensors
    return None, embed_backward_op(dout, tokens, ctx.num_rows)


embed_op = register(
    "embed",
    "(Tensor tokens, Tensor weight) -> Tensor",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_differentiate,
)
embed_backward_op = register(
    "embed_backward",
    "(Tensor dout, Tensor tokens, SymInt num_rows) -> Tensor",
    _backward,
    _fake_backward,
)
