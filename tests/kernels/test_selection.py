"""Kernel of scores and choice, fp32 in the interpreter, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa import NSAConfig, compress, compressed_attention, select_blocks
from nsa.ops._operator import Call, KeyRange
from nsa.ops._sequences import Sequences
from nsa.ops._triton.tuning import Tile, tiles_chosen_by
from nsa.ops.selection.launch import Selection, select_blocks_forward
from nsa.ops.selection.ops import new_selection
from nsa.testing import make_inputs
from tests.ops.cases import small

SMALL = (8, 4, 16, 4)


def config_of(
    pattern: tuple[int, int, int, int], group: int, init: int = 1, local: int = 2
) -> NSAConfig:
    size, stride, block, n = pattern
    sizes = {"compress_block_size": size, "compress_stride": stride, "block_size": block}
    counts = {"num_selected_blocks": n, "num_init_blocks": init, "num_local_blocks": local}
    return small(num_heads=group, num_kv_heads=1, value_dim=16, **sizes, **counts)


def compare(
    config: NSAConfig,
    lengths_k: list[int],
    lengths_q: list[int] | None = None,
    q_scale: float = 1.0,
    keep_queries: bool = False,
    rows: int = 16,
) -> None:
    """The kernel chooses as the reference does, from the same fp32 keys and lse."""
    x = make_inputs(config, lengths_k, lengths_q, dtype=torch.float32)
    offsets: Any = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
    q = x.q * q_scale
    k_cmp, _ = compress(x.k_cmp_raw, None, config, x.cu_seqlens_k)
    _, lse = compressed_attention(q, k_cmp, None, config, **offsets)
    longest = (max(lengths_q or lengths_k), max(lengths_k))
    cu_seqlens = (x.cu_seqlens_q, x.cu_seqlens_k)
    sequences = Sequences(cu_seqlens, len(lengths_k), *longest, q.device)
    scale = config.head_dim**-0.5
    keys = KeyRange.of_blocks(Call(config, sequences, scale))
    tile = Tile(rows, 4, 4, 1, keep_queries=keep_queries)
    found = new_selection(q, k_cmp, config.num_selected_blocks)
    with tiles_chosen_by(lambda *_: tile):
        given = (q, k_cmp, lse.t().contiguous(), found, keys, scale)
        select_blocks_forward(*given, Selection.of(config))
    assert torch.equal(found, select_blocks(q, k_cmp, lse, config, **offsets))


@pytest.mark.parametrize("keep_queries", [False, True])
def test_packed_sequences(keep_queries):
    compare(config_of(SMALL, 3), [200, 1, 0, 77], keep_queries=keep_queries)


def test_fewer_queries_than_keys():
    compare(config_of(SMALL, 6), [300, 64], [20, 64])


def test_more_blocks_than_a_step_of_the_tile():
    compare(config_of((8, 4, 16, 16), 2), [330, 40], rows=64)


def test_ties_go_to_the_lower_block():
    """With q = 0 all compressed keys weigh the same: inner blocks tie exactly, wherever they lie in
    a step.
    """
    compare(config_of(SMALL, 2), [300], q_scale=0.0)


@pytest.mark.parametrize(("init", "local"), [(0, 1), (2, 2), (1, 3)])
def test_forced_blocks(init, local):
    compare(config_of(SMALL, 2, init, local), [260])


@pytest.mark.parametrize(
    "pattern", [(16, 16, 64, 4), (16, 4, 16, 5), (12, 4, 16, 3), (8, 8, 16, 8), (4, 4, 16, 3)]
)
def test_stencils(pattern):
    """Overlaps of every kind: none, half, whole blocks; n that is no power of two."""
    compare(config_of(pattern, 1), [330])
