"""Pieces of kernels: where a tile lies, loads and stores of rows, the online softmax."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Kernels are typed by Triton, not by annotations: `tl.constexpr` marks what is known when one is
# compiled.


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Sequences that one step of `find_tile` looks at, and the distance of those that its first step
# looks at.
SEQUENCES = tl.constexpr(128)

# Arguments of kernels that change from call to call. Triton must not look at their values: it would
# compile a kernel anew where such a number is 1, or a multiple of 16 for the first time.
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
    """The rows of one sequence, in one head: of keys, or of queries.

    Attributes:
        head: the head.
        first: packed row of the first.
        count: how many there are.
    """

    head: Any
    first: Any
    count: Any


class QueryTile(NamedTuple):
    """A tile of queries by query heads of one group.

    Row r of a sequence is query ``r // G``, head ``r % G`` of the group.

    Attributes:
        row: ``[BLOCK_M]``, the query, counted in its sequence.
        token: ``[BLOCK_M]`` int64, its packed row.
        head: ``[BLOCK_M]``, query head.
        t: ``[BLOCK_M]``, its position in the sequence.
        ok: ``[BLOCK_M]``, whether there is such a row.
        bit: ``[BLOCK_M]``, its bit in the query masks of the tile; of no use without them.
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
    """Sequence of the tile-th tile of ``TILE`` rows, and the tile's number inside it.

    Where there is no such tile the sequence is ``num_sequences``. ``cu_ptr`` None means that every
    sequence has ``rows_each`` rows. Each counts as ``HEADS`` rows of tiles. With offsets the tiles
    of a sequence begin at ``tiles_before``, and up to one behind its last stays empty.
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
    """First tile of ``TILE`` rows of a sequence, as ``find_tile`` counts them.

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
    """The tile-th tile of a sequence: ``ROWS`` rows, held in ``BLOCK_M``; see ``QueryTile``."""
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
def load_tile(base, offset, ok, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``[N, BLOCK_D]`` at ``base + offset``; 0 from column D on.

    With ``MASKED`` also 0 where ``ok`` is false.
    """
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
    """Rows ``[N, BLOCK_D]`` at ``ptr + row * stride_row``, 64-bit addresses; see ``load_tile``."""
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
def softmax_start(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Maximum ``[BLOCK_M]``, sum ``[BLOCK_M]`` and output ``[BLOCK_M, BLOCK_DV]`` of no keys.

    The maximum is finite, so that a row without a visible key gives 0 and not NaN.
    """
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    return row_max, total, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)


@triton.jit
def softmax_step(s, v, row_max, total, acc, scale):
    """One step of the online softmax, base 2.

    Scores ``[M, N]`` are unscaled and -inf where hidden, values are ``[N, Dv]``.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return new_max, total * alpha + tl.sum(p, 1), acc


@triton.jit
def softmax_result(row_max, total, acc):
    """out ``[M, Dv]`` fp32 and lse ``[M]``, natural logarithm; 0 and -inf of a row without keys."""
    empty = total == 0
    out = tl.where(empty[:, None], 0.0, acc * (1.0 / tl.where(empty, 1.0, total))[:, None])
    lse = (row_max + tl.log2(tl.where(empty, 1.0, total))) * LN_2
    return out, tl.where(empty, -float("inf"), lse)


@triton.jit
def load_statistics(
    out_ptr,
    lse_ptr,
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
    """delta and lse (base 2) ``[M]`` of rows of queries by heads, which lie ``at`` in memory.

    delta, the row sums of ``out * dout``, is written. With gates, ``dout`` is the gradient of the
    branches' gated sum: delta is then the gradient of this branch's gate. The gate itself goes into
    lse, which is written anew: lower by the gate's logarithm, it makes every probability the gated
    one, at no cost in the loops over keys.

    ``gated`` is None, or pointers of gates ``[T, Hq, 3]``, their gradients and the gated lse;
    ``out_row`` ``[M]`` are rows of out ``[T * Hq, Dv]`` and of the gates.
    """
    out = load_rows(out_ptr, out_row, ok, DV, DV, BLOCK_DV, True)  # [M, BLOCK_DV]
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + at, delta, mask=ok)
    lse = tl.load(lse_ptr + at, mask=ok, other=float("inf"))
    if gated is not None:
        gates_ptr, dgates_ptr, gated_lse_ptr = gated
        lse = gated_lse(lse, gates_ptr, dgates_ptr, out_row * 3 + BRANCH, delta, ok)
        tl.store(gated_lse_ptr + at, lse, mask=ok)
    return delta, lse * LOG2_E


@triton.jit
def gated_lse(lse, gates_ptr, dgates_ptr, at, delta, ok):
    """lse of a branch less the logarithm of its gates; ``delta``, their gradient, is written.

    Gates and gradients lie at ``at``.
    """
    tl.store(dgates_ptr + at, delta.to(dgates_ptr.dtype.element_ty), mask=ok)
    gate = tl.load(gates_ptr + at, mask=ok, other=0.0).to(tl.float32)
    off = gate == 0
    # A negative gate gives NaN, not a wrong gradient.
    return tl.where(off, float("inf"), lse - tl.log(tl.where(off, 1.0, gate)))


@triton.jit
def of_queries(x, KEYS_AS_ROWS: tl.constexpr):
    """A number for each query, to be broadcast over a tile of scores."""
    return x[None, :] if KEYS_AS_ROWS else x[:, None]


@triton.jit
def of_keys(x, KEYS_AS_ROWS: tl.constexpr):
    """A number for each key, to be broadcast over a tile of scores."""
    return x[:, None] if KEYS_AS_ROWS else x[None, :]


@triton.jit
def products(q, k, KEYS_AS_ROWS: tl.constexpr):
    """Products of queries ``[M, D]`` and keys ``[N, D]``: ``[N, M]`` or, by queries, ``[M, N]``."""
    if KEYS_AS_ROWS:
        return tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def key_gradient(total, x, q, KEYS_AS_ROWS: tl.constexpr):
    """Add what queries ``[M, D]`` give keys ``[N, D]`` by ``x``, a tile as of ``products``."""
    if KEYS_AS_ROWS:
        return tl.dot(x, q, total, input_precision="ieee")
    else:
        return tl.dot(tl.trans(x), q, total, input_precision="ieee")


@triton.jit
def load_fp32(pointers, mask):
    """Values at ``pointers`` in fp32, 0 where ``mask`` is false."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def partner_column(d, ROTARY: tl.constexpr):
    """Column that a rotation mixes with column d; d itself where nothing is rotated."""
    HALF: tl.constexpr = ROTARY // 2
    return tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))


@triton.jit
def cos_sin(angle):
    """Cosine and sine of fp32 angles to 10^8 radians, within 1e-7.

    ``tl.cos`` and ``tl.sin`` are as exact, but they reduce large angles through an array in local
    memory.
    """
    quarters = angle.to(tl.float64) * 0.6366197723675814  # 2 / pi
    nearest = tl.floor(quarters + 0.5)
    quadrant = nearest.to(tl.int32)
    x = ((quarters - nearest) * 1.5707963267948966).to(tl.float32)  # -pi / 4 .. pi / 4
    square = x * x
    # Polynomials of Cephes' sinf and cosf (Moshier, 1989).
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
    """Factors of columns and of their partners, ``[N, BLOCK_D]`` fp32 each.

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
    """Rows ``n .. n + BLOCK_N`` of a span, ``[BLOCK_N, BLOCK_D]``, by pointers or a descriptor.

    ``PAST_END``: the tile reaches past the sequence. Rows there belong to another one and may hold
    anything, so they are set to 0. Elsewhere the test is left out: it would send a tile through
    registers on its way to the tensor cores.
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
