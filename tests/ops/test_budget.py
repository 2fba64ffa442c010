"""The error budget itself: it lets rounding pass and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nsa.testing import assert_within_budget, measure
from tests import oracle
from tests.ops.cases import array, make_batch, plain_attention, small

LENGTH, WINDOW = 257, 32
T, S = torch.arange(LENGTH)[:, None, None], torch.arange(LENGTH)
MASK = ((S <= T) & (S > T - WINDOW)).expand(LENGTH, 2, LENGTH)


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def case(request):
    """q, k and v, the fp64 oracle and the plain baseline in the dtype, of a window."""
    batch = make_batch(small(), (LENGTH,))
    q, k, v = (x.to(request.param) for x in (batch.q(), batch.k(), batch.v()))
    visible = oracle.visible_win(LENGTH, LENGTH, WINDOW)
    exact, _ = oracle.attention(array(q), array(k), array(v), visible)
    return (q, k, v), torch.from_numpy(exact), plain_attention(q, k, v, MASK, 0.25)


def test_rounding_passes(case):
    inputs, exact, baseline = case
    q, k, v = (x.float() for x in inputs)
    better = plain_attention(q, k, v, MASK, 0.25)
    for actual in (exact, baseline, better):
        assert_within_budget(actual.to(baseline.dtype), baseline, exact, "rounded")


DROPPED = (S >= 228) & (S < 244)  # a block of 16 tokens
MISTAKES = {
    **{f"scale {scale}": (scale, MASK) for scale in (0.26, 0.24, 1.0, 1 / 16)},
    "block dropped for every query": (0.25, MASK & ~DROPPED),
    "block dropped for the last query": (0.25, MASK & ~(DROPPED & (T == LENGTH - 1))),
    "next token seen": (0.25, MASK | (S == T + 1)),
    "own token dropped": (0.25, MASK & ((S != T) | (T == 0))),
    "window too long": (0.25, MASK | (S == T - WINDOW)),
    "window too short": (0.25, MASK & (S != T - WINDOW + 1)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_fails(case, name):
    (q, k, v), exact, baseline = case
    scale, mask = MISTAKES[name]
    actual = plain_attention(q, k, v, mask, scale)
    with pytest.raises(AssertionError, match="mistake: error"):
        assert_within_budget(actual, baseline, exact, "mistake")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, None])
def test_one_wrong_value_or_row_fails(case, value):
    _, exact, baseline = case
    actual = baseline.clone()
    if value is None:
        actual[100, 1] = -actual[100, 1]
    else:
        actual[100, 1, 3] = value
    with pytest.raises(AssertionError, match="row: error" if value is None else "error inf"):
        assert_within_budget(actual, baseline, exact, "row")


def test_wrong_baseline_does_not_widen_the_budget(case):
    _, exact, baseline = case
    poisoned = baseline.clone()
    poisoned[3, 0, 0] = torch.nan
    for bad in (1.2 * baseline, poisoned):
        with pytest.raises(AssertionError, match="baseline's error"):
            assert_within_budget(baseline, bad, exact, "bad baseline")


def test_zeros_shapes_and_dtypes():
    """Where the oracle is 0, only 0 passes; it must be fp64 and of the same shape."""
    zero = torch.zeros(3, 2, 4)
    assert_within_budget(zero, zero, zero.double(), "empty")
    with pytest.raises(AssertionError, match="error"):
        assert_within_budget(zero + 1e-30, zero, zero.double(), "empty")
    with pytest.raises(AssertionError, match="fp64"):
        measure(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="shapes"):
        measure(torch.zeros(2, 3), torch.zeros(3, 2).double())


def test_measured_errors():
    exact = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    actual = torch.tensor([[3.0, 4.0], [0.5, 5.0]])
    found = measure(actual, exact)
    np.testing.assert_allclose([found.total, found.worst_row], [0.5 / 50**0.5, 0.5 / 5])
