"""The correctness gate of the project: error budgets, inputs, low-precision baselines. Shared by tests and benchmarks."""

from nsa.testing.budget import Budget, assert_within_budget, measure
from nsa.testing.inputs import AttentionInputs, make_inputs, packed_offsets

__all__ = [
    "AttentionInputs",
    "Budget",
    "assert_within_budget",
    "make_inputs",
    "measure",
    "packed_offsets",
]
