"""Long calls without gradients on a CPU, in chunks of queries, against the reference at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nsa
from nsa.ops import _chunks
from nsa.ops.selection import reference as selection
from nsa.testing import make_inputs
from tests.ops.cases import small
from tests.ops.public import cu, named_tensors

PATTERN: dict[str, Any] = {
    "compress_block_size": 16,
    "compress_stride": 8,
    "block_size": 32,
    "num_selected_blocks": 6,
    "window_size": 48,
}
LENGTHS = {  # of keys, of queries
    "packed": ((3, 97, 0, 333, 267), None),
    "more keys": ((450, 550), (300, 400)),
    "few queries": ((450, 0, 550), (1, 0, 3)),
}


def inputs_of(lengths_k=(700,), lengths_q=None, **changes):
    config = small(**PATTERN | changes)
    x = make_inputs(config, lengths_k, lengths_q, dtype=torch.float64)
    return {**named_tensors(x), **cu(x), "phi": None, "config": config}


@pytest.mark.parametrize("lengths", LENGTHS)
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
def test_chunks_equal_the_reference(monkeypatch, changes, lengths):
    given = inputs_of(*LENGTHS[lengths], **changes)
    expected = nsa.native_sparse_attention(**given)
    monkeypatch.setattr(_chunks, "_LONG", 1)
    monkeypatch.setattr(_chunks, "_MANY_KEYS", 1)
    monkeypatch.setattr(selection, "_KEYS", 64)
    found = nsa.native_sparse_attention(**given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_any_layout_of_the_inputs(monkeypatch):
    """Heads before tokens in memory, as other attention layers have them."""
    given = inputs_of(scores="token_max")
    expected = nsa.native_sparse_attention(**given)
    moved = {
        name: x.transpose(0, 1).contiguous().transpose(0, 1)
        for name, x in given.items()
        if name[0] in "qkv"
    }
    monkeypatch.setattr(_chunks, "_LONG", 1)
    found = nsa.native_sparse_attention(**given | moved)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_gradients_need_the_whole_call(monkeypatch):
    monkeypatch.setattr(_chunks, "_LONG", 1)
    given = inputs_of()
    q = given["q"].requires_grad_()
    nsa.native_sparse_attention(**given).sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


def test_memory_is_linear():
    """Scores of 131,072 queries and keys would take 64 GiB."""
    config = small(num_heads=1, num_kv_heads=1)
    q, v = torch.zeros(131072, 1, 16), torch.zeros(131072, 1, 32)
    with torch.inference_mode():
        out, _ = nsa.window_attention(q, q, v, config)
    assert out.shape == (131072, 1, 32)
