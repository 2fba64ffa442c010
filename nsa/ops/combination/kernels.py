"""Kernels of the gated sum of the branches and its gradients (Eq. 5).

Rows are queries by heads; program i handles the i-th ``BLOCK_R`` rows. ``branch_ptrs[k]`` is the
k-th enabled branch, whose gate is column ``ON[k]`` of the gates ``[rows, 3]``; ``OFF`` are the
columns of the disabled branches.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import VARYING, load_fp32


@triton.jit
def row_tile(num_rows, DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr):
    """First row, row offsets ``[BLOCK_R]`` with mask, and element offsets with mask.

    The first row is a 64-bit scalar and the offsets have 32 bits, which needs fewer registers.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    r = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_DV)
    ok = first + r < num_rows
    at = r[:, None] * DV + d[None, :]  # [BLOCK_R, BLOCK_DV]
    return first, r, ok, at, ok[:, None] & (d < DV)[None, :]


@kernel(do_not_specialize=VARYING)
def combine_fwd_kernel(
    gates_ptr,
    branch_ptrs,
    out_ptr,
    num_rows,
    ON: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Write out ``[rows, Dv]``."""
    first, r, ok, at, mask = row_tile(num_rows, DV, BLOCK_R, BLOCK_DV)
    total = 0.0
    for k in tl.static_range(len(ON)):
        gate = load_fp32(gates_ptr + first * 3 + (r * 3 + ON[k]), ok)  # [BLOCK_R]
        x = load_fp32(branch_ptrs[k] + first * DV + at, mask)  # [BLOCK_R, BLOCK_DV]
        total += x * gate[:, None]
    tl.store(out_ptr + first * DV + at, total, mask=mask)


@kernel(do_not_specialize=VARYING)
def combine_bwd_kernel(
    gates_ptr,
    branch_ptrs,
    dout_ptr,
    dbranch_ptrs,
    dgates_ptr,
    num_rows,
    ON: tl.constexpr,
    OFF: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Gradients of the branches ``[rows, Dv]`` and of the gates (0 for a disabled branch)."""
    first, r, ok, at, mask = row_tile(num_rows, DV, BLOCK_R, BLOCK_DV)
    dout = load_fp32(dout_ptr + first * DV + at, mask)  # [BLOCK_R, BLOCK_DV]
    dgates = dgates_ptr + first * 3
    for k in tl.static_range(len(ON)):
        gate = load_fp32(gates_ptr + first * 3 + (r * 3 + ON[k]), ok)  # [BLOCK_R]
        x = load_fp32(branch_ptrs[k] + first * DV + at, mask)  # [BLOCK_R, BLOCK_DV]
        tl.store(dbranch_ptrs[k] + first * DV + at, dout * gate[:, None], mask=mask)
        tl.store(dgates + (r * 3 + ON[k]), tl.sum(dout * x, 1), mask=ok)
    for k in tl.static_range(len(OFF)):
        tl.store(dgates + (r * 3 + OFF[k]), 0.0, mask=ok)
