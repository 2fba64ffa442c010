"""Scores of selection blocks and the choice of the best n, in one pass: no buffer over queries by keys or blocks.

A program takes BLOCK_Q queries of one group and walks over the selection blocks, BLOCK_J at a time.
The heads are visited one after the other and their probabilities added into one tile over the
compressed keys of these blocks, so the sum over the group (Eq. 10) costs nothing and G needs no
padding. The stencil of Eq. 9 is applied once to the sum: a compression block gives ``min(O, R -
m)`` of its overlap to the selection block that it starts in and ``max(m + O - R, 0)`` to the next
one, where ``O = l / d``, ``R = l' / d`` and m is its place in the block. The best n so far are kept
sorted as int64 keys, score above inverted id, so that ties go to the lower id; a chunk's best are
found by a bitonic top-k and merged.

With two stages the first one is the same kernel over the mean keys of coarse blocks. The second
walks over the steps in which some query of the tile kept a coarse block, and over each step before
such a one, whose last key reaches into it.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import LOG2_E, VARYING, find_tile, load_rows, sequence_rows

LAST_ID = tl.constexpr(0x7FFFFFFF)
INFINITE_BITS = tl.constexpr(0x7F800000)


@triton.jit
def load_head(
    q_ptr, q_scale_ptr, lse_ptr, token, ok, num_rows, head, stride_q, stride_qh, HQ: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Queries ``[BLOCK_Q, BLOCK_D]`` of one head, their lse in base 2, and their fp8 scales (otherwise lse again, unused)."""
    q = load_rows(q_ptr, token * stride_q + head * stride_qh, ok, 1, D, BLOCK_D, True)
    if BF16:
        q = q.to(tl.bfloat16)
    lse = (
        tl.load(
            lse_ptr + (head + tl.zeros_like(token)) * num_rows + token, mask=ok, other=float("inf")
        )
        * LOG2_E
    )
    q_scale = lse
    if q_scale_ptr is not None:
        q_scale = tl.load(q_scale_ptr + token * HQ + head, mask=ok, other=0.0)
    return q, lse, q_scale


@triton.jit
def load_heads(
    q_ptr, q_scale_ptr, lse_ptr, token, ok, num_rows, head_first, stride_q, stride_qh, HQ: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """``load_head`` of every head of a group."""
    heads = ()
    for h in tl.static_range(G):
        head = load_head(
            q_ptr,
            q_scale_ptr,
            lse_ptr,
            token,
            ok,
            num_rows,
            head_first + h,
            stride_q,
            stride_qh,
            HQ,
            D,
            BLOCK_D,
            BF16,
        )
        heads = heads + (head,)  # noqa: RUF005  Triton has no starred expressions
    return heads


@triton.jit
def probabilities(head, k, k_scale, scale, SCALED: tl.constexpr):
    """Probabilities ``[BLOCK_Q, BLOCK_C]`` fp32 of the compressed keys k ``[BLOCK_C, BLOCK_D]`` for one head."""
    q, lse, q_scale = head
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SCALED:
        s = s * q_scale[:, None] * k_scale[None, :]
    return tl.exp2(s * scale - lse[:, None])


@triton.jit
def block_scores(
    p, carry, jj, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, R: tl.constexpr, O: tl.constexpr
):
    """Scores ``[BLOCK_Q, BLOCK_J]`` (Eq. 9) of probabilities ``[BLOCK_Q, BLOCK_J * R]``, and what they give the next block."""
    place = tl.arange(0, R)
    p = p.reshape(BLOCK_Q, BLOCK_J, R)
    score = tl.sum(p * tl.minimum(O, R - place).to(tl.float32)[None, None, :], 2)
    if O > 1:
        to_next = tl.sum(p * tl.maximum(place + O - R, 0).to(tl.float32)[None, None, :], 2)
        before = tl.broadcast_to(tl.maximum(jj - 1, 0)[None, :], (BLOCK_Q, BLOCK_J))
        score += tl.where((jj == 0)[None, :], carry[:, None], tl.gather(to_next, before, 1))
        carry = tl.sum(tl.where((jj == BLOCK_J - 1)[None, :], to_next, 0.0), 1)
    return score, carry


@triton.jit
def kept_columns(
    coarse_ptr, list_row, ok, place, block, j0, jj, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, FACTOR: tl.constexpr,
    NUM_COARSE: tl.constexpr,
):  # fmt: skip
    """Which blocks ``j0 .. j0 + BLOCK_J`` lie in a coarse block that the query kept, ``[BLOCK_Q, BLOCK_J]``.

    ``block`` is the entry of each query's ascending list at ``place``; both move on as j0 does.
    """
    kept = tl.zeros([BLOCK_Q, BLOCK_J], tl.int1)
    for u in tl.static_range(0, (BLOCK_J + FACTOR - 1) // FACTOR):
        coarse = (j0 + u * FACTOR) // FACTOR
        behind = (block < coarse) & (place < NUM_COARSE)
        place += behind.to(tl.int32)
        fresh = tl.load(
            coarse_ptr + list_row + place, mask=ok & (place < NUM_COARSE), other=LAST_ID
        )
        block = tl.where(fresh < 0, LAST_ID, fresh)
        kept = kept | ((block == coarse)[:, None] & ((j0 + jj) // FACTOR == coarse)[None, :])
    return kept, place, block


@kernel(do_not_specialize=VARYING)
def select_kernel(
    q_ptr, k_ptr, lse_ptr, q_scale_ptr, k_scale_ptr, coarse_ptr, out_ptr, cu_q_ptr, cu_k_ptr, cu_key_ptr, len_q, len_k,
    len_key, num_sequences, num_rows, stride_q, stride_qh, stride_k, stride_kh, softmax_scale, num_init, num_local,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COUNTS: tl.constexpr, NUM_COUNTS: tl.constexpr, FACTOR: tl.constexpr, NUM_COARSE: tl.constexpr,
    BF16: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The chosen blocks of one tile of queries of one group."""
    R: tl.constexpr = BLOCK_SIZE // STRIDE
    O: tl.constexpr = L // STRIDE
    head_kv = tl.program_id(1)
    HKV: tl.constexpr = HQ // G
    sequence, tile = find_tile(
        cu_q_ptr, tl.num_programs(0) - 1 - tl.program_id(0), num_sequences, len_q, BLOCK_Q
    )
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        _, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        first_key, num_keys = sequence_rows(cu_key_ptr, sequence, len_key)
        row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
        ok = row < num_q
        t = num_tokens - num_q + row
        current = t // BLOCK_SIZE
        token = (first_q + row).to(tl.int64)
        visible = tl.maximum(t + 1 - L + STRIDE, 0) // STRIDE
        scale = softmax_scale * LOG2_E
        jj = tl.arange(0, BLOCK_J)
        carry = tl.zeros([BLOCK_Q], tl.float32)
        best = tl.full([BLOCK_Q, BLOCK_N], -1, tl.int64)
        t_first = num_tokens - num_q + tile * BLOCK_Q
        t_last = num_tokens - num_q + tl.minimum(tile * BLOCK_Q + BLOCK_Q, num_q) - 1
        if FACTOR > 0:
            list_row = (token * HKV + head_kv) * NUM_COARSE
            place = tl.full([BLOCK_Q], -1, tl.int32)
            block = tl.full([BLOCK_Q], -1, tl.int32)
            kept_next, place, block = kept_columns(
                coarse_ptr, list_row, ok, place, block, 0, jj, BLOCK_Q, BLOCK_J, FACTOR, NUM_COARSE
            )
        if KEEP:
            heads = load_heads(
                q_ptr,
                q_scale_ptr,
                lse_ptr,
                token,
                ok,
                num_rows,
                head_kv * G,
                stride_q,
                stride_qh,
                HQ,
                G,
                D,
                BLOCK_D,
                BF16,
            )
        for j0 in tl.range(0, t_last // BLOCK_SIZE + 1, BLOCK_J, num_stages=STAGES if KEEP else 1):
            if FACTOR > 0:
                kept = kept_next
                kept_next, place, block = kept_columns(
                    coarse_ptr,
                    list_row,
                    ok,
                    place,
                    block,
                    j0 + BLOCK_J,
                    jj,
                    BLOCK_Q,
                    BLOCK_J,
                    FACTOR,
                    NUM_COARSE,
                )
                wanted = tl.max(tl.max((kept | kept_next).to(tl.int32), 1), 0) > 0
                active = (
                    wanted
                    | (j0 < num_init)
                    | (j0 + BLOCK_J > t_first // BLOCK_SIZE + 1 - num_local)
                )
            else:
                active = True
            if active:
                key = j0 * R + tl.arange(0, R * BLOCK_J)
                key_row = first_key + key
                k = load_rows(
                    k_ptr + head_kv * stride_kh, key_row, key < num_keys, stride_k, D, BLOCK_D, True
                )
                if BF16:
                    k = k.to(tl.bfloat16)
                k_scale = 0.0
                if k_scale_ptr is not None:
                    k_scale = tl.load(
                        k_scale_ptr + key_row.to(tl.int64) * HKV + head_kv,
                        mask=key < num_keys,
                        other=0.0,
                    )
                p = tl.zeros([BLOCK_Q, R * BLOCK_J], tl.float32)
                if KEEP:
                    for h in tl.static_range(G):
                        p += probabilities(heads[h], k, k_scale, scale, q_scale_ptr is not None)
                else:
                    for h in tl.range(0, G, num_stages=STAGES):
                        head = load_head(
                            q_ptr, q_scale_ptr, lse_ptr, token, ok, num_rows, head_kv * G + h, stride_q, stride_qh, HQ, D,
                            BLOCK_D, BF16,
                        )  # fmt: skip
                        p += probabilities(head, k, k_scale, scale, q_scale_ptr is not None)
                p = tl.where(key[None, :] < visible[:, None], p, 0.0)
                score, carry = block_scores(p, carry, jj, BLOCK_Q, BLOCK_J, R, O)
                j = (j0 + jj)[None, :]
                forced = (j < num_init) | (j > current[:, None] - num_local)
                bits = tl.where(forced, INFINITE_BITS, score.to(tl.int32, bitcast=True)).to(
                    tl.int64
                )
                candidate = j <= current[:, None]
                if FACTOR > 0:
                    candidate = candidate & (kept | forced)
                ranked = tl.where(candidate, (bits << 32) | (j * -1 + LAST_ID).to(tl.int64), -1)
                chunk_best = tl.topk(ranked, BLOCK_N, dim=1)
                best = tl.bitonic_merge(
                    tl.maximum(best, tl.flip(chunk_best, 1)), dim=1, descending=True
                )
        column = tl.arange(0, BLOCK_N)[None, :]
        count = tl.full([BLOCK_Q], N, tl.int32)
        for i in tl.static_range(NUM_COUNTS - 1, -1, -1):
            count = tl.where(t < COUNTS[2 * i], COUNTS[2 * i + 1], count)
        chosen = (best >= 0) & (column < count[:, None])
        ids = tl.sort(
            tl.where(chosen, (best & LAST_ID) * -1 + LAST_ID, LAST_ID).to(tl.int32), dim=1
        )
        ids = tl.where(ids == LAST_ID, -1, ids)
        out_row = (token * HKV + head_kv) * N
        tl.store(out_ptr + out_row[:, None] + column, ids, mask=ok[:, None] & (column < N))
