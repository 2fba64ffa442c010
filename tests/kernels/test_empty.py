"""No token at all: kernels are not launched, or do nothing; results are empty and gradients 0."""

from __future__ import annotations

import pytest

from tests.ops.empty import CASES, CHECKS


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operator", CHECKS)
def test_operator(operator, case):
    CHECKS[operator](CASES[case], "triton")
