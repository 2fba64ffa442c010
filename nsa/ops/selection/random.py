"""Selection of blocks at random, a control for experiments: no queries and keys are read."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,assignment"

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.tiles import VARYING, find_tile
from nsa.ops.selection.kernels import merge_scores, query_block, start_ranking, store_selection


@triton.jit
def random_scores(t, head_kv, block, HKV: tl.constexpr):
    """Scores ``[BLOCK_Q, BLOCK_J]`` of ``random_scores`` in reference.py."""
    position = t.to(tl.int64) * HKV + head_kv
    mixed = (position << 24)[:, None] + block[None, :]
    mixed = (mixed ^ ((mixed >> 33) & 0x7FFFFFFF)) * -0xAE502812AA7333
    mixed = (mixed ^ ((mixed >> 33) & 0x7FFFFFFF)) * -0x3B314601E57A13AD
    return ((mixed >> 40) & 0xFFFFFF).to(tl.float32) / 2**24


@kernel(do_not_specialize=VARYING)
def select_random_kernel(
    out_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_init,
    num_local,
    HKV: tl.constexpr,
    SCORING: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Write the selected blocks, int32 ``[T, Hkv, n]``.

    Program (i, h) handles the i-th tile of queries from the end and KV head h, in a loop over the
    selection blocks, ``BLOCK_J`` at a time.
    """
    head_kv = tl.program_id(1)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, BLOCK_Q)
    if sequence < num_sequences:
        queries = query_block(
            cu_q_ptr, cu_k_ptr, cu_k_ptr, len_q, len_k, len_k, sequence, tile, SCORING, BLOCK_Q
        )
        jj = tl.arange(0, BLOCK_J)
        _, best = start_ranking(BLOCK_Q, SCORING)
        for j0 in tl.range(0, queries.t_last // SCORING.BLOCK_SIZE + 1, BLOCK_J):
            score = random_scores(queries.t, head_kv, j0 + jj, HKV)
            best = merge_scores(score, best, queries, j0, jj, None, num_init, num_local, SCORING)
        where = (head_kv, num_init, num_local)
        store_selection(out_ptr, best, queries, where, HKV, SCORING, COUNTS)
