"""Comparison with an fp64 oracle, within an error budget derived from the tested dtype.

The budget is a multiple of the error of a baseline: the same mathematics in plain PyTorch in the
tested dtype. Unlike a fixed tolerance, it shows whether an error is rounding. A ceiling on the
error of the baseline prevents a wrong baseline from widening the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Maximum error of the baseline relative to the oracle: a few units in the last place of the dtype.
CEILING = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Error that is always allowed, for baselines that are exact by chance.
FLOOR = {torch.float64: 1e-14, torch.float32: 2e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# The same for a single row. A query with one key has dq = 0: exact with the gradient of softmax,
# but only up to rounding if row sums are computed from outputs (delta). In fp32 the error depends
# on the processor's order of summation (1.8e-6 on one).
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
        total: ``||x - oracle|| / ||oracle||`` over the whole tensor.
        worst_row: largest error of a row (last dimension) over the root mean square of the
            oracle's row norms.
    """

    total: float
    worst_row: float


def measure(actual: Tensor, oracle: Tensor) -> Budget:
    """Errors of ``actual`` relative to the fp64 ``oracle`` of the same shape.

    Errors are infinite if ``actual`` is not finite.
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
        baseline: the same mathematics in plain PyTorch in the tested dtype, which determines
            ceiling and floor.
        oracle: the result in fp64.
        name: name of the result, for the message.
        factor: allowed error as a multiple of the baseline's.

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
