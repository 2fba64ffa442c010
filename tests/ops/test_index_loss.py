"""The reference of the loss of an index head, and its arguments."""

from __future__ import annotations

import pytest
import torch

from nsa.ops.index_loss import index_loss
from tests.ops.cases import small
from tests.ops.index_loss import Head, inputs_of
from tests.ops.public import Case

CASE = Case(small(), (75,), backend="reference", dtype=torch.float64)


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all"])
@pytest.mark.parametrize("head", [Head(), Head(shared=True, repeats=True)], ids=str)
def test_gradient_is_that_of_finite_differences(head, selected):
    """With one index head, L cancels; with more it has no gradient."""
    (q_idx, k_idx, q, k), ids = inputs_of(CASE, head._replace(dim=5, selected=selected))

    def loss(*given):
        return index_loss(*given, q, k, ids, CASE.config).total

    leaves = q_idx.requires_grad_(), k_idx.requires_grad_()
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


BAD = {
    "q_idx": (torch.zeros(75, 3, 8), r"q_idx must have a multiple of the heads of k_idx \(2\)"),
    "k_idx": (torch.zeros(75, 3, 8), "k_idx must have 1 head or as many as k, got 3"),
    "k": (torch.zeros(74, 2, 16), r"k_idx must have the tokens of k \(74,\), got \(75,\)"),
    "q": (torch.zeros(75, 3, 16), "q must have shape"),
    "block_indices": (torch.zeros(74, 2, 4).int(), "block_indices must have the queries of q"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    (q_idx, k_idx, q, k), ids = inputs_of(CASE, Head())
    given = {"q_idx": q_idx, "k_idx": k_idx, "q": q, "k": k, "block_indices": ids}
    given[name] = BAD[name][0].to(torch.int32 if name == "block_indices" else q.dtype)
    with pytest.raises(ValueError, match=BAD[name][1]):
        index_loss(**given, config=CASE.config)
