"""The registered operators on the CPU: opcheck of each, torch.compile of the whole; kernels are interpreted."""

from __future__ import annotations

import dataclasses

import pytest

from tests.ops.cases import small
from tests.ops.public import Case
from tests.ops.registration import check_compiled, check_operator, operator_names, record_calls

CONFIG = small(num_heads=2, num_kv_heads=1, value_dim=16, phi="linear")
CASE = Case(CONFIG, (20, 9))


@pytest.fixture(scope="module")
def calls():
    return record_calls(CASE, [dataclasses.replace(CASE, config=dataclasses.replace(CONFIG, phi="mlp"))])


@pytest.mark.parametrize("name", operator_names())
def test_operator(name, calls):
    assert name in calls, "no public function calls it"
    check_operator(name, calls[name])


def test_compiled_whole_serves_all_lengths():
    config = small(num_heads=1, num_kv_heads=1, num_selected_blocks=3)
    # From 257 tokens on the choice decides which design of the selected branch runs.
    check_compiled([Case(config, lengths) for lengths in ((20, 9), (13, 21), (257, 3))], "aot_eager")
