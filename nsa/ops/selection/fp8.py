"""Selection by fp8 scores: queries and compressed keys in e4m3 with one scale per row.

Scales are fp32, ``[T, Hq]`` for queries and ``[C, Hkv]`` for keys; None disables them.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def load_scales(scale_ptr, row, ok, head, HEADS: tl.constexpr):
    """Scales ``[N]`` of rows of one of ``HEADS`` heads; an unused 0 without scales."""
    if scale_ptr is None:
        return 0.0
    else:
        return tl.load(scale_ptr + row.to(tl.int64) * HEADS + head, mask=ok, other=0.0)


@triton.jit
def apply_scales(s, q_scale, k_scale, SCALED: tl.constexpr):
    """Scores ``[BLOCK_Q, BLOCK_C]`` of scaled queries and keys."""
    return s * q_scale[:, None] * k_scale[None, :] if SCALED else s
