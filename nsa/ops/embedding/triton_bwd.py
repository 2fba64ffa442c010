"""Gradient of a table: the rows of each token's places are added up, in an order that the tokens alone decide."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.sizes import cdiv

BLOCK_ROWS = 16
BLOCK_COLUMNS = 256
# Places of one token that one program adds up.
PIECE = 64


@kernel(do_not_specialize=["columns"])
def sum_rows_kernel(
    x_ptr, order_ptr, start_ptr, stop_ptr, out_ptr, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """One row of out: the sum of the rows ``order[start:stop]`` of x, or of ``start:stop`` where ``order`` is None."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    start = tl.load(start_ptr + row)
    stop = tl.load(stop_ptr + row)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for first in tl.range(start, stop, BLOCK_R):
        place = first + tl.arange(0, BLOCK_R)
        ok = place < stop
        source = place if order_ptr is None else tl.load(order_ptr + place, mask=ok, other=0)
        x = tl.load(
            x_ptr + source[:, None] * columns + column[None, :],
            mask=ok[:, None] & inside[None, :],
            other=0.0,
        )
        total += x.to(tl.float32)
    tl.store(
        out_ptr + row * columns + column,
        tl.sum(total, axis=0).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def embed_backward(dout: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """Gradient ``[num_rows, width]`` of the table from that of its rows, ``[T, width]`` and contiguous, by tokens ``[T]``.

    The places of a token are cut into pieces of ``PIECE``, so that a frequent token is no program's
    work alone: first the sum of each piece, then of each token's pieces.
    """
    num_tokens, width = dout.shape
    device = dout.device
    dweight = dout.new_empty(num_rows, width)
    ordered, order = torch.sort(tokens, stable=True)
    begin = torch.searchsorted(
        ordered, torch.arange(num_rows + 1, dtype=tokens.dtype, device=device)
    )
    pieces_before = torch.nn.functional.pad(
        torch.cumsum((begin.diff() + PIECE - 1) // PIECE, dim=0), (1, 0)
    )
    # A bound that the shapes give, so that the host need not wait; pieces beyond the last are
    # empty.
    piece = torch.arange(min(num_rows, num_tokens) + num_tokens // PIECE, device=device)
    owner = torch.searchsorted(pieces_before[1:], piece, right=True)
    start = torch.clamp(begin[owner] + PIECE * (piece - pieces_before[owner]), max=num_tokens)
    stop = torch.minimum(start + PIECE, begin[torch.clamp(owner + 1, max=num_rows)])
    partial = dout.new_empty(piece.shape[0], width, dtype=torch.float32)
    _sum_rows(dout, order, start, stop, partial)
    _sum_rows(partial, None, pieces_before[:-1], pieces_before[1:], dweight)
    return dweight


def _sum_rows(x: Tensor, order: Tensor | None, start: Tensor, stop: Tensor, out: Tensor) -> None:
    rows, columns = out.shape
    if out.numel():
        sum_rows_kernel[(rows, cdiv(columns, BLOCK_COLUMNS))](
            x,
            order,
            start,
            stop,
            out,
            columns,
            BLOCK_R=BLOCK_ROWS,
            BLOCK_C=BLOCK_COLUMNS,
            num_warps=4,
        )
