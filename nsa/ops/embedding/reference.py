"""Rows of a table by token: the specification."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def embed_reference(tokens: Tensor, weight: Tensor) -> Tensor:
    """See :func:`nsa.ops.embedding.embed`."""
    return functional.embedding(tokens, weight)
