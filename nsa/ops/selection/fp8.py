"""Selection by fp8 scores: queries and keys in e4m3 with one fp32 scale per row.

Scales that kernels load are ``[T, Hq]`` for queries and ``[C, Hkv]`` for keys; None disables them.
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


@triton.jit
def round_rows(x, SIZE: tl.constexpr):
    """Round ``x [N, D]`` to e4m3; return it in its dtype, and its scales ``[N]``.

    ``SIZE`` rows share a scale. Equals the conversion of PyTorch, ties to even: three bits of the
    mantissa are kept, below 2^-6 multiples of 2^-9.
    """
    N: tl.constexpr = x.shape[0]
    wide = x.to(tl.float32)
    of_group = tl.max(tl.reshape(tl.max(tl.abs(wide), 1), [N // SIZE, SIZE]), 1)
    scale = tl.div_rn(of_group, tl.full([N // SIZE], 448.0, tl.float32))
    scale = tl.where(scale > 0, scale, 1.0)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], [N // SIZE, SIZE]), [N])
    y = tl.div_rn(wide, tl.broadcast_to(scale[:, None], wide.shape))
    bits = y.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (y + 1.5 * 2.0**14) - 1.5 * 2.0**14
    low = tl.where(tl.abs(y) < 2.0**-6, small, bits.to(tl.float32, bitcast=True))
    return low.to(x.dtype), scale
