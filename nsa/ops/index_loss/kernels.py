"""Kernels of the loss of an index head over selected blocks, and what both phases share.

The products of queries and keys are computed block by block with the queries that selected it, as
in selected attention: each key is loaded once for many queries. A block that is too large for
one tile has ``PARTS`` of ``KEYS`` keys, with results of their own. Exponents are base 2, and masses
and scores of blocks stay logarithms, so that nothing underflows.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from typing import NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.gathered_rows import SEGMENT, find_chunk, load_order, locate_rows
from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import (
    LN_2,
    LOG2_E,
    VARYING,
    find_tile,
    load_rows,
    load_tile,
    sequence_rows,
    store_rows,
)


class IndexSizes(NamedTuple):
    """Sizes as compile-time constants.

    Attributes:
        HKV, G: KV heads, and query heads per KV head.
        HKI, IH: index key heads, and index query heads per index key head.
        D, DI: head sizes.
        BLOCK_D, BLOCK_DI: columns of their tiles.
        N: slots of a query; 0 if all blocks are attended to.
        BLOCK_SIZE: tokens of a block.
        KEYS: tokens of one product, a part of a block.
        QUERIES: queries of a tile; with selected blocks, rows (queries by heads).
        BLOCK_G, BLOCK_IH, BLOCK_N: padded to powers of two.
    """

    HKV: int
    G: int
    HKI: int
    IH: int
    D: int
    DI: int
    BLOCK_D: int
    BLOCK_DI: int
    N: int
    BLOCK_SIZE: int
    KEYS: int
    QUERIES: int
    BLOCK_G: int
    BLOCK_IH: int
    BLOCK_N: int


@triton.jit
def log_sum(x, AXIS: tl.constexpr):
    """Logarithm of the sum of powers along an axis; 0 if all are 0."""
    largest = tl.max(x, AXIS)
    largest = tl.where(largest > -float("inf"), largest, 0.0)
    total = tl.sum(tl.exp2(x - tl.expand_dims(largest, AXIS)), AXIS)
    none = total == 0  # false for NaN, which must be seen
    return tl.where(none, 0.0, largest + tl.log2(tl.where(none, 1.0, total)))


@triton.jit
def log_softmax(x, ok):
    """Logarithms of the softmax along N over the elements ``ok`` of ``x [M, N]``, 0 elsewhere."""
    total = log_sum(tl.where(ok, x, -float("inf")), 1)
    return tl.where(ok, tl.where(ok, x, 0.0) - total[:, None], 0.0)


@triton.jit
def larger(a, b):
    """The larger number; NaN if one is NaN, unlike ``tl.max``."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def find_largest(s, key, largest, token):
    """Largest product and its key so far ``[M]``, with those of ``s [M, N]`` at ``key [N]``.

    Keys ascend, and the first of equal products counts. If one is NaN, so is the largest.
    """
    here = tl.reduce(s, 1, larger)
    first = tl.min(tl.where(s < here[:, None], 0x7FFFFFFF, key[None, :]), 1)
    return larger(here, largest), tl.where(here <= largest, token, first)


@triton.jit
def add_logs(a, b):
    """Logarithm of the sum of two powers; -inf if both are 0."""
    largest = tl.maximum(a, b)
    largest = tl.where(largest > -float("inf"), largest, 0.0)
    total = tl.exp2(a - largest) + tl.exp2(b - largest)
    none = total == 0  # false for NaN, which must be seen
    return tl.where(none, -float("inf"), largest + tl.log2(tl.where(none, 1.0, total)))


@triton.jit
def log_mass(s, scale):
    """Logarithm, base 2, of the sum of the powers of ``s [M, N] * scale``, ``[M]``."""
    largest = tl.max(s, 1)
    shift = tl.where(largest == -float("inf"), 0.0, largest) * scale
    total = tl.sum(tl.exp2(s * scale - shift[:, None]), 1)
    none = total == 0  # false for NaN, which must be seen
    return tl.where(none, -float("inf"), shift + tl.log2(tl.where(none, 1.0, total)))


@triton.jit
def first_position(order_ptr, r, num_rows, offset, G: tl.constexpr, SLOTS: tl.constexpr):
    """Position of the query of row ``r`` of a chunk, of the last row if there are fewer."""
    selection = tl.load(order_ptr + tl.minimum(r, num_rows - 1) // G)
    return offset + (selection // SLOTS).to(tl.int32)


@triton.jit
def first_ranked(
    chunk, order_ptr, offset, num_init, num_local, G: tl.constexpr, SIZES: tl.constexpr
):
    """Step of a chunk with the first row whose query ranks the block, or the number of rows.

    Blocks forced for all queries come from ``num_init``; the selections are sorted by query, so
    those whose block is one of the ``num_local`` most recent ones are the first.
    """
    SLOTS: tl.constexpr = SIZES.HKV * SIZES.N
    ROWS: tl.constexpr = SIZES.QUERIES
    count = chunk.count * G
    ranked_from = (chunk.block + num_local) * SIZES.BLOCK_SIZE
    begin = tl.where(chunk.block < num_init, count, 0)
    searching = begin < count
    while searching:
        after = first_position(order_ptr, begin + ROWS, count, offset, G, SLOTS)
        begin += tl.where(after < ranked_from, ROWS, 0)
        searching = (after < ranked_from) & (begin < count)
    return begin


@triton.jit
def slope_places(query, key_head, inner, head_kv, slot, SIZES: tl.constexpr):
    """Index in ``[T, Hi, Hkv / Hki * n]`` of slots of KV head ``head_kv`` and an index head."""
    SHARED: tl.constexpr = SIZES.HKV // SIZES.HKI  # KV heads of an index key head
    row = query.to(tl.int64) * (SIZES.HKI * SIZES.IH) + key_head * SIZES.IH + inner
    return row * (SHARED * SIZES.N) + head_kv % SHARED * SIZES.N + slot


@kernel(do_not_specialize=SEGMENT)
def index_loss_products_kernel(
    q_idx_ptr,
    k_idx_ptr,
    q_ptr,
    k_ptr,
    mass_ptr,
    largest_ptr,
    token_ptr,
    chunks,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_rows,
    num_blocks,
    segment,
    segment_rows,
    chunk_size,
    stride_q_idx,
    stride_k_idx,
    stride_q,
    stride_k,
    index_scale,
    softmax_scale,
    num_init,
    num_local,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Write log-sum-exp and largest index product of the visible tokens of selected blocks.

    By part, (query, KV head, slot) and head: the log-sum-exp of the scaled products ``[PARTS, T *
    Hkv * n, G]``, the largest scaled index product ``[PARTS, T * Hkv * n, IH]``, and its row of
    keys, same shape. Program (i, p) handles part p of the block of the i-th chunk of selections, in
    loops over the rows of the chunk (queries by heads). With ``SKIP`` nothing is written for most
    forced blocks.
    """
    HKV: tl.constexpr = SIZES.HKV
    G: tl.constexpr = SIZES.G
    IH: tl.constexpr = SIZES.IH
    ROWS: tl.constexpr = SIZES.QUERIES
    SLOTS: tl.constexpr = HKV * SIZES.N
    sequences = (cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences)
    chunk = find_chunk(
        chunks, sequences, num_blocks, segment, segment_rows, chunk_size, HKV, BLOCKS
    )
    if chunk.count > 0:
        head_kv = chunk.head_kv
        key_head = head_kv // (HKV // SIZES.HKI)
        first_q, num_q = sequence_rows(cu_q_ptr, chunk.sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, chunk.sequence, len_k)
        offset = num_tokens - num_q - first_q  # of positions to packed queries
        key = chunk.block * SIZES.BLOCK_SIZE + tl.program_id(1) * SIZES.KEYS
        key += tl.arange(0, SIZES.KEYS)
        key_row = first_key + key
        order_ptr = chunks[0] + chunk.begin
        first = chunk.first_selection
        before = tl.program_id(1).to(tl.int64) * num_rows * SLOTS
        last_key = chunk.block * SIZES.BLOCK_SIZE + (tl.program_id(1) + 1) * SIZES.KEYS - 1
        # Selections are loaded one step ahead, because row indices are needed before the rows. They
        # are sorted by query, so only the first steps contain queries that do not see all keys.
        k_head = k_ptr + head_kv * stride_k[1]
        k = load_rows(k_head, key_row, key < num_tokens, stride_k[0], SIZES.D, SIZES.BLOCK_D)
        count = chunk.count * G
        begin = 0
        if SKIP:
            begin = first_ranked(chunk, order_ptr, offset, num_init, num_local, G, SIZES)
        ahead = load_order(order_ptr, begin, count, first, G, ROWS, True)
        start = first_position(order_ptr, begin, count, offset, G, SLOTS)
        for r in tl.range(begin, count, ROWS):
            selection, t = ahead, start
            ahead = load_order(order_ptr, r + ROWS, count, first, G, ROWS, True)
            start = first_position(order_ptr, r + ROWS, count, offset, G, SLOTS)
            rows = locate_rows(selection, r, count, G, SLOTS, ROWS)
            at = rows.query.to(tl.int64) * stride_q[0] + (head_kv * G + rows.head) * stride_q[1]
            q = load_tile(q_ptr, at, rows.ok, SIZES.D, SIZES.BLOCK_D)  # [ROWS, BLOCK_D]
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if t < last_key:
                s = tl.where(key[None, :] <= (offset + rows.query)[:, None], s, -float("inf"))
            mass = log_mass(s, softmax_scale * LOG2_E)
            tl.store(mass_ptr + (before + rows.selection) * G + rows.head, mass, mask=rows.ok)
        k_head = k_idx_ptr + key_head * stride_k_idx[1]
        k = load_rows(k_head, key_row, key < num_tokens, stride_k_idx[0], SIZES.DI, SIZES.BLOCK_DI)
        count = chunk.count * IH
        begin = 0
        if SKIP:
            begin = first_ranked(chunk, order_ptr, offset, num_init, num_local, IH, SIZES)
        ahead = load_order(order_ptr, begin, count, first, IH, ROWS, True)
        start = first_position(order_ptr, begin, count, offset, IH, SLOTS)
        for r in tl.range(begin, count, ROWS):
            selection, t = ahead, start
            ahead = load_order(order_ptr, r + ROWS, count, first, IH, ROWS, True)
            start = first_position(order_ptr, r + ROWS, count, offset, IH, SLOTS)
            rows = locate_rows(selection, r, count, IH, SLOTS, ROWS)
            head = key_head * IH + rows.head
            at = rows.query.to(tl.int64) * stride_q_idx[0] + head * stride_q_idx[1]
            q = load_tile(q_idx_ptr, at, rows.ok, SIZES.DI, SIZES.BLOCK_DI)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if t < last_key:
                s = tl.where(key[None, :] <= (offset + rows.query)[:, None], s, -float("inf"))
            lowest = tl.full([ROWS], -float("inf"), tl.float32)
            largest, token = find_largest(s, key_row, lowest, tl.zeros([ROWS], tl.int32))
            place = (before + rows.selection) * IH + rows.head
            tl.store(largest_ptr + place, largest * (index_scale * LOG2_E), mask=rows.ok)
            tl.store(token_ptr + place, token, mask=rows.ok)


@kernel(do_not_specialize=[*VARYING, "absent"])
def index_loss_kernel(
    indices_ptr,
    block_ptr,
    mass_ptr,
    largest_ptr,
    token_ptr,
    lse_ptr,
    lse_idx_ptr,
    loss_ptr,
    count_ptr,
    slope_ptr,
    row_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_rows,
    absent,
    num_init,
    num_local,
    SIZES: tl.constexpr,
):
    """Write loss and number of ranked blocks, ``[T, Hkv]``, and what the gradient needs.

    For each index query head and slot ``[T, Hi, Hkv / Hki * n]``: the gradient of the largest
    scaled product in the block, and the row of its token in the index keys ``[S * Hki, Di]``, -1
    unless the block is ranked. Program (i, h) handles the i-th tile of queries and KV head h.
    ``block_ptr`` are the key blocks of an inverse index. ``lse_ptr``: log-sum-exp of all selected
    blocks ``[T, Hq]``, natural; None computes it from their masses. ``lse_idx_ptr`` is None with
    one index head per group, for which it cancels.
    """
    HKV: tl.constexpr = SIZES.HKV
    G: tl.constexpr = SIZES.G
    IH: tl.constexpr = SIZES.IH
    N: tl.constexpr = SIZES.N
    Q: tl.constexpr = SIZES.QUERIES
    group = tl.program_id(1)
    key_head = group // (HKV // SIZES.HKI)
    sequence, tile = find_tile(cu_q_ptr, tl.program_id(0), num_sequences, len_q, Q)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        row = tile * Q + tl.arange(0, Q)
        token = (first_q + row).to(tl.int64)
        own = (num_tokens - num_q + row) // SIZES.BLOCK_SIZE
        slot = tl.arange(0, SIZES.BLOCK_N)
        at = ((token * HKV + group) * N)[:, None] + slot[None, :]  # [Q, BLOCK_N]
        inside = (row < num_q)[:, None] & (slot < N)[None, :]
        block = tl.load(indices_ptr + at, mask=inside, other=-1).to(tl.int32)
        present = tl.load(block_ptr + at, mask=inside, other=absent).to(tl.int32) < absent
        ranked = present & (block >= num_init) & (block <= (own - num_local)[:, None])
        head = tl.arange(0, SIZES.BLOCK_G)[None, :, None]
        computed = present if lse_ptr is None else ranked
        there = (head < G) & computed[:, None, :]
        index = tl.arange(0, SIZES.BLOCK_IH)[None, :, None]
        index_there = (index < IH) & computed[:, None, :]
        # Masses [Q, BLOCK_G, BLOCK_N], largest products and their tokens [Q, BLOCK_IH, BLOCK_N].
        mass = tl.full(there.shape, -float("inf"), tl.float32)
        largest = tl.full(index_there.shape, -float("inf"), tl.float32)
        largest_at = tl.zeros(index_there.shape, tl.int32)
        for part in tl.static_range(SIZES.BLOCK_SIZE // SIZES.KEYS):
            place = at[:, None, :] + part * num_rows.to(tl.int64) * (HKV * N)
            x = tl.load(mass_ptr + place * G + head, mask=there, other=-float("inf"))
            mass = add_logs(mass, x)
            place = place * IH + index
            x = tl.load(largest_ptr + place, mask=index_there, other=-float("inf"))
            x_at = tl.load(token_ptr + place, mask=index_there, other=0)
            largest_at = tl.where(x <= largest, largest_at, x_at)
            largest = larger(x, largest)
        # Target and prediction [Q, BLOCK_N].
        if lse_ptr is None:
            mass -= log_sum(mass, 2)[:, :, None]
        else:
            lse_at = token[:, None, None] * (HKV * G) + group * G + head
            lse_ok = (head < G) & (row < num_q)[:, None, None]
            lse = tl.load(lse_ptr + lse_at, mask=lse_ok, other=0.0) * LOG2_E
            mass -= tl.where(lse == -float("inf"), 0.0, lse)  # without a visible block
        mass = tl.where(head < G, mass, -float("inf"))
        target = log_softmax(log_sum(mass, 1), ranked)
        if lse_idx_ptr is not None:
            lse_at = (key_head * IH + index).to(tl.int64) * num_rows + token[:, None, None]
            lse_ok = (index < IH) & (row < num_q)[:, None, None]
            largest -= tl.load(lse_idx_ptr + lse_at, mask=lse_ok, other=0.0)
        largest = tl.where(index < IH, largest, -float("inf"))
        score = log_sum(largest, 1)
        prediction = log_softmax(score, ranked)
        p = tl.where(ranked, tl.exp2(target), 0.0)
        loss = tl.sum(p * (target - prediction), 1) * LN_2
        tl.store(loss_ptr + token * HKV + group, loss, mask=row < num_q)
        number = tl.sum(ranked.to(tl.int32), 1)
        tl.store(count_ptr + token * HKV + group, number, mask=row < num_q)
        # Gradient of the largest products [Q, BLOCK_IH, BLOCK_N].
        rest = tl.where(ranked, tl.exp2(prediction), 0.0) - p
        slope = rest[:, None, :] * tl.exp2(largest - score[:, None, :])
        slope = tl.where(ranked[:, None, :], slope, 0.0)
        out = slope_places(token[:, None, None], key_head, index, group, slot[None, None, :], SIZES)
        written = (index < IH) & inside[:, None, :]
        tl.store(slope_ptr + out, slope, mask=written)
        key_row = tl.where(ranked[:, None, :], largest_at * SIZES.HKI + key_head, -1)
        tl.store(row_ptr + out, key_row, mask=written)


@kernel(do_not_specialize=["num_rows"])
def index_loss_dq_kernel(
    k_idx_ptr,
    slope_ptr,
    row_ptr,
    dout_ptr,
    dq_ptr,
    num_rows,
    index_scale,
    SLOTS: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DI: tl.constexpr,
):
    """Write the gradient of the index queries, ``[num_rows, Di]``: weighted sums of their keys.

    The weights and rows of the keys are the slopes and rows of ``index_loss_kernel``. Program i
    handles the i-th ``BLOCK_R`` rows, ``BLOCK_S`` of their ``SLOTS`` slots at a time.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_DI)
    dq = tl.zeros([BLOCK_R, BLOCK_DI], tl.float32)
    for first in tl.range(0, SLOTS, BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        at = row.to(tl.int64)[:, None] * SLOTS + slot[None, :]
        inside = (row < num_rows)[:, None] & (slot < SLOTS)[None, :]
        slope = tl.load(slope_ptr + at, mask=inside, other=0.0)
        source = tl.load(row_ptr + at, mask=inside, other=-1).to(tl.int64)[:, :, None]
        k_at = source * DI + column[None, None, :]
        k = tl.load(k_idx_ptr + k_at, mask=(source >= 0) & (column < DI)[None, None, :], other=0.0)
        dq += tl.sum(slope[:, :, None] * k.to(tl.float32), 1)
    store_rows(dq_ptr, row, row < num_rows, dq * (tl.load(dout_ptr) * index_scale), DI)


@kernel(do_not_specialize=SEGMENT)
def index_loss_gather_dk_kernel(
    q_idx_ptr,
    slope_ptr,
    row_ptr,
    part_ptr,
    chunks,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_blocks,
    segment,
    segment_rows,
    chunk_size,
    stride_q_idx,
    num_init,
    num_local,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the gradient of a block of index keys from one chunk, fp32 ``[chunks, l', Di]``.

    Without the factor of the products. Program (i, p) handles part p of the block of the i-th chunk
    of selections, in a loop over its rows (queries by index heads).
    """
    HKV: tl.constexpr = SIZES.HKV
    IH: tl.constexpr = SIZES.IH
    KEYS: tl.constexpr = SIZES.KEYS
    BLOCK_DI: tl.constexpr = SIZES.BLOCK_DI
    ROWS: tl.constexpr = SIZES.QUERIES
    SLOTS: tl.constexpr = HKV * SIZES.N
    sequences = (cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences)
    chunk = find_chunk(
        chunks, sequences, num_blocks, segment, segment_rows, chunk_size, HKV, BLOCKS
    )
    if chunk.count > 0:
        key_head = chunk.head_kv // (HKV // SIZES.HKI)
        first_key, num_tokens = sequence_rows(cu_k_ptr, chunk.sequence, len_k)
        inside = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
        key = chunk.block * SIZES.BLOCK_SIZE + inside
        key_row = (first_key + key) * SIZES.HKI + key_head
        dk = tl.zeros([KEYS, BLOCK_DI], tl.float32)
        count = chunk.count * IH
        order_ptr = chunks[0] + chunk.begin
        first_q, num_q = sequence_rows(cu_q_ptr, chunk.sequence, len_q)
        offset = num_tokens - num_q - first_q
        begin = first_ranked(chunk, order_ptr, offset, num_init, num_local, IH, SIZES)
        for r in tl.range(begin, count, ROWS):
            selection = load_order(order_ptr, r, count, chunk.first_selection, IH, ROWS, True)
            rows = locate_rows(selection, r, count, IH, SLOTS, ROWS)
            slot = rows.selection % SIZES.N
            at = slope_places(rows.query, key_head, rows.head, chunk.head_kv, slot, SIZES)
            slope = tl.load(slope_ptr + at, mask=rows.ok, other=0.0)
            token = tl.load(row_ptr + at, mask=rows.ok, other=-1)
            head = key_head * IH + rows.head
            q_at = rows.query.to(tl.int64) * stride_q_idx[0] + head * stride_q_idx[1]
            q = load_tile(q_idx_ptr, q_at, rows.ok, SIZES.DI, BLOCK_DI)
            weight = tl.where(token[None, :] == key_row[:, None], slope[None, :], 0.0)
            dk = tl.dot(weight.to(q.dtype), q, dk, input_precision="ieee")  # [KEYS, BLOCK_DI]
        out_row = tl.program_id(0).to(tl.int64) * SIZES.BLOCK_SIZE + inside
        store_rows(part_ptr, out_row, key < num_tokens, dk, SIZES.DI)


@kernel(do_not_specialize=[*VARYING, "num_blocks"])
def index_loss_reduce_dk_kernel(
    part_ptr,
    start_ptr,
    dout_ptr,
    dk_ptr,
    cu_k_ptr,
    len_k,
    num_sequences,
    num_blocks,
    index_scale,
    SIZES: tl.constexpr,
):
    """Write the gradient of the index keys: the sum of the chunks of a block, in order.

    Program (i, h, p) handles part p of block i of index key head h. ``start_ptr`` has the first
    chunk of each key block.
    """
    SHARED: tl.constexpr = SIZES.HKV // SIZES.HKI
    KEYS: tl.constexpr = SIZES.KEYS
    BLOCK_DI: tl.constexpr = SIZES.BLOCK_DI
    sequence, block = find_tile(cu_k_ptr, tl.program_id(0), num_sequences, len_k, SIZES.BLOCK_SIZE)
    if sequence < num_sequences:
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        inside = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
        key = block * SIZES.BLOCK_SIZE + inside
        ok = key < num_tokens
        dk = tl.zeros([KEYS, BLOCK_DI], tl.float32)
        for group in tl.static_range(SHARED):
            head_kv = tl.program_id(1) * SHARED + group
            start = start_ptr + head_kv * num_blocks + tl.program_id(0)
            for chunk in tl.range(tl.load(start), tl.load(start + 1)):
                row = chunk * SIZES.BLOCK_SIZE + inside
                dk += load_rows(part_ptr, row, ok, SIZES.DI, SIZES.DI, BLOCK_DI)
        row = (first_key + key).to(tl.int64) * SIZES.HKI + tl.program_id(1)
        store_rows(dk_ptr, row, ok, dk * (tl.load(dout_ptr) * index_scale), SIZES.DI)
