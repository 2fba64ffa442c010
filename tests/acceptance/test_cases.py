"""The acceptance run, ``make accept``: every case of the table on the GPU of this machine."""

from __future__ import annotations

import pytest

from tests.acceptance.cases import CASES, Case


def marked(case: Case):
    """Test parameter of a case, marked with its leg and ``quick``."""
    marks = [getattr(pytest.mark, f"leg{case.leg}"), *[pytest.mark.quick] * case.quick]
    return pytest.param(case, marks=marks, id=case.name)


@pytest.mark.acceptance
@pytest.mark.filterwarnings("default")  # warnings of other libraries
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_case(case, setting):
    if faults := setting.faults():
        pytest.fail("; ".join(faults), pytrace=False)
