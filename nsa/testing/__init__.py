"""Error budgets, random inputs and sampled fp64 values for tests and benchmarks."""

from nsa.testing.budget import Budget, assert_within_budget, measure
from nsa.testing.inputs import PackedInputs, make_inputs, packed_offsets

__all__ = [
    "Budget",
    "PackedInputs",
    "assert_within_budget",
    "make_inputs",
    "measure",
    "packed_offsets",
]
