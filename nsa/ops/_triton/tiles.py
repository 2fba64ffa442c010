"""Pieces of kernels: where a tile lies, loads of rows of keys, the online softmax step."""

# Kernels are typed by Triton, not by annotations: `tl.constexpr` marks what is known when one is
# compiled.
# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Sequences that one step of `find_tile` looks at, and the distance of those that its first step
# looks at.
SEQUENCES = tl.constexpr(128)

# Arguments of kernels that change from call to call. Triton must not look at their values: it would
# compile a kernel anew where such a number is 1, or a multiple of 16 for the first time.
VARYING = [
    "len_q", "len_k", "len_key", "len_x", "len_cmp", "num_sequences", "num_rows", "num_rows_key", "num_tiles", "chunk_rows",
    "position_offset",
]  # fmt: skip


@triton.jit
def find_tile(cu_ptr, tile, num_sequences, rows_each, TILE: tl.constexpr, HEADS: tl.constexpr = 1):
    """Sequence and tile inside it of the tile-th tile of ``TILE`` rows; the sequence is ``num_sequences`` where there is none.

    ``cu_ptr`` None means that every sequence has ``rows_each`` rows. Each counts as ``HEADS`` rows
    of tiles. With offsets the tiles of a sequence begin at ``tiles_before``, and up to one behind
    its last stays empty.
    """
    if cu_ptr is None:
        tiles_each = tl.cdiv(rows_each * HEADS, TILE)
        sequence = tile // tiles_each
        inside = tile % tiles_each
    else:
        # Where the tile's sequence may lie: behind the last of every 128th that begins before the
        # tile.
        group = 0
        for first in tl.range(SEQUENCES, num_sequences, SEQUENCES * SEQUENCES):
            b = first + tl.arange(0, SEQUENCES) * SEQUENCES
            start = tl.load(cu_ptr + b, mask=b < num_sequences, other=0)
            group += tl.sum(
                ((b < num_sequences) & (start * HEADS // TILE + b <= tile)).to(tl.int32), 0
            )
        b = group * SEQUENCES + tl.arange(0, SEQUENCES)
        ok = b < num_sequences
        start = tl.load(cu_ptr + b, mask=ok, other=0)
        rows = (tl.load(cu_ptr + b + 1, mask=ok, other=0) - start) * HEADS
        place = tile - (start * HEADS // TILE + b)
        # At most one sequence has the tile: its number and the tile's come as sums.
        here = ok & (place >= 0) & (place * TILE < rows)
        sequence = num_sequences + tl.sum(tl.where(here, b - num_sequences, 0), 0)
        inside = tl.sum(tl.where(here, place, 0), 0)
    return sequence, inside


@triton.jit
def tiles_before(cu_ptr, sequence, rows_each, TILE: tl.constexpr):
    """Where the tiles of ``TILE`` rows of a sequence begin, as ``find_tile`` counts them.

    Whole tiles of all rows before it, and one for each sequence before it: as many as they can
    need, by one division.
    """
    if cu_ptr is None:
        before = sequence * tl.cdiv(rows_each, TILE)
    else:
        before = tl.load(cu_ptr + sequence) // TILE + sequence
    return before


@triton.jit
def sequence_rows(cu_ptr, sequence, rows_each):
    """First packed row of a sequence, and its number of rows."""
    if cu_ptr is None:
        first = sequence * rows_each
        count = rows_each
    else:
        first = tl.load(cu_ptr + sequence)
        count = tl.load(cu_ptr + sequence + 1) - first
    return first, count


@triton.jit
def load_tile(base, offset, ok, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``[N, BLOCK_D]`` at ``base + offset``; 0 where ``ok`` is false (if ``MASKED``) and from column D on."""
    d = tl.arange(0, BLOCK_D)
    pointers = base + offset[:, None] + d[None, :]
    if MASKED:
        if D == BLOCK_D:
            return tl.load(pointers, mask=ok[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=ok[:, None] & (d < D)[None, :], other=0.0)
    else:
        if D == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(d < D)[None, :], other=0.0)


@triton.jit
def load_rows(
    ptr, row, ok, stride_row, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Rows ``[N, BLOCK_D]`` at ``ptr + row * stride_row`` with 64-bit addresses; see ``load_tile``."""
    return load_tile(ptr, row.to(tl.int64) * stride_row, ok, D, BLOCK_D, MASKED)


@triton.jit
def load_column(pointers, mask, other):
    """``tl.load`` of a vector, as a column: each number once.

    A vector that belongs to the columns of a score tile would be loaded by each thread that needs
    it: 16 numbers of 64.
    """
    if mask is None:
        return tl.sum(tl.load(pointers[:, None]), 1)
    else:
        return tl.sum(tl.load(pointers[:, None], mask=mask[:, None], other=other), 1)


@triton.jit
def store_rows(ptr, row, ok, stride_row, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the columns below D of the rows ``[N, BLOCK_D]`` for which ``ok`` holds."""
    d = tl.arange(0, BLOCK_D)
    pointers = ptr + row.to(tl.int64)[:, None] * stride_row + d[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def softmax_step(s, v, row_max, total, acc, scale):
    """One step of the online softmax (base 2): scores ``[M, N]`` unscaled, -inf where hidden; values ``[N, Dv]``.

    ``row_max`` starts at a finite value, so that a row without a visible key gives 0 and not NaN.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return new_max, total * alpha + tl.sum(p, 1), acc


@triton.jit
def gated_lse(lse, gates_ptr, dgates_ptr, at, delta, ok):
    """lse of a branch less the logarithm of its gates, which lie at ``at``; their gradient, ``delta``, is written."""
    tl.store(dgates_ptr + at, delta.to(dgates_ptr.dtype.element_ty), mask=ok)
    gate = tl.load(gates_ptr + at, mask=ok, other=0.0).to(tl.float32)
    off = gate == 0
    # A negative gate gives NaN, not a wrong gradient.
    return tl.where(off, float("inf"), lse - tl.log(tl.where(off, 1.0, gate)))
