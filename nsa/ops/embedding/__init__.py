"""Embedding lookup with a gradient that is bitwise reproducible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._register import register


def _forward(tokens: Tensor, weight: Tensor) -> Tensor:
    return functional.embedding(tokens, weight)


def _backward(dout: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """Gradient ``[num_rows, width]`` of the table from that of its rows."""
    from nsa.ops._triton.sums import sum_by_index

    dweight = dout.new_empty(num_rows, dout.shape[-1])
    sum_by_index(dout.flatten(0, -2).contiguous(), tokens.flatten(), dweight)
    return dweight


def _fake(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[1])


def _fake_backward(dout: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    return dout.new_empty(num_rows, dout.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.save_for_backward(tokens)
    ctx.num_rows = weight.shape[0]


def _differentiate(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
    return None, embed_backward_op(dout, *ctx.saved_tensors, ctx.num_rows)


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


__all__ = ["embed"]


def embed(tokens: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """``torch.nn.functional.embedding`` with a deterministic gradient on a GPU.

    The summation order of PyTorch's own gradient changes from run to run on a GPU.

    Args:
        tokens: integers in ``[0, V)``, any shape.
        weight: the table ``[V, width]``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[*tokens.shape, width]``, contiguous, in the dtype of ``weight``. The gradient of the
        table is summed in fp32, in an order that depends only on the tokens.

    Raises:
        ValueError: the table is not a matrix, or ``tokens`` are not integers.
        IndexError: a token is not in the table; on a GPU a device-side assertion.
    """
    check(weight.ndim == 2, "weight", "have shape [V, width]", tuple(weight.shape))
    integers = tokens.dtype in (torch.int64, torch.int32)
    check(integers, "tokens", "be int64 or int32", tokens.dtype)
    if choose_backend(backend, weight, "weight") == "reference":
        return functional.embedding(tokens, weight)
    return embed_op(tokens, weight)
