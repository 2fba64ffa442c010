"""Comparison with an fp64 oracle, within a budget that the tested dtype itself sets.

The budget is the error that the same mathematics, written plainly in the tested dtype, makes
against the oracle. A tolerance that is typed in says nothing about whether an error is rounding;
this one does. The ceiling guards the budget: a baseline that is wrong itself must not widen it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Largest error that the baseline itself may have, relative to the oracle: a few units in the last
# place of the dtype.
CEILING = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Error that is always allowed, for baselines that happen to be exact.
FLOOR = {torch.float64: 1e-14, torch.float32: 2e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# The same for a single row. A query with one key has dq = 0: exactly so by a softmax's own
# gradient, but for rounding where row sums come from outputs (delta), and in fp32 a processor's
# order of summation decides how much (1.8e-6 on one).
ROW_FLOOR = {
    torch.float64: 8e-14,
    torch.float32: 3.2e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3.2e-2,
}


@dataclass(frozen=True)
class Budget:
    """Errors of one tensor against the oracle.

    Attributes:
        total: ``||x - oracle|| / ||oracle||`` over everything.
        worst_row: the largest error of a row (last dimension) over the root mean square of the
            oracle's row norms.
    """

    total: float
    worst_row: float


def measure(actual: Tensor, oracle: Tensor) -> Budget:
    """Errors of ``actual`` against the fp64 ``oracle`` of the same shape.

    They are infinite where ``actual`` is not finite.
    """
    assert actual.shape == oracle.shape, (
        f"shapes differ: {tuple(actual.shape)} and {tuple(oracle.shape)}"
    )
    assert oracle.dtype == torch.float64, f"the oracle must be fp64, got {oracle.dtype}"
    if actual.numel() == 0:
        return Budget(0.0, 0.0)
    if not bool(actual.isfinite().all()):
        return Budget(float("inf"), float("inf"))
    difference = (actual.double() - oracle).reshape(-1, actual.shape[-1])
    scale = oracle.reshape(-1, actual.shape[-1])
    norm = float(scale.norm())
    if norm == 0:
        exact = 0.0 if float(difference.norm()) == 0 else float("inf")
        return Budget(exact, exact)
    row_rms = norm / scale.shape[0] ** 0.5
    return Budget(float(difference.norm()) / norm, float(difference.norm(dim=-1).max()) / row_rms)


def assert_within_budget(
    actual: Tensor, baseline: Tensor, oracle: Tensor, name: str, factor: float = 2.0
) -> Budget:
    """Fail unless ``actual`` is as close to the oracle as the tested dtype allows.

    Args:
        actual: result under test.
        baseline: the same mathematics written plainly in the tested dtype; its dtype sets ceiling
            and floor.
        oracle: the same in fp64.
        name: what is compared, for the message.
        factor: how many times the baseline's error is allowed.

    Returns:
        The errors of ``actual``.

    Raises:
        AssertionError: the error is above ``factor`` times the baseline's, or the baseline's is
            above its ceiling.
    """
    dtype = baseline.dtype
    found, allowed = measure(actual, oracle), measure(baseline, oracle)
    assert allowed.total <= CEILING[dtype], (
        f"{name}: the baseline's error {allowed.total:.3g} is above {CEILING[dtype]:.3g} ({dtype})"
    )
    limit = max(factor * allowed.total, FLOOR[dtype])
    assert found.total <= limit, f"{name}: error {found.total:.3g} is above {limit:.3g} ({dtype})"
    row_limit = max(factor * allowed.worst_row, ROW_FLOOR[dtype])
    assert found.worst_row <= row_limit, (
        f"{name}: error of the worst row {found.worst_row:.3g} is above {row_limit:.3g} ({dtype})"
    )
    return found
