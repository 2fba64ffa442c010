"""Selected branch, gathered: a block of keys against the queries that chose it, wherever they lie.

Where neighbouring queries choose differently, a tile of them works mostly on masked rows. Here the rows of a program are the
queries that chose one block, by heads, so no row is masked. What a query gets from each of its blocks (output and lse, or dQ)
is written apart, one row for each (query, slot), and a second kernel merges the slots of a query. No atomics: the same bits
in every run. What is written for a row follows from its query and its block alone, and a merge reads the slots of one query in
their order: the choices of other queries move a row to another place, where its arithmetic is the same.

The queries are cut into **segments**, worked off one after the other, so that the rows of slots need little memory. An *item*
is a block of one head as seen from one segment: ``(segment * Hkv + head) * num_blocks + block``. An *entry* is a (query, head,
slot), numbered as in ``block_indices [T, Hkv, n]``; sorted by item, the entries of an item are the queries that chose the
block, in order. They are cut into *chunks*, one a program.

A block that is too large to be held at once is cut into ``PARTS`` of ``BLOCK_N`` keys, each with rows of its own.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.tiles import LN_2, LOG2_E, VARYING, find_tile, load_rows, load_tile, sequence_rows, store_rows

SEGMENT = [*VARYING, "num_blocks", "segment", "segment_rows", "none"]


@triton.jit(do_not_specialize=SEGMENT)
def selected_item_kernel(
    indices_ptr, item_ptr, cu_q_ptr, cu_k_ptr, cu_block_ptr, len_q, len_k, num_sequences, num_blocks, segment_rows,
    none, HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Item of each entry of a tile of queries; ``none`` where the block is absent."""
    sequence, tile = find_tile(cu_q_ptr, tl.program_id(0), num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        if cu_block_ptr is None:
            first_block = sequence * tl.cdiv(len_k, BLOCK_SIZE)
        else:
            first_block = tl.load(cu_block_ptr + sequence)
        row = tile * BLOCK_Q
        first = (first_q + row).to(tl.int64) * (HKV * N)
        count = tl.minimum(num_q - row, BLOCK_Q) * (HKV * N)
        for begin in tl.range(0, count, ENTRIES):
            e = begin + tl.arange(0, ENTRIES)
            block = tl.load(indices_ptr + first + e, mask=e < count, other=-1).to(tl.int32)
            query = row + e // (HKV * N)
            present = (block >= 0) & (block <= (num_tokens - num_q + query) // BLOCK_SIZE)
            head = e // N % HKV
            item = ((first_q + query) // segment_rows * HKV + head) * num_blocks + first_block + block
            item = tl.where(present, item, none)
            tl.store(item_ptr + first + e, item.to(item_ptr.dtype.element_ty), mask=e < count)


@triton.jit(do_not_specialize=VARYING)
def selected_delta_kernel(
    out_ptr, dout_ptr, delta_ptr, num_rows, stride_do, stride_doh, HQ: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta ``[T, Hq]``, the row sums of ``out * dout``."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ok = r < num_rows
    out = load_rows(out_ptr, r, ok, DV, DV, BLOCK_DV, True)
    dout = load_tile(dout_ptr, r // HQ * stride_do + r % HQ * stride_doh, ok, DV, BLOCK_DV, True)
    tl.store(delta_ptr + r, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1), mask=ok)


@triton.jit
def find_chunk(
    chunk_item_ptr, chunk_start_ptr, start_ptr, order_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_blocks,
    segment, segment_rows, HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Where the chunk of this program lies.

    Returns:
        Its entries: where they begin in ``order_ptr``, how many there are (0: no chunk is left for this program), and the first
        entry of the segment. Its block: head, sequence, number inside the sequence. How many entries, the first ones, can be
        queries that do not see the whole block.
    """
    items = HKV * num_blocks
    chunk = tl.load(chunk_start_ptr + segment * items) + tl.program_id(0)
    count = 0
    begin = 0
    head_kv = 0
    sequence = 0
    block = 0
    hidden = 0
    first_entry = segment.to(tl.int64) * segment_rows * (HKV * N)
    if chunk < tl.load(chunk_start_ptr + (segment + 1) * items):
        item = tl.load(chunk_item_ptr + chunk)
        place = (chunk - tl.load(chunk_start_ptr + item)) * CHUNK
        begin = tl.load(start_ptr + item) + place
        count = tl.minimum(tl.load(start_ptr + item + 1) - begin, CHUNK)
        item = item % items
        head_kv = item // num_blocks
        sequence, block = find_tile(cu_k_ptr, item % num_blocks, num_sequences, len_k, BLOCK_SIZE)
        # Queries come in order, one at a position: from the first one's position follows how many can lie inside the block.
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        query = (tl.load(order_ptr + begin) // (HKV * N)).to(tl.int32)
        t = num_tokens - num_q - first_q + query
        hidden = tl.minimum(tl.maximum((block + 1) * BLOCK_SIZE - 1 - t, 0), count)
    return begin, count, first_entry, head_kv, sequence, block, hidden


@triton.jit
def gather_rows(
    order_ptr, r, num_rows, first_entry, G: tl.constexpr, HKV: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Rows ``r .. r + BLOCK_M`` of a chunk, a query and head each.

    Returns:
        Entry, counted from the segment's first, query, counted likewise, head of the group, and whether there is such a row.
    """
    index = r + tl.arange(0, BLOCK_M)
    ok = index < num_rows
    entry = (tl.load(order_ptr + index // G, mask=ok, other=0) - first_entry).to(tl.int32)
    return entry, entry // (HKV * N), index % G, ok


@triton.jit
def gather_fwd_step(
    q_ptr, part_ptr, lse_part_ptr, order_ptr, k, v, r, num_rows, first_entry, first_row, offset, n, scale, head_kv, part,
    stride_q, stride_qh, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HKV: tl.constexpr, N: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Output and lse (base 2) of ``BLOCK_M`` rows over the keys of this block alone."""
    entry, query, head, ok = gather_rows(order_ptr, r, num_rows, first_entry, G, HKV, N, BLOCK_M)
    q_row = (first_row + query) * stride_q + (head_kv * G + head) * stride_qh
    q = load_tile(q_ptr, q_row, ok, D, BLOCK_D, True)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
    if CAUSAL:
        key = n + tl.arange(0, BLOCK_N)
        s = tl.where(key[None, :] <= (offset + query)[:, None], s, -float("inf"))
    row_max = tl.maximum(tl.max(s, 1) * scale, -1e30)
    p = tl.exp2(s * scale - row_max[:, None])
    total = tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    slot = (entry * PARTS + part) * G + head
    store_rows(part_ptr, slot, ok, DV, out / total[:, None], DV, BLOCK_DV)
    tl.store(lse_part_ptr + slot, tl.where(empty, -float("inf"), row_max + tl.log2(total)), mask=ok)


@triton.jit(do_not_specialize=SEGMENT)
def selected_gather_fwd_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_part_ptr, order_ptr, start_ptr, chunk_item_ptr, chunk_start_ptr, cu_q_ptr, cu_k_ptr,
    len_q, len_k, num_sequences, num_blocks, segment, segment_rows, stride_q, stride_qh, stride_k, stride_kh, stride_v,
    stride_vh, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One chunk: output ``[G, Dv]`` and lse ``[G]`` of every (query, slot)."""
    HKV: tl.constexpr = HQ // G
    PARTS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    begin, count, first_entry, head_kv, sequence, block, hidden = find_chunk(
        chunk_item_ptr, chunk_start_ptr, start_ptr, order_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_blocks,
        segment, segment_rows, HKV, N, BLOCK_SIZE, CHUNK,
    )  # fmt: skip
    if count > 0:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        part = tl.program_id(1)
        n = block * BLOCK_SIZE + part * BLOCK_N
        key = n + tl.arange(0, BLOCK_N)
        key_ok = key < num_tokens
        key_row = (first_key + key).to(tl.int64)
        k = load_rows(k_ptr + head_kv * stride_kh, key_row, key_ok, stride_k, D, BLOCK_D, True)
        v = load_rows(v_ptr + head_kv * stride_vh, key_row, key_ok, stride_v, DV, BLOCK_DV, True)
        first_row = segment.to(tl.int64) * segment_rows
        offset = (num_tokens - num_q - first_q + first_row).to(tl.int32)
        scale = softmax_scale * LOG2_E
        order_ptr += begin
        rows = count * G
        masked = tl.minimum(tl.cdiv(hidden * G, BLOCK_M) * BLOCK_M, rows)
        for r in tl.range(0, masked, BLOCK_M, num_stages=EDGE):
            gather_fwd_step(
                q_ptr, part_ptr, lse_part_ptr, order_ptr, k, v, r, rows, first_entry, first_row, offset, n, scale, head_kv,
                part, stride_q, stride_qh, G, D, DV, HKV, N, PARTS, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True,
            )  # fmt: skip
        for r in tl.range(masked, rows, BLOCK_M, num_stages=STAGES):
            gather_fwd_step(
                q_ptr, part_ptr, lse_part_ptr, order_ptr, k, v, r, rows, first_entry, first_row, offset, n, scale, head_kv,
                part, stride_q, stride_qh, G, D, DV, HKV, N, PARTS, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False,
            )  # fmt: skip


@triton.jit
def gather_bwd_step(
    q_ptr, dout_ptr, lse_ptr, delta_ptr, part_ptr, order_ptr, k, v, dk, dv, r, num_rows, first_entry, first_row, offset, n,
    softmax_scale, head_kv, part, stride_q, stride_qh, stride_do, stride_doh, HQ: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add the share of ``BLOCK_M`` rows to dK and dV, and write their dQ of this block."""
    entry, query, head, ok = gather_rows(order_ptr, r, num_rows, first_entry, G, HQ // G, N, BLOCK_M)
    row = first_row + query
    head_q = head_kv * G + head
    at = row * HQ + head_q
    q = load_tile(q_ptr, row * stride_q + head_q * stride_qh, ok, D, BLOCK_D, True)
    dout = load_tile(dout_ptr, row * stride_do + head_q * stride_doh, ok, DV, BLOCK_DV, True)
    lse = tl.load(lse_ptr + at, mask=ok, other=float("inf")) * LOG2_E
    delta = tl.load(delta_ptr + at, mask=ok, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
    # Small heads leave registers for both products of inputs at once: the second runs while the first is exponentiated.
    EARLY: tl.constexpr = BLOCK_D + BLOCK_DV <= 128
    if EARLY:
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    p = tl.exp2(s * (softmax_scale * LOG2_E) - lse[:, None])
    if CAUSAL:
        key = n + tl.arange(0, BLOCK_N)
        p = tl.where(key[None, :] <= (offset + query)[:, None], p, 0.0)
    dv = tl.dot(tl.trans(p.to(dout.dtype)), dout, dv, input_precision="ieee")
    if not EARLY:
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    dq = tl.dot(ds, k, input_precision="ieee")
    store_rows(part_ptr, (entry * PARTS + part) * G + head, ok, D, dq * softmax_scale, D, BLOCK_D)
    return dk, dv


@triton.jit(do_not_specialize=SEGMENT)
def selected_gather_bwd_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, part_ptr, dk_ptr, dv_ptr, order_ptr, start_ptr, chunk_item_ptr,
    chunk_start_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_blocks, segment, segment_rows,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_do, stride_doh, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One chunk: fp32 sums of dK (without the scale) and dV ``[BLOCK_SIZE, D]``, and dQ of every (query, slot) ``[G, D]``."""
    HKV: tl.constexpr = HQ // G
    PARTS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    begin, count, first_entry, head_kv, sequence, block, hidden = find_chunk(
        chunk_item_ptr, chunk_start_ptr, start_ptr, order_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_blocks,
        segment, segment_rows, HKV, N, BLOCK_SIZE, CHUNK,
    )  # fmt: skip
    if count > 0:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        part = tl.program_id(1)
        n = block * BLOCK_SIZE + part * BLOCK_N
        key = n + tl.arange(0, BLOCK_N)
        key_ok = key < num_tokens
        key_row = (first_key + key).to(tl.int64)
        k = load_rows(k_ptr + head_kv * stride_kh, key_row, key_ok, stride_k, D, BLOCK_D, True)
        v = load_rows(v_ptr + head_kv * stride_vh, key_row, key_ok, stride_v, DV, BLOCK_DV, True)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        first_row = segment.to(tl.int64) * segment_rows
        offset = (num_tokens - num_q - first_q + first_row).to(tl.int32)
        order_ptr += begin
        rows = count * G
        masked = tl.minimum(tl.cdiv(hidden * G, BLOCK_M) * BLOCK_M, rows)
        for r in tl.range(0, masked, BLOCK_M, num_stages=EDGE):
            dk, dv = gather_bwd_step(
                q_ptr, dout_ptr, lse_ptr, delta_ptr, part_ptr, order_ptr, k, v, dk, dv, r, rows, first_entry, first_row, offset,
                n, softmax_scale, head_kv, part, stride_q, stride_qh, stride_do, stride_doh, HQ, G, D, DV, N, PARTS, BLOCK_M,
                BLOCK_N, BLOCK_D, BLOCK_DV, True,
            )  # fmt: skip
        for r in tl.range(masked, rows, BLOCK_M, num_stages=STAGES):
            dk, dv = gather_bwd_step(
                q_ptr, dout_ptr, lse_ptr, delta_ptr, part_ptr, order_ptr, k, v, dk, dv, r, rows, first_entry, first_row, offset,
                n, softmax_scale, head_kv, part, stride_q, stride_qh, stride_do, stride_doh, HQ, G, D, DV, N, PARTS, BLOCK_M,
                BLOCK_N, BLOCK_D, BLOCK_DV, False,
            )  # fmt: skip
        out_row = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + (key - block * BLOCK_SIZE)
        store_rows(dk_ptr, out_row, key_ok, D, dk, D, BLOCK_D)
        store_rows(dv_ptr, out_row, key_ok, DV, dv, DV, BLOCK_DV)


@triton.jit(do_not_specialize=SEGMENT)
def selected_gather_reduce_kernel(
    dk_part_ptr, dv_part_ptr, dk_in_ptr, dv_in_ptr, dk_out_ptr, dv_out_ptr, chunk_start_ptr, cu_k_ptr, len_k, num_sequences,
    num_blocks, segment, softmax_scale, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Add a segment's chunks of one block, in order, to the sums of the segments before (None: there are none)."""
    head = tl.program_id(1)
    sequence, block = find_tile(cu_k_ptr, tl.program_id(0), num_sequences, len_k, BLOCK_SIZE)
    if sequence < num_sequences:
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        chunk_start_ptr += segment * (HKV * num_blocks)
        first = tl.load(chunk_start_ptr)
        item = head * num_blocks + tl.program_id(0)
        begin = tl.load(chunk_start_ptr + item) - first
        end = tl.load(chunk_start_ptr + item + 1) - first
        inside = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
        ok = block * BLOCK_SIZE + inside < num_tokens
        row = (first_key + block * BLOCK_SIZE + inside).to(tl.int64) * HKV + head
        if LAST | (dk_in_ptr is None) | (begin < end):
            if dk_in_ptr is None:
                dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
                dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
            else:
                dk = load_rows(dk_in_ptr, row, ok, D, D, BLOCK_D, True)
                dv = load_rows(dv_in_ptr, row, ok, DV, DV, BLOCK_DV, True)
            for chunk in tl.range(begin, end):
                part = chunk * BLOCK_SIZE + inside
                dk += load_rows(dk_part_ptr, part, ok, D, D, BLOCK_D, True)
                dv += load_rows(dv_part_ptr, part, ok, DV, DV, BLOCK_DV, True)
            if LAST:
                dk *= softmax_scale
            store_rows(dk_out_ptr, row, ok, D, dk, D, BLOCK_D)
            store_rows(dv_out_ptr, row, ok, DV, dv, DV, BLOCK_DV)


@triton.jit
def slot_rows(
    item_ptr, r, num_rows, first, first_row, segment_rows, none, HQ: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Slots ``first .. first + BLOCK_S`` of the rows r: which row of slots it is ``[M, S]``, and whether there is one."""
    HKV: tl.constexpr = HQ // G
    head = r % HQ
    slot = first + tl.arange(0, BLOCK_S)
    entry = (r // HQ * HKV + head // G)[:, None] * N + (slot // PARTS)[None, :]
    row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HQ
    ok = row_ok[:, None] & (slot < N * PARTS)[None, :]
    ok = ok & (tl.load(item_ptr + first_row * (HKV * N) + entry, mask=ok, other=none) < none)
    return (entry * PARTS + (slot % PARTS)[None, :]) * G + (head % G)[:, None], ok


@triton.jit
def load_slots(part_ptr, part, ok, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[M, S, BLOCK_D]`` fp32. One load: slot by slot it would need far more registers."""
    d = tl.arange(0, BLOCK_D)
    pointers = part_ptr + part.to(tl.int64)[:, :, None] * D + d[None, None, :]
    return tl.load(pointers, mask=ok[:, :, None] & (d < D)[None, None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SEGMENT)
def selected_merge_out_kernel(
    part_ptr, lse_part_ptr, item_ptr, out_ptr, lse_ptr, num_rows, segment, segment_rows, none, HQ: tl.constexpr,
    G: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """out, and lse ``[T, Hq]``, of a segment's queries from the slots of each. A row is a query and head."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_row = segment.to(tl.int64) * segment_rows
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first in tl.range(0, N * PARTS, BLOCK_S):
        part, ok = slot_rows(item_ptr, r, num_rows, first, first_row, segment_rows, none, HQ, G, N, PARTS, BLOCK_S)
        lse = tl.load(lse_part_ptr + part, mask=ok, other=-float("inf"))
        new_max = tl.maximum(row_max, tl.max(lse, 1))
        weight = tl.exp2(lse - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        acc = acc * alpha[:, None] + tl.sum(load_slots(part_ptr, part, ok, DV, BLOCK_DV) * weight[:, :, None], 1)
        total = total * alpha + tl.sum(weight, 1)
        row_max = new_max
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HQ
    store_rows(out_ptr, first_row * HQ + r, row_ok, DV, acc / total[:, None], DV, BLOCK_DV)
    lse = tl.where(empty, -float("inf"), (row_max + tl.log2(total)) * LN_2)
    tl.store(lse_ptr + first_row * HQ + r, lse, mask=row_ok)


@triton.jit(do_not_specialize=SEGMENT)
def selected_merge_dq_kernel(
    part_ptr, item_ptr, dq_ptr, num_rows, segment, segment_rows, none, HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ of a segment's queries: the sum over the slots of each, in fp32. A row is a query and head."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_row = segment.to(tl.int64) * segment_rows
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(0, N * PARTS, BLOCK_S):
        part, ok = slot_rows(item_ptr, r, num_rows, first, first_row, segment_rows, none, HQ, G, N, PARTS, BLOCK_S)
        dq += tl.sum(load_slots(part_ptr, part, ok, D, BLOCK_D), 1)
    row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HQ
    store_rows(dq_ptr, first_row * HQ + r, row_ok, D, dq, D, BLOCK_D)
