"""Long calls without gradients on a CPU, in chunks of queries, against the reference at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nsa
from nsa.ops import _chunks
from nsa.ops.selection import reference as selection

PATTERN: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "value_dim": 32,
    "compress_block_size": 16,
    "compress_stride": 8,
    "block_size": 32,
    "num_selected_blocks": 6,
    "window_size": 48,
    "phi": "mean",
}
OFFSETS = {  # of queries, of keys, number of keys
    "packed": ([0, 3, 100, 100, 433, 700], None, 700),
    "more keys": ([0, 300, 700], [0, 450, 1000], 1000),
}


def inputs_of(config, num_keys):
    generator = torch.Generator().manual_seed(0)

    def normal(tokens, heads, size):
        return torch.randn(tokens, heads, size, generator=generator, dtype=torch.float64)

    sizes = (config.head_dim, config.value_dim) * 3
    q = normal(700, config.num_heads, config.head_dim)
    keys = [normal(num_keys, config.num_kv_heads, size) for size in sizes]
    gates = torch.rand(700, config.num_heads, 3, generator=generator, dtype=torch.float64)
    index = {}
    if config.has_index:
        heads = config.scoring
        index["q_idx"] = normal(700, heads.num_heads, heads.head_dim)
        index["k_idx"] = normal(num_keys, heads.num_kv_heads, heads.head_dim)
    return (q, *keys, gates, None, config), index


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"branches": ("cmp", "win")},
        {"coarse_block_size": 128, "num_coarse_blocks": 5},
        {"scores": "random", "branches": ("slc", "win")},
        {"scores": "token_max", "branches": ("slc", "win")},
        {"scores": "token_max", "score_precision": "fp8"},
        {"scores": "token_max", "num_init_blocks": 0, "num_local_blocks": 1},
        {"scores": "token_max", "num_selected_blocks_table": ((-1, 300, 4), (-1, 500, 5))},
        {"scores": "index", "index_dim": 16, "index_heads": 2},
        {"scores": "index", "index_dim": 16, "index_keys": "shared"},
    ],
    ids=str,
)
def test_chunks_equal_the_reference(monkeypatch, changes, offsets):
    config = nsa.NSAConfig(**PATTERN | changes)
    cu_q, cu_k, num_keys = OFFSETS[offsets]
    given, index = inputs_of(config, num_keys)
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        index[name] = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    expected = nsa.native_sparse_attention(*given, **index)
    monkeypatch.setattr(_chunks, "_LONG", 1)
    monkeypatch.setattr(selection, "_KEYS", 64)
    found = nsa.native_sparse_attention(*given, **index)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_any_layout_of_the_inputs(monkeypatch):
    """Heads before tokens in memory, as other attention layers have them."""
    config = nsa.NSAConfig(**PATTERN | {"scores": "token_max"})
    given, _ = inputs_of(config, 700)
    expected = nsa.native_sparse_attention(*given)
    moved = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given[:7]]
    monkeypatch.setattr(_chunks, "_LONG", 1)
    found = nsa.native_sparse_attention(*moved, *given[7:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_gradients_need_the_whole_call(monkeypatch):
    monkeypatch.setattr(_chunks, "_LONG", 1)
    given, _ = inputs_of(nsa.NSAConfig(**PATTERN), 700)
    q = given[0].requires_grad_()
    nsa.native_sparse_attention(*given).sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


def test_memory_is_linear():
    """Scores of 262,144 queries and keys would take 256 GiB."""
    config = nsa.NSAConfig(**PATTERN | {"num_heads": 1, "num_kv_heads": 1})
    q, v = torch.zeros(262144, 1, 16), torch.zeros(262144, 1, 32)
    with torch.inference_mode():
        out, _ = nsa.window_attention(q, q, v, config)
    assert out.shape == (262144, 1, 32)
