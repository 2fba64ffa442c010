"""The reference of the loss of an index head against the definition in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ops.cases import small
from tests.ops.index_loss import IndexCase, check_index_loss

CASE = IndexCase(small(), (130, 0, 1, 75), backend="reference", dtype=torch.float64)
CASES = {
    "packed": CASE,
    "fewer queries": dataclasses.replace(CASE, lengths_q=(9, 0, 1, 60)),
    "dense": dataclasses.replace(CASE, lengths_k=(75, 75), dense=True),
    "shared": dataclasses.replace(CASE, shared=True, index_heads=3),
    "repeated": dataclasses.replace(CASE, repeats=True),
}


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all"])
@pytest.mark.parametrize("name", CASES)
def test_index_loss(name, selected):
    check_index_loss(dataclasses.replace(CASES[name], selected=selected))
