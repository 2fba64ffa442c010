"""Gated sum of the branches, and its gradients (Eq. 5)."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.sizes import cdiv, next_power_of_2
from nsa.ops._triton.tiles import VARYING

BLOCK_ROWS = 16

Branches = tuple[Tensor | None, Tensor | None, Tensor | None]


@kernel(do_not_specialize=VARYING)
def combine_fwd_kernel(
    cmp_ptr,
    slc_ptr,
    win_ptr,
    gates_ptr,
    out_ptr,
    num_rows,
    DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """``BLOCK_R`` rows (queries by heads) of the output; a pointer is None where the branch is off."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_DV)
    ok = row < num_rows
    mask = ok[:, None] & (d < DV)[None, :]
    at = row[:, None] * DV + d[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    if cmp_ptr is not None:
        gate = tl.load(gates_ptr + row * 3, mask=ok, other=0.0).to(tl.float32)
        total += tl.load(cmp_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate[:, None]
    if slc_ptr is not None:
        gate = tl.load(gates_ptr + row * 3 + 1, mask=ok, other=0.0).to(tl.float32)
        total += tl.load(slc_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate[:, None]
    if win_ptr is not None:
        gate = tl.load(gates_ptr + row * 3 + 2, mask=ok, other=0.0).to(tl.float32)
        total += tl.load(win_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def branch_gradient(
    x_ptr, dx_ptr, dgates_ptr, gates_ptr, dout, first, r, ok, at, mask, DV: tl.constexpr, BRANCH: tl.constexpr
):  # fmt: skip
    """Gradients of one branch's output and gate; the gate's is 0 where the branch is off."""
    if x_ptr is not None:
        gate = tl.load(gates_ptr + first * 3 + (r * 3 + BRANCH), mask=ok, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + first * DV + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(
            dx_ptr + first * DV + at, (dout * gate[:, None]).to(dx_ptr.dtype.element_ty), mask=mask
        )
        dgate = tl.sum(dout * x, 1)
    else:
        dgate = tl.zeros([ok.shape[0]], tl.float32)
    tl.store(
        dgates_ptr + first * 3 + (r * 3 + BRANCH), dgate.to(dgates_ptr.dtype.element_ty), mask=ok
    )


@kernel(do_not_specialize=VARYING)
def combine_bwd_kernel(
    cmp_ptr, slc_ptr, win_ptr, gates_ptr, dout_ptr, dcmp_ptr, dslc_ptr, dwin_ptr, dgates_ptr, num_rows, DV: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Gradients of ``BLOCK_R`` rows."""
    # One 64-bit address for the tile, 32-bit distances inside it: fewer registers.
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    r = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_DV)
    ok = first + r < num_rows
    mask = ok[:, None] & (d < DV)[None, :]
    at = r[:, None] * DV + d[None, :]
    dout = tl.load(dout_ptr + first * DV + at, mask=mask, other=0.0).to(tl.float32)
    branch_gradient(cmp_ptr, dcmp_ptr, dgates_ptr, gates_ptr, dout, first, r, ok, at, mask, DV, 0)
    branch_gradient(slc_ptr, dslc_ptr, dgates_ptr, gates_ptr, dout, first, r, ok, at, mask, DV, 1)
    branch_gradient(win_ptr, dwin_ptr, dgates_ptr, gates_ptr, dout, first, r, ok, at, mask, DV, 2)


def combine_forward(branches: Branches, gates: Tensor) -> Tensor:
    """Gated sum, like the branches; all tensors contiguous."""
    first = next(x for x in branches if x is not None)
    out = torch.empty_like(first)
    num_rows, size = first.numel() // first.shape[-1], first.shape[-1]
    if num_rows:
        combine_fwd_kernel[(cdiv(num_rows, BLOCK_ROWS),)](
            *branches,
            gates,
            out,
            num_rows,
            DV=size,
            BLOCK_R=BLOCK_ROWS,
            BLOCK_DV=next_power_of_2(size),
            num_warps=4,
        )
    return out


def combine_backward(branches: Branches, gates: Tensor, dout: Tensor) -> tuple[Branches, Tensor]:
    """Gradients of the branches that are on, and of the gates."""
    grads = tuple(None if x is None else torch.empty_like(x) for x in branches)
    dgates = torch.empty_like(gates)
    num_rows, size = dout.numel() // dout.shape[-1], dout.shape[-1]
    if num_rows:
        combine_bwd_kernel[(cdiv(num_rows, BLOCK_ROWS),)](
            *branches, gates, dout, *grads, dgates, num_rows, DV=size, BLOCK_R=BLOCK_ROWS,
            BLOCK_DV=next_power_of_2(size), num_warps=4,
        )  # fmt: skip
    return grads, dgates  # type: ignore[return-value]
