"""What the programs that share the keys of a branch leave, and how it is brought together."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

from nsa.ops._triton.tiles import LOG2_E


@triton.jit
def store_partial(out_ptr, lse_ptr, at, ok, out, lse, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Write a program's share of a branch: out ``[M, BLOCK_DV]`` and lse ``[M]`` at rows ``at``."""
    tl.store(lse_ptr + at, lse, mask=ok)
    d = tl.arange(0, BLOCK_DV)
    tl.store(out_ptr + at[:, None] * DV + d[None, :], out, mask=ok[:, None] & (d < DV)[None, :])


@triton.jit
def load_gate(gates_ptr, place, ok, BRANCH: tl.constexpr):
    """Gates ``[M]`` of a branch for query heads at ``place`` among all."""
    return tl.load(gates_ptr + place * 3 + BRANCH, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def gated_branch(
    shares,
    rows,
    before,
    BRANCH: tl.constexpr,
    NUM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Output ``[M, BLOCK_DV]`` of a branch, times its gates.

    It has ``NUM`` shares, the first of them ``before`` behind the group's first.
    """
    out_ptr, lse_ptr, first = shares
    gates_ptr, place, row, ok = rows
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    d = tl.arange(0, BLOCK_DV)
    largest = tl.full(row.shape, -1e30, tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    acc = tl.zeros([row.shape[0], BLOCK_DV], tl.float32)
    for s0 in tl.range(0, NUM, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        at = (first + before + s).to(tl.int64)[:, None] * ROWS + row[None, :]  # [BLOCK_S, M]
        mask = (s < NUM)[:, None] & ok[None, :]
        lse = tl.load(lse_ptr + at, mask=mask, other=-float("inf"), cache_modifier=".cg") * LOG2_E
        x = tl.load(
            out_ptr + at[:, :, None] * HEADS.DV + d[None, None, :],
            mask=mask[:, :, None] & (d < HEADS.DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        weight = tl.exp2(lse - new_largest[None, :])
        scale = tl.exp2(largest - new_largest)
        acc = acc * scale[:, None] + tl.sum(x * weight[:, :, None], 0)
        total = total * scale + tl.sum(weight, 0)
        largest = new_largest
    gate = load_gate(gates_ptr, place, ok, BRANCH)
    return acc * (gate / tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def gated_sum(
    shares,
    rows,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CMP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Gated sum ``[M, BLOCK_DV]`` of the compressed branch and the window."""
    ROWS: tl.constexpr = P.QUERIES * P.G
    _, _, row, _ = rows
    BLOCK_DV: tl.constexpr = HEADS.BLOCK_DV
    out = tl.zeros([row.shape[0], BLOCK_DV], tl.float32)
    if SPLITS.cmp * HAS_CMP > 0:
        out += gated_branch(shares, rows, 0, 0, SPLITS.cmp, ROWS, HEADS, BLOCK_S)
    if SPLITS.win > 0:
        out += gated_branch(shares, rows, SPLITS.cmp, 2, SPLITS.win, ROWS, HEADS, BLOCK_S)
    return out
