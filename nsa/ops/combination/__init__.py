"""Gated sum of the branches."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.errors import check, fail
from nsa.ops._backend import choose_backend
from nsa.ops.combination.ops import combine_op
from nsa.ops.combination.reference import combine_reference
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
        out_cmp: output of the compressed branch ``[..., Hq, Dv]``; None when it is off, which adds
            nothing.
        out_slc: of the selected branch, likewise.
        out_win: of the window, likewise.
        gates: activated gates ``[..., Hq, 3]``, order (cmp, slc, win).
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., Hq, Dv]``, summed in fp32 (fp64 for fp64 inputs), in the dtype of the branches.

    Raises:
        ValueError: no branch is given, or shapes differ.
    """
    outputs = [
        (name, out)
        for name, out in (("out_cmp", out_cmp), ("out_slc", out_slc), ("out_win", out_win))
        if out is not None
    ]
    check(len(outputs) > 0, "combine", "out_cmp, out_slc, out_win", "not all be None", None)
    shape = outputs[0][1].shape
    for name, out in outputs:
        if out.shape != shape:
            fail(
                "combine",
                name,
                f"have shape {tuple(shape)} as the other branches",
                tuple(out.shape),
            )
    expected = (*shape[:-1], 3)
    if tuple(gates.shape) != expected:
        fail("combine", "gates", f"have shape {expected}", tuple(gates.shape))
    if choose_backend("combine", backend, outputs[0][1], outputs[0][0]) == "triton":
        return combine_op(out_cmp, out_slc, out_win, gates)
    with torch.autocast(gates.device.type, enabled=False):
        return combine_reference((out_cmp, out_slc, out_win), gates)
