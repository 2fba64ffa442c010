"""Rows of a table by token, with a gradient whose bits are the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops.embedding.ops import embed_op

__all__ = ["embed"]


def embed(tokens: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """``torch.nn.functional.embedding``, with a deterministic gradient on a GPU.

    PyTorch's own gradient there adds up in an order that changes from run to run.

    Args:
        tokens: integers in ``[0, V)``, any shape.
        weight: the table ``[V, width]``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[*tokens.shape, width]``, contiguous, in the dtype of ``weight``. The gradient of the
        table is summed in fp32, in an order that depends on the tokens alone.

    Raises:
        ValueError: the table is not a matrix, or ``tokens`` are not integers.
        IndexError: a token is not in the table; on a GPU an assertion on the device.
    """
    name = "embed"
    check(weight.ndim == 2, name, "weight", "have shape [V, width]", tuple(weight.shape))
    integers = tokens.dtype in (torch.int64, torch.int32)
    check(integers, name, "tokens", "be int64 or int32", tokens.dtype)
    if choose_backend(name, backend, weight, "weight") == "reference":
        return functional.embedding(tokens, weight)
    return embed_op(tokens, weight)
