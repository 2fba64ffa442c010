"""The acceptance run, ``make accept``: every case of the table on the GPU of this machine."""

from __future__ import annotations

import pytest

from tests.acceptance.cases import CASES, Case, Setting


@pytest.mark.acceptance
@pytest.mark.filterwarnings("default")  # of other libraries; the programs of users show them too
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, setting: Setting):
    if faults := setting.faults():
        pytest.fail("; ".join(faults), pytrace=False)
