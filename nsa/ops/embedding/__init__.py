"""Rows of a table by token, with a gradient whose bits do not depend on the run."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops.embedding.ops import embed_op
from nsa.ops.embedding.reference import embed_reference

__all__ = ["embed"]


def embed(tokens: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """``torch.nn.functional.embedding``, whose own gradient on a GPU adds up in an order that changes from run to run.

    Args:
        tokens: integers in ``[0, V)``, any shape.
        weight: the table ``[V, width]``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[*tokens.shape, width]``, contiguous, in the dtype of ``weight``. The gradient of the
        table is summed in fp32, in an order that the tokens alone decide.

    Raises:
        ValueError: the table is not a matrix, or ``tokens`` are not integers.
        IndexError: a token is not in the table; on a GPU an assertion on the device.
    """
    check(weight.ndim == 2, "embed", "weight", "have shape [V, width]", tuple(weight.shape))
    check(
        tokens.dtype in (torch.int64, torch.int32),
        "embed",
        "tokens",
        "be int64 or int32",
        tokens.dtype,
    )
    if choose_backend("embed", backend, weight, "weight") == "reference":
        return embed_reference(tokens, weight)
    return embed_op(tokens, weight)
