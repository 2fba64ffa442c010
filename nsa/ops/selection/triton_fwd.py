"""Scores of selection blocks and the choice of the best n, in one pass: no buffer over queries by keys or blocks.

A program takes BLOCK_Q queries of one group and walks over the selection blocks, BLOCK_J at a time. The heads are visited one
after the other and their probabilities added into one tile over the compressed keys of these blocks, so the sum over the group
(Eq. 10) costs nothing and G needs no padding. The stencil of Eq. 9 is applied once to the sum: a compression block gives
``min(O, R - m)`` of its overlap to the selection block that it starts in and ``max(m + O - R, 0)`` to the next one, where
``O = l / d``, ``R = l' / d`` and m is its place in the block. The best n so far are kept sorted as int64 keys, score above
inverted id, so that ties go to the lower id; a chunk's best are found by a bitonic top-k and merged.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops._triton.range_launch import RangeLayout, block_of
from nsa.ops._triton.tiles import LOG2_E, find_tile, load_rows, sequence_rows
from nsa.ops._triton.tuning import Tile

LAST_ID = tl.constexpr(0x7FFFFFFF)
INFINITE_BITS = tl.constexpr(0x7F800000)


@triton.jit
def group_probabilities(
    q_ptr, lse_ptr, k, token, ok, head_first, stride_q, stride_qh, scale,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Probabilities of the compressed keys k ``[BLOCK_C, BLOCK_D]``, summed over the group: ``[BLOCK_Q, BLOCK_C]`` fp32."""
    total = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)
    for h in tl.range(0, G, num_stages=STAGES):
        head = head_first + h
        q = load_rows(q_ptr, token * stride_q + head * stride_qh, ok, 1, D, BLOCK_D, True)
        lse = tl.load(lse_ptr + token * HQ + head, mask=ok, other=float("inf")) * LOG2_E
        total += tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
    return total


@triton.jit
def select_kernel(
    q_ptr, k_ptr, lse_ptr, out_ptr, cu_q_ptr, cu_k_ptr, cu_key_ptr, len_q, len_k, len_key, num_sequences,
    stride_q, stride_qh, stride_k, stride_kh, softmax_scale, num_init, num_local,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The chosen blocks of one tile of queries of one group."""
    R: tl.constexpr = BLOCK_SIZE // STRIDE
    O: tl.constexpr = L // STRIDE
    head_kv = tl.program_id(1)
    sequence, tile = find_tile(cu_q_ptr, tl.num_programs(0) - 1 - tl.program_id(0), num_sequences, len_q, BLOCK_Q)
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
        place = tl.arange(0, R)
        weight_here = tl.minimum(O, R - place).to(tl.float32)[None, None, :]
        weight_next = tl.maximum(place + O - R, 0).to(tl.float32)[None, None, :]
        before = tl.broadcast_to(tl.maximum(jj - 1, 0)[None, :], (BLOCK_Q, BLOCK_J))
        carry = tl.zeros([BLOCK_Q], tl.float32)
        best = tl.full([BLOCK_Q, BLOCK_N], -1, tl.int64)
        t_last = num_tokens - num_q + tl.minimum(tile * BLOCK_Q + BLOCK_Q, num_q) - 1
        for j0 in tl.range(0, t_last // BLOCK_SIZE + 1, BLOCK_J, num_stages=1):
            key = j0 * R + tl.arange(0, R * BLOCK_J)
            k = load_rows(k_ptr + head_kv * stride_kh, first_key + key, key < num_keys, stride_k, D, BLOCK_D, True)
            p = group_probabilities(
                q_ptr, lse_ptr, k, token, ok, head_kv * G, stride_q, stride_qh, scale, HQ, G, D, BLOCK_Q, R * BLOCK_J, BLOCK_D,
                STAGES,
            )  # fmt: skip
            p = tl.where(key[None, :] < visible[:, None], p, 0.0).reshape(BLOCK_Q, BLOCK_J, R)
            score = tl.sum(p * weight_here, 2)
            if O > 1:
                to_next = tl.sum(p * weight_next, 2)
                shifted = tl.gather(to_next, before, 1)
                score += tl.where((jj == 0)[None, :], carry[:, None], shifted)
                carry = tl.sum(tl.where((jj == BLOCK_J - 1)[None, :], to_next, 0.0), 1)
            j = (j0 + jj)[None, :]
            forced = (j < num_init) | (j > current[:, None] - num_local)
            bits = tl.where(forced, INFINITE_BITS, score.to(tl.int32, bitcast=True)).to(tl.int64)
            ranked = tl.where(j <= current[:, None], (bits << 32) | (j * -1 + LAST_ID).to(tl.int64), -1)
            chunk_best = tl.topk(ranked, BLOCK_N, dim=1)
            best = tl.bitonic_merge(tl.maximum(best, tl.flip(chunk_best, 1)), dim=1, descending=True)
        column = tl.arange(0, BLOCK_N)[None, :]
        chosen = (best >= 0) & (column < N)
        ids = tl.sort(tl.where(chosen, (best & LAST_ID) * -1 + LAST_ID, LAST_ID).to(tl.int32), dim=1)
        ids = tl.where(ids == LAST_ID, -1, ids)
        out_row = (token * (HQ // G) + head_kv) * N
        tl.store(out_ptr + out_row[:, None] + column, ids, mask=ok[:, None] & (column < N))


def select_blocks_forward(
    q: Tensor, k_cmp: Tensor, lse: Tensor, layout: RangeLayout, softmax_scale: float, block_size: int, n: int, num_init: int,
    num_local: int, tile: Tile,
) -> Tensor:  # fmt: skip
    """int32 ``[T, Hkv, n]``; see :func:`nsa.select_blocks`. ``tile.rows`` are queries, ``tile.keys`` blocks of a step."""
    num_q, num_heads, head_dim = q.shape
    num_kv_heads = k_cmp.shape[1]
    out = torch.empty(num_q, num_kv_heads, n, dtype=torch.int32, device=q.device)
    width = triton.next_power_of_2(n)
    grid = (layout.num_tiles(num_q, tile.rows, layout.len_q), num_kv_heads)
    if num_q:
        select_kernel[grid](
            q, k_cmp, lse, out, *layout.arguments(), q.stride(0), q.stride(1), k_cmp.stride(0), k_cmp.stride(1), softmax_scale,
            num_init, num_local, HQ=num_heads, G=num_heads // num_kv_heads, D=head_dim, N=n, L=layout.size,
            STRIDE=layout.stride, BLOCK_SIZE=block_size, BLOCK_Q=tile.rows, BLOCK_J=max(tile.keys, width), BLOCK_N=width,
            BLOCK_D=block_of(head_dim), STAGES=tile.stages, **tile.launch_options(),
        )  # fmt: skip
    return out
