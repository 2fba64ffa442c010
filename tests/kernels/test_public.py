"""Every public operator with backend "triton", forward and backward, in the interpreter: fp32 and the small pattern."""

from __future__ import annotations

import pytest

from tests.ops import properties
from tests.ops.cases import small
from tests.ops.public import CHECKS, RUNS, Case

CONFIG = small(num_heads=6, phi="linear")
CASES = {
    "packed": Case(CONFIG, (70, 0, 1, 17, 8)),
    "fewer queries": Case(CONFIG, (70, 3, 64), (20, 0, 7)),
    "dense": Case(CONFIG, (50, 50), dense=True),
}
NARROW = small(num_heads=2, num_kv_heads=1, value_dim=16)
ONE = Case(NARROW, (100,))
TWO_HEADS = Case(small(num_heads=2, value_dim=16), (100,))
PACKED = Case(NARROW, (70, 9, 20))

# NumPy's words inside the interpreter: a maximum over NaN, powers of keys that are masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered", "ignore:overflow encountered in exp2")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operator", CHECKS)
def test_operator(operator, case):
    CHECKS[operator](CASES[case])


@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_causality_bit_for_bit(operator):
    properties.check_causality(operator, ONE, (79, 90))


@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_same_bits_on_every_run(operator):
    properties.check_same_bits(operator, PACKED, runs=2)


@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_nan_reaches_no_other_sequence(operator):
    properties.check_nan_isolation(operator, PACKED, 1)


@pytest.mark.parametrize("operator", RUNS)
def test_packed_equals_separate(operator):
    properties.check_packed_equals_separate(operator, Case(NARROW, (70, 0, 33), (20, 0, 7)))


def test_full_coverage_is_dense_attention():
    properties.check_full_coverage(Case(NARROW, (60,)))


def test_one_hot_gates_are_one_branch():
    properties.check_one_hot_gates(Case(NARROW, (70,)))


def test_order_of_indices_does_not_matter():
    properties.check_shuffled_indices(PACKED)


def test_unchosen_blocks_have_no_gradient():
    properties.check_unchosen_blocks(TWO_HEADS)


def test_shifted_positions_change_nothing():
    properties.check_rope_shift(Case(NARROW, (70,)))
