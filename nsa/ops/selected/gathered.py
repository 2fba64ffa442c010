"""Selected branch, gathered: a block of keys against the queries that chose it, wherever they lie; see ``index.py``.

Where neighbouring queries choose differently, a tile of them works mostly on masked rows. Here the
rows of a program are the queries that chose one block, by heads, so no row is masked. dK and dV of
both algorithms are made so. What a query gets from each of its blocks (output and lse, or dQ) is
put apart, a row for each (query, slot), and another kernel merges the slots of a query, segment by
segment, so that the rows of slots need little memory. No atomics: the same bits in every run. What
is written for a row follows from its query and its block alone, and a merge reads the slots of one
query in their order: the choices of other queries move a row to another place, where its arithmetic
is the same.

A block that is too large to be held at once is cut into ``PARTS`` of ``BLOCK_N`` keys, each with
rows of its own. Kernels that are given ``union_ptr`` do their share of the gathered algorithm only
where choices scatter (``choices_scatter``).
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import (
    LN_2,
    LOG2_E,
    VARYING,
    find_tile,
    load_column,
    load_rows,
    load_tile,
    sequence_rows,
    store_rows,
)
from nsa.ops.selected.index_kernels import choices_scatter

SEGMENT = [*VARYING, "num_blocks", "segment", "segment_rows", "chunk_size", "last_segment", "none"]


@triton.jit
def find_chunk(
    order_ptr, begin_ptr, length_ptr, chunk_item_ptr, chunk_start_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences,
    num_blocks, segment, segment_rows, chunk_size, HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Where the chunk of this program lies.

    Returns:
        Its entries: where they begin in ``order_ptr``, how many there are (0: no chunk is left for
        this program), and the first entry of the segment. Its block: head, sequence, number inside
        the sequence. The position of its first query. Whether it is the only chunk of its item in
        the segment, and the item.
    """
    items = HKV * num_blocks
    chunk = tl.load(chunk_start_ptr + segment * items) + tl.program_id(0)
    count = 0
    begin = 0
    head_kv = 0
    sequence = 0
    block = 0
    t = 0
    alone = False
    item = 0
    first_entry = segment.to(tl.int64) * segment_rows * (HKV * N)
    if chunk < tl.load(chunk_start_ptr + (segment + 1) * items):
        item = tl.load(chunk_item_ptr + chunk)
        place = (chunk - tl.load(chunk_start_ptr + item)) * chunk_size
        begin = tl.load(begin_ptr + item) + place
        length = tl.load(length_ptr + item)
        count = tl.minimum(length - place, chunk_size)
        alone = length <= chunk_size
        item = item % items
        head_kv = item // num_blocks
        sequence, block = find_tile(cu_k_ptr, item % num_blocks, num_sequences, len_k, BLOCK_SIZE)
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        query = (tl.load(order_ptr + begin) // (HKV * N)).to(tl.int32)
        t = num_tokens - num_q - first_q + query
    return begin, count, first_entry, head_kv, sequence, block, t, alone, item


@triton.jit
def near_entries(
    order_ptr, count, t, block, HKV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """How many of the ``count`` entries are of queries to which the block is near, see ``triton_fwd.py``: the first ones."""
    near = 0
    if block == 0:
        near = count
    elif t < (block + 2) * BLOCK_SIZE:
        # Queries come in order, one at a position.
        index = tl.arange(0, 2 * BLOCK_SIZE)
        query = tl.load(order_ptr + index, mask=index < count, other=0) // (HKV * N)
        later = (query - tl.load(order_ptr) // (HKV * N)).to(tl.int32)
        near = tl.sum(((index < count) & (t + later < (block + 2) * BLOCK_SIZE)).to(tl.int32), 0)
    return near


@triton.jit
def load_vector(pointers, mask, other, SPLIT: tl.constexpr):
    """As a column, see ``load_column``; in loops that are ``SPLIT`` as it comes, which is faster there."""
    if SPLIT:
        return tl.load(pointers, mask=mask, other=other)
    else:
        return load_column(pointers, mask, other)


@triton.jit
def load_order(
    order_ptr, r, num_rows, first_entry, G: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr
):
    """Entries, counted from the segment's first, of the rows ``r .. r + BLOCK_M`` of a chunk: a query and head each."""
    index = r + tl.arange(0, BLOCK_M)
    return load_vector(order_ptr + index // G, index < num_rows, 0, SPLIT) - first_entry.to(
        order_ptr.dtype.element_ty
    )


@triton.jit
def locate_rows(
    entry, r, num_rows, G: tl.constexpr, HKV: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Entry and query, counted from the segment's first, head of the group, and whether there is such a row."""
    index = r + tl.arange(0, BLOCK_M)
    return entry.to(tl.int32), (entry // (HKV * N)).to(tl.int32), index % G, index < num_rows


@triton.jit
def gather_fwd_step(
    q_ptr, part_ptr, lse_part_ptr, entry, k, v, r, num_rows, first_row, scale, head_kv, part, stride_q, stride_qh,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HKV: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Output and lse (base 2) of ``BLOCK_M`` rows over the keys of this block alone, all of which they see."""
    entry, query, head, ok = locate_rows(entry, r, num_rows, G, HKV, N, BLOCK_M)
    q_row = (first_row + query) * stride_q + (head_kv * G + head) * stride_qh
    q = load_tile(q_ptr, q_row, ok, D, BLOCK_D, True)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
    row_max = tl.max(s, 1) * scale
    p = tl.exp2(s * scale - row_max[:, None])
    total = tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    slot = (entry * PARTS + part) * G + head
    store_rows(part_ptr, slot, ok, DV, out * (1.0 / total)[:, None], DV, BLOCK_DV)
    tl.store(lse_part_ptr + slot, row_max + tl.log2(total), mask=ok)


@kernel(do_not_specialize=SEGMENT)
def selected_gather_fwd_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_part_ptr, union_ptr, order_ptr, begin_ptr, length_ptr, chunk_item_ptr, chunk_start_ptr,
    cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences, num_blocks, segment, segment_rows, chunk_size, stride_q, stride_qh,
    stride_k, stride_kh, stride_v, stride_vh, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LIMIT_4: tl.constexpr,
):  # fmt: skip
    """One chunk: output ``[G, Dv]`` and lse ``[G]`` of every (query, slot) whose block is not near."""
    if not choices_scatter(union_ptr, N, LIMIT_4):
        return
    HKV: tl.constexpr = HQ // G
    PARTS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    begin, count, first_entry, head_kv, sequence, block, t, _, _ = find_chunk(
        order_ptr, begin_ptr, length_ptr, chunk_item_ptr, chunk_start_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences,
        num_blocks, segment, segment_rows, chunk_size, HKV, N, BLOCK_SIZE,
    )  # fmt: skip
    order_ptr += begin
    near = near_entries(order_ptr, count, t, block, HKV, N, BLOCK_SIZE)
    if count > near:
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        part = tl.program_id(1)
        key = block * BLOCK_SIZE + part * BLOCK_N + tl.arange(0, BLOCK_N)
        key_row = (first_key + key).to(tl.int64)
        k = load_rows(
            k_ptr + head_kv * stride_kh, key_row, key < num_tokens, stride_k, D, BLOCK_D, True
        )
        v = load_rows(
            v_ptr + head_kv * stride_vh, key_row, key < num_tokens, stride_v, DV, BLOCK_DV, True
        )
        first_row = segment.to(tl.int64) * segment_rows
        scale = softmax_scale * LOG2_E
        order_ptr += near
        rows = (count - near) * G
        # Entries are loaded a step ahead: a row's number is needed before the row can be. The
        # pipeline's depth is that of the launch: given by the loop, it would take in the loads of
        # entries too, which a step ahead leaves no room for.
        next_entry = load_order(order_ptr, 0, rows, first_entry, G, BLOCK_M, True)
        for r in tl.range(0, rows, BLOCK_M):
            entry = next_entry
            next_entry = load_order(order_ptr, r + BLOCK_M, rows, first_entry, G, BLOCK_M, True)
            gather_fwd_step(
                q_ptr, part_ptr, lse_part_ptr, entry, k, v, r, rows, first_row, scale, head_kv, part, stride_q, stride_qh, G, D,
                DV, HKV, N, PARTS, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip


@triton.jit
def gather_bwd_step(
    q_ptr, dout_ptr, lse_ptr, delta_ptr, part_ptr, entry, k, v, dk, dv, r, causal, num_rows, first_row, offset, n,
    softmax_scale, head_kv, part, stride_q, stride_qh, stride_do, stride_doh, HQ: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS_AS_ROWS: tl.constexpr, DQ: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add the share of ``BLOCK_M`` rows to dK and dV and, if ``DQ``, write their dQ of this block."""
    entry, query, head, ok = locate_rows(entry, r, num_rows, G, HQ // G, N, BLOCK_M)
    row = first_row + query
    head_q = head_kv * G + head
    at = row * HQ + head_q
    q = load_tile(q_ptr, row * stride_q + head_q * stride_qh, ok, D, BLOCK_D, True)
    dout = load_tile(dout_ptr, row * stride_do + head_q * stride_doh, ok, DV, BLOCK_DV, True)
    lse = load_vector(lse_ptr + at, ok, float("inf"), SPLIT) * LOG2_E
    delta = load_vector(delta_ptr + at, ok, 0.0, SPLIT)
    scale = softmax_scale * LOG2_E
    key = n + tl.arange(0, BLOCK_N)
    # Small tiles leave registers for both products of inputs at once: the second runs while the
    # first is exponentiated.
    EARLY: tl.constexpr = BLOCK_D + BLOCK_DV <= 128 or BLOCK_M * (BLOCK_D + BLOCK_DV) <= 64 * 128
    if KEYS_AS_ROWS:
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BLOCK_N, BLOCK_M] fp32
        if EARLY:
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        p = tl.exp2(s * scale - lse[None, :])
        if causal:
            p = tl.where(key[:, None] <= (offset + query)[None, :], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        if not EARLY:
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision="ieee")
        if DQ:
            # Tensor cores of sm_90 take 64 rows at least: the columns of dQ are more.
            if BLOCK_M < 64:
                dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision="ieee"))
            else:
                dq = tl.dot(tl.trans(ds), k, input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
        if EARLY:
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        p = tl.exp2(s * scale - lse[:, None])
        if causal:
            p = tl.where(key[None, :] <= (offset + query)[:, None], p, 0.0)
        dv = tl.dot(tl.trans(p.to(dout.dtype)), dout, dv, input_precision="ieee")
        if not EARLY:
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
        if DQ:
            dq = tl.dot(ds, k, input_precision="ieee")
    if DQ:
        store_rows(
            part_ptr, (entry * PARTS + part) * G + head, ok, D, dq * softmax_scale, D, BLOCK_D
        )
    return dk, dv


@triton.jit
def finish_keys(
    dk, dv, dk_sum_ptr, dv_sum_ptr, dk_ptr, dv_ptr, begin_ptr, length_ptr, item, items, row, ok, segment, last_segment,
    softmax_scale, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add a segment's dK and dV of an item's keys to the sums of segments before; where none come after, that is the result."""
    final = True
    if dk_sum_ptr is not None:
        # The entries of an item follow each other, segment by segment.
        begin = tl.load(begin_ptr + segment * items + item)
        end = begin + tl.load(length_ptr + segment * items + item)
        if begin > tl.load(begin_ptr + item):
            dk += load_rows(dk_sum_ptr, row, ok, D, D, BLOCK_D, True)
            dv += load_rows(dv_sum_ptr, row, ok, DV, DV, BLOCK_DV, True)
        at_last = last_segment * items + item
        final = end == tl.load(begin_ptr + at_last) + tl.load(length_ptr + at_last)
        if not final:
            store_rows(dk_sum_ptr, row, ok, D, dk, D, BLOCK_D)
            store_rows(dv_sum_ptr, row, ok, DV, dv, DV, BLOCK_DV)
    if final:
        store_rows(dk_ptr, row, ok, D, dk * softmax_scale, D, BLOCK_D)
        store_rows(dv_ptr, row, ok, DV, dv, DV, BLOCK_DV)


@kernel(do_not_specialize=SEGMENT)
def selected_gather_bwd_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, part_ptr, dk_part_ptr, dv_part_ptr, dk_sum_ptr, dv_sum_ptr, dk_ptr,
    dv_ptr, union_ptr, order_ptr, begin_ptr, length_ptr, chunk_item_ptr, chunk_start_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k,
    num_sequences, num_blocks, segment, segment_rows, chunk_size, last_segment, stride_q, stride_qh, stride_k, stride_kh,
    stride_v, stride_vh, stride_do, stride_doh, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEYS_AS_ROWS: tl.constexpr, DQ: tl.constexpr, LIMIT_4: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block from one chunk and, if ``DQ``, dQ of every (query, slot) ``[G, D]``.

    A chunk that is the only one of its item goes straight where ``finish_keys`` puts it; others are
    fp32 sums, without the scale, which ``selected_reduce_kernel`` adds. With ``union_ptr`` it works
    only where choices scatter as ``DQ`` says.
    """
    if union_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if choices_scatter(union_ptr, N, LIMIT_4) != DQ:
            return
    HKV: tl.constexpr = HQ // G
    PARTS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    begin, count, first_entry, head_kv, sequence, block, t, alone, item = find_chunk(
        order_ptr, begin_ptr, length_ptr, chunk_item_ptr, chunk_start_ptr, cu_q_ptr, cu_k_ptr, len_q, len_k, num_sequences,
        num_blocks, segment, segment_rows, chunk_size, HKV, N, BLOCK_SIZE,
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
        # Queries come in order, one at a position: so many of the first may not see the whole
        # block.
        hidden = tl.minimum(tl.maximum((block + 1) * BLOCK_SIZE - 1 - t, 0), count)
        # See the forward: entries ``AHEAD`` of their rows. With ``STAGES`` the pipeline's depth is
        # given by the loop instead, which is split where the mask ends; without, one loop has the
        # mask under a condition.
        SPLIT: tl.constexpr = STAGES is not None
        next_entry = load_order(order_ptr, 0, rows, first_entry, G, BLOCK_M, SPLIT)
        masked = tl.minimum(tl.cdiv(hidden * G, BLOCK_M) * BLOCK_M, rows) if SPLIT else 0
        for past in tl.static_range(0 if SPLIT else 1, 2):
            for r in tl.range(
                masked if past else 0, rows if past else masked, BLOCK_M, num_stages=STAGES
            ):
                entry = (
                    next_entry
                    if AHEAD
                    else load_order(order_ptr, r, rows, first_entry, G, BLOCK_M, SPLIT)
                )
                if AHEAD:
                    next_entry = load_order(
                        order_ptr, r + BLOCK_M, rows, first_entry, G, BLOCK_M, SPLIT
                    )
                dk, dv = gather_bwd_step(
                    q_ptr, dout_ptr, lse_ptr, delta_ptr, part_ptr, entry, k, v, dk, dv, r,
                    past == 0 if SPLIT else r < hidden * G, rows, first_row, offset, n, softmax_scale, head_kv, part, stride_q,
                    stride_qh, stride_do, stride_doh, HQ, G, D, DV, N, PARTS, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, KEYS_AS_ROWS,
                    DQ, SPLIT,
                )  # fmt: skip
        if alone:
            finish_keys(
                dk, dv, dk_sum_ptr, dv_sum_ptr, dk_ptr, dv_ptr, begin_ptr, length_ptr, item, HKV * num_blocks,
                key_row * HKV + head_kv, key_ok, segment, last_segment, softmax_scale, D, DV, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        else:
            out_row = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + (key - block * BLOCK_SIZE)
            store_rows(dk_part_ptr, out_row, key_ok, D, dk, D, BLOCK_D)
            store_rows(dv_part_ptr, out_row, key_ok, DV, dv, DV, BLOCK_DV)


@kernel(do_not_specialize=SEGMENT)
def selected_reduce_kernel(
    dk_part_ptr, dv_part_ptr, dk_sum_ptr, dv_sum_ptr, dk_ptr, dv_ptr, union_ptr, begin_ptr, length_ptr, chunk_start_ptr,
    cu_k_ptr, len_k, num_sequences, num_blocks, segment, last_segment, softmax_scale, HKV: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_C: tl.constexpr, DQ: tl.constexpr, LIMIT_4: tl.constexpr,
):  # fmt: skip
    """Add a segment's chunks of one block, in order. An item of one chunk is done already; one that nobody chose becomes 0."""
    if union_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if choices_scatter(union_ptr, N, LIMIT_4) != DQ:
            return
    items = HKV * num_blocks
    head = tl.program_id(1)
    item = head * num_blocks + tl.program_id(0)
    at = segment * items + item
    first = tl.load(chunk_start_ptr + segment * items)
    begin = tl.load(chunk_start_ptr + at) - first
    end = tl.load(chunk_start_ptr + at + 1) - first
    at_last = last_segment * items + item
    chosen = tl.load(begin_ptr + item) < tl.load(begin_ptr + at_last) + tl.load(
        length_ptr + at_last
    )
    if (end > begin + 1) | ((segment == last_segment) & (not chosen)):
        sequence, block = find_tile(cu_k_ptr, tl.program_id(0), num_sequences, len_k, BLOCK_SIZE)
        if sequence < num_sequences:
            first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
            inside = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
            ok = block * BLOCK_SIZE + inside < num_tokens
            dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
            for chunk in tl.range(begin, end, BLOCK_C):
                chunks = chunk + tl.arange(0, BLOCK_C)
                part = chunks[None, :] * BLOCK_SIZE + inside[:, None]
                there = ok[:, None] & (chunks < end)[None, :]
                dk += tl.sum(load_slots(dk_part_ptr, part, there, D, BLOCK_D), 1)
                dv += tl.sum(load_slots(dv_part_ptr, part, there, DV, BLOCK_DV), 1)
            row = (first_key + block * BLOCK_SIZE + inside).to(tl.int64) * HKV + head
            finish_keys(
                dk, dv, dk_sum_ptr, dv_sum_ptr, dk_ptr, dv_ptr, begin_ptr, length_ptr, item, items, row, ok, segment,
                last_segment, softmax_scale, D, DV, BLOCK_D, BLOCK_DV,
            )  # fmt: skip


@triton.jit
def slot_rows(
    key_ptr, r, num_rows, first, first_row, segment_rows, none, HQ: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Slots ``first .. first + BLOCK_S`` of the rows r: which row of slots it is ``[M, S]``, and whether there is one."""
    HKV: tl.constexpr = HQ // G
    head = r % HQ
    slot = first + tl.arange(0, BLOCK_S)
    entry = (r // HQ * HKV + head // G)[:, None] * N + (slot // PARTS)[None, :]
    row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HQ
    ok = row_ok[:, None] & (slot < N * PARTS)[None, :]
    ok = ok & (tl.load(key_ptr + first_row * (HKV * N) + entry, mask=ok, other=none) < none)
    return (entry * PARTS + (slot % PARTS)[None, :]) * G + (head % G)[:, None], ok


@triton.jit
def load_slots(part_ptr, part, ok, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[M, S, BLOCK_D]`` fp32. One load: slot by slot it would need far more registers."""
    d = tl.arange(0, BLOCK_D)
    pointers = part_ptr + part.to(tl.int64)[:, :, None] * D + d[None, None, :]
    return tl.load(pointers, mask=ok[:, :, None] & (d < D)[None, None, :], other=0.0).to(tl.float32)


@kernel(do_not_specialize=SEGMENT)
def selected_merge_out_kernel(
    part_ptr, lse_part_ptr, key_ptr, out_ptr, lse_ptr, union_ptr, num_rows, segment, segment_rows, none, HQ: tl.constexpr,
    G: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr, LIMIT_4: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """out, and lse ``[T, Hq]``, of a segment's queries: what they are over near blocks, merged with the slots of the others.

    A row is a query and head.
    """
    if choices_scatter(union_ptr, N, LIMIT_4):
        for step in tl.range(0, STEPS, num_stages=1):
            r = (tl.program_id(0) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
            merge_out(
                part_ptr, lse_part_ptr, key_ptr, out_ptr, lse_ptr, r, num_rows, segment.to(tl.int64) * segment_rows,
                segment_rows, none, HQ, G, DV, N, PARTS, BLOCK_M, BLOCK_S, BLOCK_DV,
            )  # fmt: skip


@triton.jit
def merge_out(
    part_ptr, lse_part_ptr, key_ptr, out_ptr, lse_ptr, r, num_rows, first_row, segment_rows, none, HQ: tl.constexpr,
    G: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """out and lse of the rows r of a segment."""
    row = first_row * HQ + r
    row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HQ
    near_lse = tl.load(lse_ptr + row, mask=row_ok, other=-float("inf")) * LOG2_E
    row_max = tl.maximum(near_lse, -1e30)
    total = tl.exp2(near_lse - row_max)
    acc = load_rows(out_ptr, row, row_ok, DV, DV, BLOCK_DV, True).to(tl.float32) * total[:, None]
    for first in tl.range(0, N * PARTS, BLOCK_S):
        part, ok = slot_rows(
            key_ptr, r, num_rows, first, first_row, segment_rows, none, HQ, G, N, PARTS, BLOCK_S
        )
        lse = tl.load(lse_part_ptr + part, mask=ok, other=-float("inf"))
        new_max = tl.maximum(row_max, tl.max(lse, 1))
        weight = tl.exp2(lse - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        acc = acc * alpha[:, None] + tl.sum(
            load_slots(part_ptr, part, ok, DV, BLOCK_DV) * weight[:, :, None], 1
        )
        total = total * alpha + tl.sum(weight, 1)
        row_max = new_max
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    store_rows(out_ptr, row, row_ok, DV, acc / total[:, None], DV, BLOCK_DV)
    tl.store(
        lse_ptr + row,
        tl.where(empty, -float("inf"), (row_max + tl.log2(total)) * LN_2),
        mask=row_ok,
    )


@kernel(do_not_specialize=SEGMENT)
def selected_merge_dq_kernel(
    part_ptr, key_ptr, dq_ptr, union_ptr, num_rows, segment, segment_rows, none, HQ: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ADD: tl.constexpr, LIMIT_4: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """dQ of a segment's queries, added to what is there if ``ADD``. A row is a query and head."""
    if choices_scatter(union_ptr, N, LIMIT_4):
        for step in tl.range(0, STEPS, num_stages=1):
            r = (tl.program_id(0) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
            merge_dq(
                part_ptr, key_ptr, dq_ptr, r, num_rows, segment.to(tl.int64) * segment_rows, segment_rows, none, HQ, G, D, N,
                PARTS, BLOCK_M, BLOCK_S, BLOCK_D, ADD,
            )  # fmt: skip


@triton.jit
def merge_dq(
    part_ptr, key_ptr, dq_ptr, r, num_rows, first_row, segment_rows, none, HQ: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """dQ of the rows r of a segment: the sum over the slots of each, in fp32."""
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(0, N * PARTS, BLOCK_S):
        part, ok = slot_rows(
            key_ptr, r, num_rows, first, first_row, segment_rows, none, HQ, G, N, PARTS, BLOCK_S
        )
        dq += tl.sum(load_slots(part_ptr, part, ok, D, BLOCK_D), 1)
    row_ok = r < tl.minimum(num_rows - first_row, segment_rows) * HQ
    if ADD:
        dq += load_rows(dq_ptr, first_row * HQ + r, row_ok, D, D, BLOCK_D, True).to(tl.float32)
    store_rows(dq_ptr, first_row * HQ + r, row_ok, D, dq, D, BLOCK_D)
