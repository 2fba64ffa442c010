"""Selection in two stages: only blocks inside each query's kept coarse blocks are scored.

The first stage is ``select_kernel`` over the mean keys of coarse blocks. The second visits the
steps in which any query of the tile kept a coarse block, and the step before each, because its last
key overlaps the next step.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl

LAST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def kept_columns(
    coarse_ptr,
    ok,
    place,
    block,
    j0,
    BLOCK_J: tl.constexpr,
    FACTOR: tl.constexpr,
    NUM_COARSE: tl.constexpr,
):
    """Mask of the blocks ``j0 .. j0 + BLOCK_J`` that are inside a coarse block kept by the query.

    Args:
        coarse_ptr: sorted list of each query ``[BLOCK_Q]``, of ``NUM_COARSE`` coarse blocks.
        ok: whether the query exists.
        place: current index of each query in its list.
        block: the coarse block at that index.
        j0: the first block.
        BLOCK_J: blocks per step.
        FACTOR: blocks per coarse block.
        NUM_COARSE: coarse blocks kept per query.

    Returns:
        ``[BLOCK_Q, BLOCK_J]``, and the advanced place and block.
    """
    jj = tl.arange(0, BLOCK_J)
    kept = tl.zeros([ok.shape[0], BLOCK_J], tl.int1)
    for u in tl.static_range(0, (BLOCK_J + FACTOR - 1) // FACTOR):
        coarse = (j0 + u * FACTOR) // FACTOR
        behind = (block < coarse) & (place < NUM_COARSE)
        place += behind.to(tl.int32)
        fresh = tl.load(coarse_ptr + place, mask=ok & (place < NUM_COARSE), other=LAST_ID)
        block = tl.where(fresh < 0, LAST_ID, fresh)
        kept = kept | ((block == coarse)[:, None] & ((j0 + jj) // FACTOR == coarse)[None, :])
    return kept, place, block
