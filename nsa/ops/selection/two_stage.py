"""Pieces of ``approximate.py``: only blocks inside the coarse blocks that a query kept are scored.

The first stage is ``select_kernel`` over the mean keys of coarse blocks. The second visits the
steps in which some query of the tile kept a coarse block, and each step before such a one, whose
last key reaches into it.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

import triton
import triton.language as tl

from nsa.ops.selection.kernels import LAST_ID


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
    """Mask of the blocks ``j0 .. j0 + BLOCK_J`` that are in a coarse block that the query kept.

    Args:
        coarse_ptr: ascending list of each query ``[BLOCK_Q]``, ``NUM_COARSE`` coarse blocks long.
        ok: whether there is such a query.
        place: where each query is in its list.
        block: the coarse block there.
        j0: the first block.
        BLOCK_J: blocks of a step.
        FACTOR: blocks of a coarse block.
        NUM_COARSE: coarse blocks that a query kept.

    Returns:
        ``[BLOCK_Q, BLOCK_J]``; place and block, which move on as j0 does.
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
