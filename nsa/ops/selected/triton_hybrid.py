"""Selected branch: a block against the queries that chose it, and the merge of what the blocks gave each query.

A program takes one chunk of the choices of a block; rows are queries by heads, without padding. It writes what the block alone
gives each of these rows, a part: a normalised output and its lse, in a place of the choice's own. A second kernel merges the
parts with what the tile kernel made of the blocks in its list. dQ is merged in the same way, from what the kernel of dK and dV
wrote.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.tiles import LN_2, LOG2_E, VARYING, find_tile, load_rows, load_tile, sequence_rows, store_rows
from nsa.ops.selected.triton_index import ABSENT, GATHERED, find_chunk, load_entries

NO_LSE = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=[*VARYING, "num_blocks", "segment", "segment_rows"])
def selected_gather_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, part_lse_ptr, entry_ptr, start_ptr, chunk_start_ptr, chunk_key_ptr, cu_k_ptr, len_k,
    num_sequences, num_rows, num_blocks, segment, segment_rows, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh,
    softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """What ``BLOCK_N`` keys of one block give the gathered choices of one chunk: output and lse (base 2).

    The gathered choices of a block come behind all others, and its keys lie wholly in the past of their queries.
    """
    step = tl.program_id(1)
    STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    HKV: tl.constexpr = HQ // G
    real, item, _, begin, count = find_chunk(
        start_ptr, chunk_start_ptr, chunk_key_ptr, tl.program_id(0), segment, HKV * num_blocks, CHUNK
    )
    if real:
        head_kv = item // num_blocks
        first_choice = head_kv.to(tl.int64) * num_rows * N
        inside = tl.arange(0, CHUNK)
        _, gathered = load_entries(entry_ptr + begin, inside, inside < count, first_choice)
        skipped = count - tl.sum(((inside < count) & gathered).to(tl.int32), 0)
        if skipped < count:
            sequence, block = find_tile(cu_k_ptr, item % num_blocks, num_sequences, len_k, BLOCK_SIZE)
            first_key, _ = sequence_rows(cu_k_ptr, sequence, len_k)
            key_row = (first_key + block * BLOCK_SIZE + step * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
            k = load_rows(k_ptr + head_kv * stride_kh, key_row, key_row >= 0, stride_k, D, BLOCK_D, False)
            v = load_rows(v_ptr + head_kv * stride_vh, key_row, key_row >= 0, stride_v, DV, BLOCK_DV, False)
            scale = softmax_scale * LOG2_E
            first_part = (head_kv - segment) * segment_rows * N
            for r in tl.range(skipped * G, count * G, BLOCK_M, num_stages=STAGES):
                index = r + tl.arange(0, BLOCK_M)
                ok = index < count * G
                choice, _ = load_entries(entry_ptr + begin, index // G, ok, first_choice)
                token = (choice // N).to(tl.int64)
                head = head_kv * G + index % G
                q = load_tile(q_ptr, token * stride_q + head * stride_qh, ok, D, BLOCK_D, True)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
                row_max = tl.max(s, 1) * scale
                p = tl.exp2(s * scale - row_max[:, None])
                total = tl.sum(p, 1)
                out = tl.dot(p.to(v.dtype), v, input_precision="ieee") / total[:, None]
                part = ((choice + first_part) * STEPS + step) * G + index % G
                store_rows(part_ptr, part, ok, DV, out, DV, BLOCK_DV)
                tl.store(part_lse_ptr + part, row_max + tl.log2(total), mask=ok)


@triton.jit
def merged_rows(segment, segment_rows, num_rows, HQ: tl.constexpr, G: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
    """Rows of a program that merges: whether they are real, places in ``[T, Hq]``, first choices and first parts."""
    head_kv = tl.program_id(1)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r // G
    token = segment * segment_rows + inside
    ok = (inside < segment_rows) & (token < num_rows)
    row = token.to(tl.int64) * HQ + head_kv * G + r % G
    first_choice = (head_kv.to(tl.int64) * num_rows + token) * N
    return ok, row, first_choice, (head_kv * segment_rows + inside) * N, r % G


@triton.jit
def load_parts(part_ptr, part, there, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Parts ``[ROWS, SLOTS, BLOCK_DV]`` in fp32, 0 where there is none."""
    d = tl.arange(0, BLOCK_DV)
    pointers = part_ptr + (part.to(tl.int64) * DV)[:, :, None] + d[None, None, :]
    return tl.load(pointers, mask=there[:, :, None] & (d < DV)[None, None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=[*VARYING, "segment", "segment_rows"])
def selected_merge_kernel(
    part_ptr, part_lse_ptr, state_ptr, out_ptr, lse_ptr, num_rows, segment, segment_rows,
    HQ: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add the parts of the gathered choices to out and lse, which hold what the tile kernel made of the others."""
    ok, row, first_choice, first_part, head = merged_rows(segment, segment_rows, num_rows, HQ, G, N, ROWS)
    lse = tl.load(lse_ptr + row, mask=ok, other=-float("inf")) * LOG2_E
    row_max = tl.maximum(lse, NO_LSE)
    total = tl.exp2(lse - row_max)
    d = tl.arange(0, BLOCK_DV)
    acc = tl.load(out_ptr + (row * DV)[:, None] + d[None, :], mask=ok[:, None] & (d < DV)[None, :], other=0.0).to(tl.float32)
    acc = acc * total[:, None]
    for first in tl.range(0, N * STEPS, SLOTS):
        slot = first + tl.arange(0, SLOTS)[None, :]
        there = ok[:, None] & (slot < N * STEPS)
        there = tl.load(state_ptr + first_choice[:, None] + slot // STEPS, mask=there, other=0) == GATHERED
        part = (first_part[:, None] * STEPS + slot) * G + head[:, None]
        part_lse = tl.load(part_lse_ptr + part, mask=there, other=NO_LSE)
        new_max = tl.maximum(row_max, tl.max(part_lse, 1))
        weight = tl.where(there, tl.exp2(part_lse - new_max[:, None]), 0.0)
        alpha = tl.exp2(row_max - new_max)
        acc = acc * alpha[:, None] + tl.sum(load_parts(part_ptr, part, there, DV, BLOCK_DV) * weight[:, :, None], 1)
        total = total * alpha + tl.sum(weight, 1)
        row_max = new_max
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    store_rows(out_ptr, row, ok, DV, acc / total[:, None], DV, BLOCK_DV)
    tl.store(lse_ptr + row, tl.where(empty, -float("inf"), (row_max + tl.log2(total)) * LN_2), mask=ok)


@triton.jit(do_not_specialize=[*VARYING, "segment", "segment_rows"])
def selected_merge_dq_kernel(
    part_ptr, state_ptr, dq_ptr, num_rows, segment, segment_rows, softmax_scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ: the sum of the parts of all choices that are present."""
    ok, row, first_choice, first_part, head = merged_rows(segment, segment_rows, num_rows, HQ, G, N, ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.range(0, N * STEPS, SLOTS):
        slot = first + tl.arange(0, SLOTS)[None, :]
        there = ok[:, None] & (slot < N * STEPS)
        there = tl.load(state_ptr + first_choice[:, None] + slot // STEPS, mask=there, other=0) != ABSENT
        part = (first_part[:, None] * STEPS + slot) * G + head[:, None]
        acc += tl.sum(load_parts(part_ptr, part, there, D, BLOCK_D), 1)
    store_rows(dq_ptr, row, ok, D, acc * softmax_scale, D, BLOCK_D)


@triton.jit(do_not_specialize=[*VARYING])
def selected_delta_kernel(
    out_ptr, dout_ptr, delta_ptr, num_rows, stride_do, stride_doh, HQ: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta ``[T, Hq]``, the row sums of ``out * dout``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < num_rows.to(tl.int64) * HQ
    out = load_tile(out_ptr, row * DV, ok, DV, BLOCK_DV, True)
    dout = load_tile(dout_ptr, row // HQ * stride_do + row % HQ * stride_doh, ok, DV, BLOCK_DV, True)
    tl.store(delta_ptr + row, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1), mask=ok)
