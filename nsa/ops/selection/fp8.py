"""Functions for ``approximate.py``: queries and compressed keys in e4m3 with one scale per row.

Scales are fp32, ``[T, Hq]`` for queries and ``[C, Hkv]`` for keys; None disables them.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

import triton
import triton.language as tl

from nsa.ops.selection.kernels import load_head


@triton.jit
def load_scaled_head(
    q_ptr, q_scale_ptr, lse_ptr, queries, num_rows, head, stride_q, HEADS: tl.constexpr
):
    """``load_head``, plus the query scales ``[BLOCK_Q]`` (an unused copy of lse without scales)."""
    q, lse = load_head(q_ptr, lse_ptr, queries, num_rows, head, stride_q, HEADS)
    q_scale = lse
    if q_scale_ptr is not None:
        pointers = q_scale_ptr + queries.token * HEADS.HQ + head
        q_scale = tl.load(pointers, mask=queries.ok, other=0.0)
    return q, lse, q_scale


@triton.jit
def load_key_scales(k_scale_ptr, queries, key, head_kv, HKV: tl.constexpr):
    """Scales ``[BLOCK_C]`` of compressed keys (0 without scales, unused)."""
    k_scale = 0.0
    if k_scale_ptr is not None:
        pointers = k_scale_ptr + (queries.first_key + key).to(tl.int64) * HKV + head_kv
        k_scale = tl.load(pointers, mask=key < queries.num_keys, other=0.0)
    return k_scale


@triton.jit
def scaled_probabilities(head, k, k_scale, scale, SCALED: tl.constexpr):
    """Probabilities ``[BLOCK_Q, BLOCK_C]`` fp32 of one head from ``load_scaled_head``."""
    q, lse, q_scale = head
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SCALED:
        s = s * q_scale[:, None] * k_scale[None, :]
    return tl.exp2(s * scale - lse[:, None])
