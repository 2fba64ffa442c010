"""Gated sum of the branches (Eq. 5): the specification."""

from __future__ import annotations

from torch import Tensor

from nsa.ops._masked_attention import accumulate_dtype


def combine_reference(
    branches: tuple[Tensor | None, Tensor | None, Tensor | None], gates: Tensor
) -> Tensor:
    """See :func:`nsa.combine`; ``branches`` are cmp, slc, win."""
    on = [(out, gates[..., index, None]) for index, out in enumerate(branches) if out is not None]
    dtype = accumulate_dtype(on[0][0])
    total = sum(out.to(dtype) * gate.to(dtype) for out, gate in on)
    assert isinstance(total, Tensor)
    return total.to(on[0][0].dtype)
