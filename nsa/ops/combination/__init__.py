"""Gated sum of the branches."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import BRANCHES
from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._masked_attention import accumulate_dtype
from nsa.ops.combination.ops import combine_op, present
from nsa.stages import GATES, in_stage

__all__ = ["combine"]


@in_stage(GATES)
def combine(
    out_cmp: Tensor | None,
    out_slc: Tensor | None,
    out_win: Tensor | None,
    gates: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Gated sum of the branches (Eq. 5, arXiv:2502.11089).

    Args:
        out_cmp: output of the compressed branch ``[..., Hq, Dv]``; None if the branch is disabled.
        out_slc: output of the selected branch, likewise.
        out_win: output of the window, likewise.
        gates: activated gates ``[..., Hq, 3]``, order (cmp, slc, win).
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., Hq, Dv]``, summed in fp32 (fp64 for fp64 inputs), in the dtype of the branches.

    Raises:
        ValueError: no branch is given, or shapes differ.
    """
    name = "combine"
    branches, columns = present(out_cmp, out_slc, out_win)
    check(len(branches) > 0, name, "out_cmp, out_slc, out_win", "not all be None", None)
    first, shape = f"out_{BRANCHES[columns[0]]}", tuple(branches[0].shape)
    for column, out in zip(columns, branches, strict=True):
        rule = f"have shape {shape} like {first}"
        check(tuple(out.shape) == shape, name, f"out_{BRANCHES[column]}", rule, tuple(out.shape))
    expected = (*shape[:-1], 3)
    check(
        tuple(gates.shape) == expected, name, "gates", f"have shape {expected}", tuple(gates.shape)
    )
    if choose_backend(name, backend, branches[0], first) == "triton":
        return combine_op(branches, columns, gates)
    with torch.autocast(gates.device.type, enabled=False):
        return combine_reference((out_cmp, out_slc, out_win), gates)


def combine_reference(
    branches: tuple[Tensor | None, Tensor | None, Tensor | None], gates: Tensor
) -> Tensor:
    """See :func:`nsa.combine`; ``branches`` are (cmp, slc, win)."""
    on = [(out, gates[..., index, None]) for index, out in enumerate(branches) if out is not None]
    dtype = accumulate_dtype(on[0][0])
    total = sum(out.to(dtype) * gate.to(dtype) for out, gate in on)
    assert isinstance(total, Tensor)
    return total.to(on[0][0].dtype)
