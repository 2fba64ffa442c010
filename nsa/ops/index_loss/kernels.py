"""Kernels of the loss of an index head over selected blocks, and what both phases share.

Exponents are base 2, and masses and scores of blocks stay logarithms, so that nothing underflows.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from typing import NamedTuple

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import LN_2, LOG2_E, VARYING, find_tile, load_rows, sequence_rows
from nsa.ops._triton.token_lse import add_weights


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
        QUERIES: queries of a tile.
        BLOCK_G, BLOCK_IH, BLOCK_N: padded to powers of two, heads to at least 16 for products.
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
    """Logarithms of the softmax of ``x [N]`` over the elements that are ``ok``, 0 elsewhere."""
    total = log_sum(tl.where(ok, x, -float("inf")), 0)
    return tl.where(ok, tl.where(ok, x, 0.0) - total, 0.0)


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


@kernel(do_not_specialize=VARYING)
def index_loss_kernel(
    q_idx_ptr,
    k_idx_ptr,
    q_ptr,
    k_ptr,
    indices_ptr,
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
    stride_q_idx,
    stride_k_idx,
    stride_q,
    stride_k,
    index_scale,
    softmax_scale,
    num_init,
    num_local,
    SIZES: tl.constexpr,
):
    """Write loss and number of ranked blocks, ``[T, Hkv]``, and what the gradient needs.

    For each index query head and slot ``[T, Hi, Hkv / Hki * n]``: the gradient of the largest
    scaled product in the block, and the row of its token in the index keys ``[S * Hki, Di]``, -1
    unless the block is ranked. Program (i, h) handles query i and KV head h, in a loop over the
    slots. ``lse_idx_ptr`` is None with one index head per group, for which it cancels.
    """
    HKV: tl.constexpr = SIZES.HKV
    HKI: tl.constexpr = SIZES.HKI
    IH: tl.constexpr = SIZES.IH
    N: tl.constexpr = SIZES.N
    KEYS: tl.constexpr = SIZES.KEYS
    BLOCK_SIZE: tl.constexpr = SIZES.BLOCK_SIZE
    BLOCK_G: tl.constexpr = SIZES.BLOCK_G
    BLOCK_IH: tl.constexpr = SIZES.BLOCK_IH
    BLOCK_N: tl.constexpr = SIZES.BLOCK_N
    SHARED: tl.constexpr = HKV // HKI  # KV heads of an index key head
    group = tl.program_id(1)
    key_head = group // SHARED
    sequence, row = find_tile(cu_q_ptr, tl.program_id(0), num_sequences, len_q, 1)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        token = (first_q + row).to(tl.int64)
        t = num_tokens - num_q + row
        own = t // BLOCK_SIZE
        # Slots [BLOCK_N]; a block that an earlier slot has is absent.
        slot = tl.arange(0, BLOCK_N)
        at = (token * HKV + group) * N
        ids = tl.load(indices_ptr + at + slot, mask=slot < N, other=-1)
        again = (ids[:, None] == ids[None, :]) & (slot[:, None] < slot[None, :])
        present = (ids >= 0) & (ids <= own) & (tl.max(again.to(tl.int32), 0) == 0)
        block = tl.where(present, ids, -1).to(tl.int32)
        ranked = (block >= 0) & (block >= num_init) & (block <= own - num_local)
        # Queries of the group [BLOCK_G, BLOCK_D], and its index queries [BLOCK_IH, BLOCK_DI].
        head = tl.arange(0, BLOCK_G)
        q_at = q_ptr + token * stride_q[0] + group * SIZES.G * stride_q[1]
        q = load_rows(q_at, head, head < SIZES.G, stride_q[1], SIZES.D, SIZES.BLOCK_D)
        index = tl.arange(0, BLOCK_IH)
        index_ok = index < IH
        q_idx_at = q_idx_ptr + token * stride_q_idx[0] + key_head * IH * stride_q_idx[1]
        q_idx = load_rows(q_idx_at, index, index_ok, stride_q_idx[1], SIZES.DI, SIZES.BLOCK_DI)
        k_head = k_ptr + group * stride_k[1]
        k_idx_head = k_idx_ptr + key_head * stride_k_idx[1]
        mass = tl.full([BLOCK_G, BLOCK_N], -float("inf"), tl.float32)
        largest = tl.full([BLOCK_IH, BLOCK_N], -float("inf"), tl.float32)
        largest_at = tl.zeros([BLOCK_IH, BLOCK_N], tl.int32)
        for i in tl.range(0, N):
            j = tl.sum(tl.where(slot == i, block, 0), 0)
            row_max = tl.full([BLOCK_G], -1e30, tl.float32)
            total = tl.zeros([BLOCK_G], tl.float32)
            m = tl.full([BLOCK_IH], -float("inf"), tl.float32)
            m_at = tl.zeros([BLOCK_IH], tl.int32)
            for part in tl.static_range(BLOCK_SIZE // KEYS):
                key = j * BLOCK_SIZE + part * KEYS + tl.arange(0, KEYS)
                ok = (key >= 0) & (key <= t)
                k_row = first_key + key
                k = load_rows(k_head, k_row, ok, stride_k[0], SIZES.D, SIZES.BLOCK_D)
                s = tl.dot(q, tl.trans(k), input_precision="ieee") * (softmax_scale * LOG2_E)
                row_max, total = add_weights(
                    tl.where(ok[None, :], s, -float("inf")), row_max, total
                )
                k = load_rows(k_idx_head, k_row, ok, stride_k_idx[0], SIZES.DI, SIZES.BLOCK_DI)
                s = tl.dot(q_idx, tl.trans(k), input_precision="ieee") * (index_scale * LOG2_E)
                s = tl.where(ok[None, :], s, -float("inf"))
                m, m_at = find_largest(s, k_row, m, m_at)
            none = total == 0
            of_block = tl.where(none, -float("inf"), row_max + tl.log2(tl.where(none, 1.0, total)))
            here = (slot == i)[None, :]
            mass = tl.where(here, of_block[:, None], mass)
            largest = tl.where(here, m[:, None], largest)
            largest_at = tl.where(here, m_at[:, None], largest_at)
        # Target and prediction [BLOCK_N].
        mass = mass - log_sum(mass, 1)[:, None]
        mass = tl.where((head < SIZES.G)[:, None], mass, -float("inf"))
        target = log_softmax(log_sum(mass, 0), ranked)
        if lse_idx_ptr is not None:
            lse_at = (key_head * IH + index).to(tl.int64) * num_rows + token
            largest -= tl.load(lse_idx_ptr + lse_at, mask=index_ok, other=0.0)[:, None]
        largest = tl.where(index_ok[:, None], largest, -float("inf"))
        score = log_sum(largest, 0)
        prediction = log_softmax(score, ranked)
        p = tl.where(ranked, tl.exp2(target), 0.0)
        loss = tl.sum(p * (target - prediction), 0) * LN_2
        tl.store(loss_ptr + token * HKV + group, loss)
        tl.store(count_ptr + token * HKV + group, tl.sum(ranked.to(tl.int32), 0))
        # Gradient of the largest products [BLOCK_IH, BLOCK_N].
        rest = tl.where(ranked, tl.exp2(prediction), 0.0) - p
        slope = rest[None, :] * tl.exp2(largest - score[None, :])
        out = (token * (HKI * IH) + key_head * IH + index) * (SHARED * N)
        out = out[:, None] + (group % SHARED * N + slot)[None, :]
        inside = index_ok[:, None] & (slot < N)[None, :]
        tl.store(slope_ptr + out, tl.where(ranked[None, :], slope, 0.0), mask=inside)
        key_row = tl.where(ranked[None, :], largest_at * HKI + key_head, -1)
        tl.store(row_ptr + out, key_row, mask=inside)
