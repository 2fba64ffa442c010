"""Sums of rows that share an index, in a fixed order."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from nsa.ops._layout import cdiv
from nsa.ops._plan import once
from nsa.ops._triton.kernel import Launch, kernel
from nsa.ops._triton.tiles import load_fp32

BLOCK_ROWS = 16
BLOCK_COLUMNS, WARPS = 256, 4
# Maximum number of rows with the same index that one program sums.
PIECE = 64


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
    """Write to row i of out the sum over the entries ``order[start[i]:stop[i]]``.

    Entry e is row e of x. Without ``order`` the entries are ``start[i]:stop[i]``. Program (i, j)
    computes the j-th ``BLOCK_C`` columns of row i.
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
        entry = place if order_ptr is None else tl.load(order_ptr + place, mask=ok, other=0)
        total += load_fp32(
            x_ptr + entry[:, None] * columns + column[None, :], ok[:, None] & inside[None, :]
        )
    tl.store(out_ptr + row * columns + column, tl.sum(total, axis=0), mask=inside)


def sum_rows(
    x: Tensor,
    start: Tensor,
    stop: Tensor,
    out: Tensor,
    *,
    order: Tensor | None = None,
) -> None:
    """Write sums of rows of ``x [N, width]`` to ``out [M, width]``; see ``sum_rows_kernel``.

    Args:
        x: the rows, contiguous.
        start: int64 ``[M]``, first entry of each sum.
        stop: int64 ``[M]``, one past the last.
        out: output, contiguous.
        order: int64, the entries in the order of the sums.
    """
    if out.numel():
        width = out.shape[1]
        sizes = {"BLOCK_R": BLOCK_ROWS, "BLOCK_C": BLOCK_COLUMNS, "num_warps": WARPS}
        grid = (out.shape[0], cdiv(width, BLOCK_COLUMNS))
        launch = once(functools.partial(Launch, sum_rows_kernel, grid, **sizes))
        launch(x, order, start, stop, out, width)


def sum_by_index(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Write to row i of ``out [M, width]`` the sum of the entries with index i, in their order.

    The entries of an index are split into pieces of ``PIECE``, so that several programs share a
    frequent index: the first launch sums each piece, the second the pieces of each index.

    Args:
        x: rows, see :func:`sum_rows`.
        index: integers ``[E]`` below M, the index of each entry; negative ones are absent.
        out: output, contiguous.
    """
    num_rows, num_entries = out.shape[0], index.shape[0]
    ordered, order = torch.sort(index, stable=True)
    rows = torch.arange(num_rows + 1, dtype=index.dtype, device=index.device)
    begin = torch.searchsorted(ordered, rows)
    num_pieces = (begin.diff() + PIECE - 1) // PIECE
    pieces_before = functional.pad(num_pieces.cumsum(0), (1, 0))
    # Upper bound by shapes alone, so that the host does not synchronize; surplus pieces are empty.
    most_pieces = min(num_rows, num_entries) + num_entries // PIECE
    piece = torch.arange(most_pieces, device=index.device)
    owner = torch.searchsorted(pieces_before[1:], piece, right=True)
    start = torch.clamp(begin[owner] + PIECE * (piece - pieces_before[owner]), max=num_entries)
    stop = torch.minimum(start + PIECE, begin[torch.clamp(owner + 1, max=num_rows)])
    partial = x.new_empty(most_pieces, x.shape[1], dtype=torch.float32)
    sum_rows(x, start, stop, partial, order=order)
    sum_rows(partial, pieces_before[:-1], pieces_before[1:], out)
