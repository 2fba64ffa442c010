"""Kernel of the embedding gradient."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import load_fp32


@kernel(do_not_specialize=["columns"])
def sum_rows_kernel(
    x_ptr,
    order_ptr,
    start_ptr,
    stop_ptr,
    out_ptr,
    columns,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write to row i of out the sum of the rows ``order[start[i]:stop[i]]`` of x.

    Without ``order`` it sums the rows ``start[i]:stop[i]``. Program (i, j) computes the j-th
    ``BLOCK_C`` columns of row i.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    start = tl.load(start_ptr + row)
    stop = tl.load(stop_ptr + row)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in tl.range(start, stop, BLOCK_R):
        place = first + tl.arange(0, BLOCK_R)
        ok = place < stop
        source = place if order_ptr is None else tl.load(order_ptr + place, mask=ok, other=0)
        mask = ok[:, None] & inside[None, :]
        total += load_fp32(x_ptr + source[:, None] * columns + column[None, :], mask)
    tl.store(out_ptr + row * columns + column, tl.sum(total, axis=0), mask=inside)
