"""Log-sum-exp of the products of queries with the tokens up to them."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._layout import block_of
from nsa.ops._sequences import Sequences
from nsa.ops._triton.kernel import Launch, kernel
from nsa.ops._triton.tiles import LN_2, LOG2_E, VARYING, find_tile, load_rows, sequence_rows


@triton.jit
def add_weights(s, row_max, total):
    """Add powers ``s [M, N]`` to a maximum and a sum ``[M]``, of which the maximum is finite."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    total = total * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(s - new_max[:, None]), 1)
    return new_max, total


@triton.jit
def add_tokens(s, key, ok, t, row_max, total, forced_blocks, BLOCK_SIZE: tl.constexpr):
    """Add the weights of tokens to the maximum and the sum ``[M]``.

    Args:
        s: scaled products ``[M, N]``, base 2.
        key: positions of the tokens, ``[N]``.
        ok: tokens that count.
        t: positions of the queries; later tokens do not count.
        row_max: maximum so far, finite.
        total: sum so far.
        forced_blocks: numbers of forced first and most recent blocks, whose tokens alone count;
            None means all blocks.
        BLOCK_SIZE: tokens of a block.
    """
    seen = key[None, :] <= t[:, None]
    if forced_blocks is not None:
        num_init, num_local = forced_blocks
        block = (key // BLOCK_SIZE)[None, :]
        forced = (block < num_init) | (block > (t // BLOCK_SIZE)[:, None] - num_local)
        seen = forced & seen
    return add_weights(tl.where(seen & ok[None, :], s, -float("inf")), row_max, total)


@kernel(do_not_specialize=VARYING)
def token_lse_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    cu_q_ptr,
    cu_k_ptr,
    len_q,
    len_k,
    num_sequences,
    num_rows,
    stride_q,
    stride_k,
    softmax_scale,
    num_init,
    num_local,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FORCED: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Write the log-sum-exp over the visible tokens, of forced blocks only if ``FORCED``.

    The output is fp32 ``[H, T]``, the natural logarithm if ``NATURAL``, else base 2. Program (i, h)
    handles the i-th tile of queries from the end, and query head h, which reads key head
    ``h // G``.
    """
    head = tl.program_id(1)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = find_tile(cu_q_ptr, number, num_sequences, len_q, QUERIES)
    if sequence < num_sequences:
        first_q, num_q = sequence_rows(cu_q_ptr, sequence, len_q)
        first_key, num_tokens = sequence_rows(cu_k_ptr, sequence, len_k)
        row = tile * QUERIES + tl.arange(0, QUERIES)
        ok = row < num_q
        t = num_tokens - num_q + row
        q_head = q_ptr + head * stride_q[1]
        q = load_rows(q_head, first_q + row, ok, stride_q[0], D, BLOCK_D)  # [QUERIES, BLOCK_D]
        k_head = k_ptr + head // G * stride_k[1]
        t_first = num_tokens - num_q + tile * QUERIES
        end = tl.minimum(t_first + QUERIES, num_tokens)
        init, local = 0, 0
        if FORCED:
            init = tl.minimum(num_init * BLOCK_SIZE, end)
            local = tl.maximum((t_first // BLOCK_SIZE + 1 - num_local) * BLOCK_SIZE, init)
        row_max = tl.full([QUERIES], -1e30, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        for part in tl.static_range(0 if FORCED else 1, 2):
            last = end if part else init
            for n in tl.range(local if part else 0, last, KEYS):
                key = n + tl.arange(0, KEYS)
                k = load_rows(k_head, first_key + key, key < last, stride_k[0], D, BLOCK_D)
                s = tl.dot(q, tl.trans(k), input_precision="ieee") * (softmax_scale * LOG2_E)
                blocks = (num_init, num_local) if FORCED else None
                row_max, total = add_tokens(
                    s, key, key < last, t, row_max, total, blocks, BLOCK_SIZE
                )
        lse = row_max + tl.log2(tl.where(ok, total, 1.0))
        at = head.to(tl.int64) * num_rows + first_q + row
        tl.store(lse_ptr + at, lse * LN_2 if NATURAL else lse, mask=ok)


def token_lse(
    q: Tensor,
    k: Tensor,
    softmax_scale: float,
    sequences: Sequences,
    config: NSAConfig,
    *,
    queries: int,
    keys: int,
    forced: bool,
    natural: bool,
    **options: Any,
) -> Launch:
    """Launch of the kernel on q ``[T, H, D]``, k ``[S, H / G, D]``, lse and integers.

    Args:
        q: queries.
        k: keys.
        softmax_scale: factor on the products.
        sequences: the sequences; their arguments and T follow lse.
        config: block size and forced blocks.
        queries: queries of a tile.
        keys: keys of a product.
        forced: whether only tokens of forced blocks count.
        natural: whether the logarithm is natural; otherwise base 2.
        options: launch options.
    """
    return Launch(
        token_lse_kernel,
        (sequences.num_tiles(q.shape[0], queries, sequences.len_q), q.shape[1]),
        stride_q=q.stride(),
        stride_k=k.stride(),
        softmax_scale=softmax_scale,
        num_init=config.num_init_blocks,
        num_local=config.num_local_blocks,
        G=q.shape[1] // k.shape[1],
        D=q.shape[2],
        BLOCK_D=block_of(q.shape[2]),
        BLOCK_SIZE=config.block_size,
        QUERIES=queries,
        KEYS=keys,
        FORCED=forced,
        NATURAL=natural,
        **options,
    )
