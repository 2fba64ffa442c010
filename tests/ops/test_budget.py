"""The error budget itself: it lets rounding pass and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa.testing import assert_within_budget, measure
from tests import oracle
from tests.ops.cases import array, make_batch, mask_of, plain_attention, small

LOW = (torch.float32, torch.float16, torch.bfloat16)
LENGTH, WINDOW = 257, 32


def attention(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and mask of a window, the fp64 oracle and the plain baseline in ``dtype``."""
    batch = make_batch(small(), (LENGTH,))
    q, k, v = (x.to(dtype) for x in (batch.q(), batch.k(), batch.v()))
    visible = oracle.visible_win(LENGTH, LENGTH, WINDOW)
    exact, _ = oracle.attention(array(q), array(k), array(v), visible)
    mask = mask_of(visible, LENGTH, 2, LENGTH)
    return q, k, v, mask, torch.from_numpy(exact), plain_attention(q, k, v, mask, 0.25)


@pytest.mark.parametrize("dtype", LOW)
def test_rounding_passes(dtype):
    q, k, v, mask, exact, baseline = attention(dtype)
    assert_within_budget(exact.to(dtype), baseline, exact, "rounded oracle")
    assert_within_budget(baseline, baseline, exact, "baseline")
    better = plain_attention(q.float(), k.float(), v.float(), mask, 0.25).to(dtype)
    assert_within_budget(better, baseline, exact, "fp32 arithmetic")


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("scale", [0.26, 0.24, 1.0, 1 / 16])
def test_wrong_scale_fails(dtype, scale):
    q, k, v, mask, exact, baseline = attention(dtype)
    with pytest.raises(AssertionError, match="scale: error"):
        assert_within_budget(plain_attention(q, k, v, mask, scale), baseline, exact, "scale")


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rows", [LENGTH, 1])
def test_dropped_block_fails(dtype, rows):
    """A block of 16 tokens is missing, for every query or for the last one alone."""
    q, k, v, mask, exact, baseline = attention(dtype)
    dropped = mask.clone()
    dropped[-rows:, :, 228:244] = False
    with pytest.raises(AssertionError, match="dropped: error"):
        assert_within_budget(plain_attention(q, k, v, dropped, 0.25), baseline, exact, "dropped")


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("edge", ["future", "own", "window too long", "window too short"])
def test_mask_off_by_one_fails(dtype, edge):
    q, k, v, mask, exact, baseline = attention(dtype)
    t, s = torch.arange(LENGTH)[:, None, None], torch.arange(LENGTH)
    wrong = {
        "future": mask | (s == t + 1),
        "own": mask & ((s != t) | (t == 0)),
        "window too long": mask | (s == t - WINDOW),
        "window too short": mask & (s != t - WINDOW + 1),
    }[edge]
    with pytest.raises(AssertionError, match="mask: error"):
        assert_within_budget(plain_attention(q, k, v, wrong, 0.25), baseline, exact, "mask")


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_value_that_is_not_finite_fails(dtype, value):
    *_, exact, baseline = attention(dtype)
    actual = baseline.clone()
    actual[100, 1, 3] = value
    with pytest.raises(AssertionError, match="error inf"):
        assert_within_budget(actual, baseline, exact, "finite")


@pytest.mark.parametrize("dtype", LOW)
def test_one_wrong_row_fails(dtype):
    *_, exact, baseline = attention(dtype)
    actual = baseline.clone()
    actual[100, 1] = -actual[100, 1]
    with pytest.raises(AssertionError, match="row: error"):
        assert_within_budget(actual, baseline, exact, "row")


@pytest.mark.parametrize("dtype", LOW)
def test_wrong_baseline_does_not_widen_the_budget(dtype):
    *_, exact, baseline = attention(dtype)
    with pytest.raises(AssertionError, match="baseline's error"):
        assert_within_budget(baseline, 1.2 * baseline, exact, "bad baseline")
    poisoned = baseline.clone()
    poisoned[3, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match="baseline's error"):
        assert_within_budget(baseline, poisoned, exact, "bad baseline")


def test_where_the_oracle_is_zero_only_zero_passes():
    zero = torch.zeros(3, 2, 4)
    assert_within_budget(zero, zero, zero.double(), "empty")
    with pytest.raises(AssertionError, match="error"):
        assert_within_budget(zero + 1e-30, zero, zero.double(), "empty")


def test_oracle_must_be_fp64_and_of_the_same_shape():
    with pytest.raises(AssertionError, match="fp64"):
        measure(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="shapes"):
        measure(torch.zeros(2, 3), torch.zeros(3, 2).double())


def test_measured_errors():
    exact = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    actual = torch.tensor([[3.0, 4.0], [0.5, 5.0]])
    found = measure(actual, exact)
    np.testing.assert_allclose([found.total, found.worst_row], [0.5 / 50**0.5, 0.5 / 5])
