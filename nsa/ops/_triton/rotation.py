"""Rotation of columns in kernels (RoPE, half-split layout)."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def partner_column(d, ROTARY: tl.constexpr):
    """Column that a rotation mixes with column d; d itself where nothing is rotated."""
    HALF: tl.constexpr = ROTARY // 2
    return tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))


@triton.jit
def cos_sin(angle):
    """Cosine and sine of fp32 angles to 10^8 radians, within 1e-7.

    ``tl.cos`` and ``tl.sin`` are as exact, but they reduce large angles through an array in local
    memory.
    """
    quarters = angle.to(tl.float64) * 0.6366197723675814  # 2 / pi
    nearest = tl.floor(quarters + 0.5)
    quadrant = nearest.to(tl.int32)
    x = ((quarters - nearest) * 1.5707963267948966).to(tl.float32)  # -pi / 4 .. pi / 4
    square = x * x
    # Polynomials of Cephes' sinf and cosf (Moshier, 1989).
    sine = x + x * square * (
        -1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4)
    )
    cosine = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
    cosine = 1.0 - 0.5 * square + square * square * cosine
    swapped = (quadrant & 1) != 0
    first, second = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    return tl.where(((quadrant + 1) & 2) != 0, -first, first), tl.where(
        (quadrant & 2) != 0, -second, second
    )


@triton.jit
def rotation(frequency_ptr, position, d, magnitude, ROTARY: tl.constexpr):
    """Factors of columns and of their partners, ``[N, BLOCK_D]`` fp32 each.

    A rotated column is ``x * same + partner * other``.
    """
    HALF: tl.constexpr = ROTARY // 2
    frequency = tl.load(frequency_ptr + tl.where(d < HALF, d, d - HALF), mask=d < ROTARY, other=0.0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    rotated = (d < ROTARY)[None, :]
    sign = tl.where(d < HALF, -1.0, 1.0)[None, :]
    cosine, sine = cos_sin(angle)
    same = tl.where(rotated, cosine * magnitude, 1.0)
    other = tl.where(rotated, sine * sign * magnitude, 0.0)
    return same, other
