"""Low precision and head layouts: forward and gradients within twice the error of the same maths in the tested dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, compressed_attention, selected_attention, window_attention
from nsa.testing import assert_within_budget
from tests import oracle
from tests.ops.cases import Batch, array, grad, leaf, make_batch, mask_of, plain_attention, small

LENGTH = 130
BRANCHES = ("cmp", "slc", "win")
LOW = (torch.float32, torch.float16, torch.bfloat16)


def visible_keys(branch: str, batch: Batch, ids: Tensor) -> oracle.Visible:
    num_rows, num_keys, config = batch.lengths_q[0], batch.lengths_k[0], batch.config
    if branch == "cmp":
        return oracle.visible_cmp(
            num_rows, num_keys, config.compress_block_size, config.compress_stride
        )
    if branch == "slc":
        return oracle.visible_slc(num_rows, num_keys, ids.numpy(), config.block_size)
    return oracle.visible_win(num_rows, num_keys, config.window_size)


def run(branch: str, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, config: NSAConfig) -> Tensor:
    out: Any
    if branch == "cmp":
        out, _ = compressed_attention(q, k, v, config)
    elif branch == "slc":
        out, _ = selected_attention(q, k, v, ids, config)
    else:
        out, _ = window_attention(q, k, v, config)
    return out


def compare(branch: str, config: NSAConfig, dtype: torch.dtype) -> None:
    """Output, dQ, dK and dV of one branch against oracle and baseline."""
    batch = make_batch(config, (LENGTH,))
    ids = batch.block_indices()
    num_keys = batch.num_cmp[0] if branch == "cmp" else LENGTH
    q, k, v = (
        batch.q(1.0),
        *(
            batch.normal(num_keys, config.num_kv_heads, size)
            for size in (config.head_dim, config.value_dim)
        ),
    )
    d_out = batch.normal(LENGTH, config.num_heads, config.value_dim).to(dtype)
    visible = visible_keys(branch, batch, ids)
    scale = config.head_dim**-0.5

    leaves = leaf(q, dtype), leaf(k, dtype), leaf(v, dtype)
    out = run(branch, *leaves, ids, config)
    assert out.dtype == dtype
    out.backward(d_out)
    plain_leaves = leaf(q, dtype), leaf(k, dtype), leaf(v, dtype)
    plain = plain_attention(
        *plain_leaves, mask_of(visible, LENGTH, config.num_kv_heads, num_keys), scale
    )
    plain.backward(d_out)
    rounded = array(leaves[0]), array(leaves[1]), array(leaves[2])
    exact, _ = oracle.attention(*rounded, visible)
    gradients = oracle.attention_backward(array(d_out), *rounded, visible)

    assert_within_budget(out.detach(), plain.detach(), torch.from_numpy(exact), f"{branch} out")
    for name, x, baseline, wanted in zip(
        ("dq", "dk", "dv"), leaves, plain_leaves, gradients, strict=True
    ):
        assert grad(x).dtype == dtype
        assert_within_budget(grad(x), grad(baseline), torch.from_numpy(wanted), f"{branch} {name}")


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("branch", BRANCHES)
def test_group_sizes(branch, group):
    compare(branch, small(num_heads=group, num_kv_heads=1), torch.float32)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("branch", BRANCHES)
def test_dtypes(branch, dtype):
    compare(branch, small(num_heads=6, num_kv_heads=2), dtype)


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(32, 32), (64, 64), (128, 128), (192, 128), (16, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("branch", BRANCHES)
def test_head_sizes(branch, dim, value_dim, dtype):
    compare(branch, small(num_heads=2, num_kv_heads=1, head_dim=dim, value_dim=value_dim), dtype)


@pytest.mark.parametrize("branch", BRANCHES)
def test_largest_group(branch):
    compare(branch, small(num_heads=64, num_kv_heads=1), torch.float16)


@pytest.mark.parametrize("branch", BRANCHES)
def test_large_scores_in_low_precision(branch):
    """Scores of about 100: softmax without its maximum would overflow."""
    config = small(num_heads=2, num_kv_heads=1)
    batch = make_batch(config, (LENGTH,))
    ids = batch.block_indices()
    num_keys = batch.num_cmp[0] if branch == "cmp" else LENGTH
    q, k, v = (
        batch.q(100.0).half(),
        batch.normal(num_keys, 1, 16).half(),
        batch.normal(num_keys, 1, 32).half(),
    )
    exact, _ = oracle.attention(array(q), array(k), array(v), visible_keys(branch, batch, ids))
    out = run(branch, q, k, v, ids, config)
    assert bool(out.isfinite().all())
    assert float(np.linalg.norm(array(out) - exact) / np.linalg.norm(exact)) < 2e-3
