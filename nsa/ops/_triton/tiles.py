"""Device functions shared by kernels: tile lookup, row loads and stores, online softmax."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Kernels are typed by Triton, not by annotations: `tl.constexpr` marks compile-time constants.


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Sequences per step of `find_tile`, and the stride of its first, coarse step.
SEQUENCES = tl.constexpr(128)

# Kernel arguments that change from call to call. Triton must not specialize on their values: it
# would recompile for values of 1 and for multiples of 16.
VARYING = [
    "len_q",
    "len_k",
    "len_key",
    "len_x",
    "len_cmp",
    "num_sequences",
    "num_rows",
    "num_rows_key",
    "num_tiles",
    "chunk_rows",
    "position_offset",
]


class Span(NamedTuple):
    """Key or query rows of one sequence in one head.

    Attributes:
        head: head index.
        first: first packed row.
        count: number of rows.
    """

    head: Any
    first: Any
    count: Any


class QueryTile(NamedTuple):
    """Tile of queries by the query heads of one group.

    Row r of a sequence is query ``r // G`` and head ``r % G`` of the group.

    Attributes:
        row: ``[BLOCK_M]``, query index in the sequence.
        token: ``[BLOCK_M]`` int64, packed row of the query.
        head: ``[BLOCK_M]``, query head.
        t: ``[BLOCK_M]``, position in the sequence.
        ok: ``[BLOCK_M]``, whether the row exists.
        bit: ``[BLOCK_M]``, bit of the query in the query masks of the tile; unused without them.
        t_first, t_last: positions of the first and the last query.
    """

    row: Any
    token: Any
    head: Any
    t: Any
    ok: Any
    bit: Any
    t_first: Any
    t_last: Any


@triton.jit
def find_tile(cu_ptr, tile, num_sequences, rows_each, TILE: tl.constexpr, HEADS: tl.constexpr = 1):
    """Sequence of the tile-th tile of ``TILE`` rows, and the index of the tile in it.

    If there is no such tile, the sequence is ``num_sequences``. If ``cu_ptr`` is None, every
    sequence has ``rows_each`` rows. Each row counts as ``HEADS`` tile rows. With offsets, the tiles
    of a sequence begin at ``tiles_before``, and at most one tile after its last one is empty.
    """
    if cu_ptr is None:
        tiles_each = tl.cdiv(rows_each * HEADS, TILE)
        sequence = tile // tiles_each
        inside = tile % tiles_each
    else:
        # Coarse step over every 128th sequence: find the last one that begins before the tile.
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
        # At most one sequence contains the tile, so sums extract its index and the tile's.
        here = ok & (place >= 0) & (place * TILE < rows)
        sequence = num_sequences + tl.sum(tl.where(here, b - num_sequences, 0), 0)
        inside = tl.sum(tl.where(here, place, 0), 0)
    return sequence, inside


@triton.jit
def tiles_before(cu_ptr, sequence, rows_each, TILE: tl.constexpr):
    """First tile of ``TILE`` rows of a sequence, as ``find_tile`` counts them.

    An upper bound that needs only one division: the whole tiles of all rows before the sequence,
    plus one for each sequence before it.
    """
    if cu_ptr is None:
        before = sequence * tl.cdiv(rows_each, TILE)
    else:
        before = tl.load(cu_ptr + sequence) // TILE + sequence
    return before


@triton.jit
def sequence_rows(cu_ptr, sequence, rows_each):
    """First packed row and number of rows of a sequence."""
    if cu_ptr is None:
        first = sequence * rows_each
        count = rows_each
    else:
        first = tl.load(cu_ptr + sequence)
        count = tl.load(cu_ptr + sequence + 1) - first
    return first, count


@triton.jit
def token_positions(before_ptr, cu_ptr, row, ok, len_x, num_sequences, search_steps):
    """Positions of the tokens in their sequences, offset by the earlier tokens."""
    if cu_ptr is None:
        sequence = row // tl.maximum(len_x, 1)
        position = (row % tl.maximum(len_x, 1)).to(tl.int32)
    else:
        # Binary search for the last sequence that begins at or before the row.
        sequence = tl.zeros(row.shape, tl.int32)
        start = sequence
        for step in tl.range(0, search_steps):
            later = sequence + (1 << (search_steps - 1 - step))
            begin = tl.load(cu_ptr + later, mask=later < num_sequences, other=0)
            found = (later < num_sequences) & (begin <= row)
            sequence = tl.where(found, later, sequence)
            start = tl.where(found, begin, start)
        position = (row - start).to(tl.int32)
    if before_ptr is not None:
        position += tl.load(before_ptr + sequence, mask=ok, other=0).to(tl.int32)
    return position


@triton.jit
def query_tile(
    tile,
    head_kv,
    first_q,
    num_q,
    num_tokens,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Tile ``tile`` of a sequence: ``ROWS`` rows, padded to ``BLOCK_M``; see ``QueryTile``."""
    m = tl.arange(0, BLOCK_M)
    r = tile * ROWS + m
    row = r // G
    ok = row < num_q
    if ROWS < BLOCK_M:
        ok = (m < ROWS) & ok
    token = (first_q + row).to(tl.int64)
    head = head_kv * G + r % G
    t = num_tokens - num_q + row
    bit = tl.minimum(row - tile * ROWS // G, 31)
    t_first = num_tokens - num_q + tile * ROWS // G
    t_last = num_tokens - num_q + tl.minimum((tile * ROWS + ROWS - 1) // G, num_q - 1)
    return QueryTile(row, token, head, t, ok, bit, t_first, t_last)


@triton.jit
def load_tile(
    base, offset, ok, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr = True
):
    """Load rows ``[N, BLOCK_D]`` at ``base + offset``; columns from D on are 0.

    With ``MASKED``, rows for which ``ok`` is false are 0, too.
    """
    d = tl.arange(0, BLOCK_D)
    pointers = base + offset[:, None] + d[None, :]
    if MASKED and D < BLOCK_D:
        return tl.load(pointers, mask=ok[:, None] & (d < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=ok[:, None], other=0.0)
    elif D < BLOCK_D:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_rows(
    ptr, row, ok, stride_row, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr = True
):
    """Load rows ``[N, BLOCK_D]`` at ``ptr + row * stride_row`` (64-bit); see ``load_tile``."""
    return load_tile(ptr, row.to(tl.int64) * stride_row, ok, D, BLOCK_D, MASKED)


@triton.jit
def load_column(pointers, mask, other):
    """``tl.load`` of a vector in a column layout, so that each element is loaded once.

    A vector in the layout of the columns of a score tile would be loaded by every thread that needs
    it: 16 elements out of 64.
    """
    if mask is None:
        return tl.sum(tl.load(pointers[:, None]), 1)
    else:
        return tl.sum(tl.load(pointers[:, None], mask=mask[:, None], other=other), 1)


@triton.jit
def store_rows(ptr, row, ok, x, D: tl.constexpr):
    """Store columns below D of the rows x ``[N, BLOCK_D]`` for which ``ok`` is true.

    Rows have D adjacent columns in memory.
    """
    d = tl.arange(0, x.shape[1])
    pointers = ptr + row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def softmax_start(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Initial maximum ``[BLOCK_M]``, sum ``[BLOCK_M]`` and output ``[BLOCK_M, BLOCK_DV]``.

    The maximum is finite, so that a row without visible keys results in 0 instead of NaN.
    """
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    return row_max, total, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)


@triton.jit
def softmax_step(s, v, row_max, total, acc, scale):
    """One step of the online softmax, base 2.

    Scores ``[M, N]`` are unscaled, -inf for hidden keys; values are ``[N, Dv]``.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return new_max, total * alpha + tl.sum(p, 1), acc


@triton.jit
def softmax_lse(row_max, total):
    """lse ``[M]``, natural log; -inf for rows without keys."""
    empty = total == 0
    lse = (row_max + tl.log2(tl.where(empty, 1.0, total))) * LN_2
    return tl.where(empty, -float("inf"), lse)


@triton.jit
def softmax_result(row_max, total, acc):
    """out ``[M, Dv]`` fp32 and lse ``[M]``, natural log; 0 and -inf for rows without keys."""
    empty = total == 0
    out = tl.where(empty[:, None], 0.0, acc * (1.0 / tl.where(empty, 1.0, total))[:, None])
    return out, softmax_lse(row_max, total)


@triton.jit
def load_statistics(
    out_ptr,
    lse_pointers,
    delta_ptr,
    gated,
    dout,
    out_row,
    at,
    ok,
    BRANCH: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """delta and lse (base 2) ``[M]`` of rows of queries by heads, stored at offsets ``at``.

    delta, the row sum of ``out * dout``, is stored. With gates, ``dout`` is the gradient of the
    gated sum of the branches, and delta is the gradient of this branch's gate. The gate is folded
    into lse, which is stored as well: lse - log(gate) multiplies every probability by the gate, at
    no cost in the loops over keys.

    ``lse_pointers`` ``[M]`` are those of the branch's lse.

    ``gated`` is None, or pointers to gates ``[T, Hq, 3]``, their gradients and the gated lse;
    ``out_row`` ``[M]`` are rows of out ``[T * Hq, Dv]`` and of the gates.
    """
    out = load_rows(out_ptr, out_row, ok, DV, DV, BLOCK_DV)  # [M, BLOCK_DV]
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + at, delta, mask=ok)
    lse = tl.load(lse_pointers, mask=ok, other=float("inf"))
    if gated is not None:
        gates_ptr, dgates_ptr, gated_lse_ptr = gated
        gate_at = out_row * 3 + BRANCH
        tl.store(dgates_ptr + gate_at, delta.to(dgates_ptr.dtype.element_ty), mask=ok)
        gate = tl.load(gates_ptr + gate_at, mask=ok, other=0.0).to(tl.float32)
        off = gate == 0
        # A negative gate results in NaN rather than a wrong gradient.
        lse = tl.where(off, float("inf"), lse - tl.log(tl.where(off, 1.0, gate)))
        tl.store(gated_lse_ptr + at, lse, mask=ok)
    return delta, lse * LOG2_E


@triton.jit
def of_queries(x, KEYS_AS_ROWS: tl.constexpr):
    """Broadcast a value per query over a score tile."""
    return x[None, :] if KEYS_AS_ROWS else x[:, None]


@triton.jit
def of_keys(x, KEYS_AS_ROWS: tl.constexpr):
    """Broadcast a value per key over a score tile."""
    return x[:, None] if KEYS_AS_ROWS else x[None, :]


@triton.jit
def products(q, k, KEYS_AS_ROWS: tl.constexpr):
    """Dot products of q ``[M, D]`` and k ``[N, D]``: ``[M, N]``, ``[N, M]`` if KEYS_AS_ROWS."""
    if KEYS_AS_ROWS:
        return tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def key_gradient(total, x, q, KEYS_AS_ROWS: tl.constexpr):
    """Add x times q ``[M, D]`` to total ``[N, D]``; x has the layout of ``products``."""
    if KEYS_AS_ROWS:
        return tl.dot(x, q, total, input_precision="ieee")
    else:
        return tl.dot(tl.trans(x), q, total, input_precision="ieee")


@triton.jit
def load_fp32(pointers, mask):
    """Load values as fp32, 0 where ``mask`` is false."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def partner_column(d, ROTARY: tl.constexpr):
    """Column that is rotated together with column d; d itself in unrotated columns."""
    HALF: tl.constexpr = ROTARY // 2
    return tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))


@triton.jit
def cos_sin(angle):
    """Cosine and sine of fp32 angles up to 10^8 radians, error below 1e-7.

    ``tl.cos`` and ``tl.sin`` are as accurate, but their range reduction of large angles uses an
    array in local memory.
    """
    quarters = angle.to(tl.float64) * 0.6366197723675814  # 2 / pi
    nearest = tl.floor(quarters + 0.5)
    quadrant = nearest.to(tl.int32)
    x = ((quarters - nearest) * 1.5707963267948966).to(tl.float32)  # -pi / 4 .. pi / 4
    square = x * x
    # Polynomials of sinf and cosf in Cephes (Moshier, 1989).
    sine = x + x * square * (
        -1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4)
    )
    cosine = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
    cosine = 1.0 - 0.5 * square + square * square * cosine
    swapped = (quadrant & 1) != 0
    first, second = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    return tl.where(((quadrant + 1) & 2) != 0, -first, first), tl.where(
        (quadrant & 2) != 0, -second, second
    )


@triton.jit
def rotation(frequency_ptr, position, d, magnitude, ROTARY: tl.constexpr):
    """Rotation factors of columns and of their partner columns, ``[N, BLOCK_D]`` fp32 each.

    A rotated column is ``x * same + partner * other``.
    """
    HALF: tl.constexpr = ROTARY // 2
    frequency = tl.load(frequency_ptr + tl.where(d < HALF, d, d - HALF), mask=d < ROTARY, other=0.0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    rotated = (d < ROTARY)[None, :]
    sign = tl.where(d < HALF, -1.0, 1.0)[None, :]
    cosine, sine = cos_sin(angle)
    same = tl.where(rotated, cosine * magnitude, 1.0)
    other = tl.where(rotated, sine * sign * magnitude, 0.0)
    return same, other


@triton.jit
def load_keys(
    source,
    span,
    n,
    stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAST_END: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load rows ``n .. n + BLOCK_N`` of a span, ``[BLOCK_N, BLOCK_D]``, by pointers or descriptor.

    ``PAST_END``: the tile extends past the sequence. Rows past the end belong to another sequence
    and may contain anything, so they are set to 0. Other tiles skip the test, which would move the
    tile through registers on its way to the tensor cores.
    """
    index = n + tl.arange(0, BLOCK_N)
    if TMA:
        x = source.load([span.first + n, span.head, 0]).reshape(BLOCK_N, BLOCK_D)
        if PAST_END:
            x = tl.where((index < span.count)[:, None], x, 0.0)
        return x
    else:
        source += span.head * stride[1]
        ok = index < span.count
        return load_rows(source, span.first + index, ok, stride[0], D, BLOCK_D, PAST_END)
