"""The reference of the loss of an index head, and its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nsa.ops.index_loss import block_recall, index_loss
from tests.ops.cases import small
from tests.ops.index_loss import Head, inputs_of
from tests.ops.public import Case

CASE = Case(small(), (75,), backend="reference", dtype=torch.float64)


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all"])
@pytest.mark.parametrize("head", [Head(), Head(shared=True, repeats=True)], ids=str)
def test_gradient_is_that_of_finite_differences(head, selected):
    """With one index head, L cancels; with more it has no gradient."""
    (q_idx, k_idx, q, k), ids = inputs_of(CASE, head._replace(dim=5, selected=selected))

    def loss(q_idx, k_idx):
        return index_loss(q_idx, k_idx, q, k, ids, CASE.config).total

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
    given: Any = {"q_idx": q_idx, "k_idx": k_idx, "q": q, "k": k, "block_indices": ids}
    given[name] = BAD[name][0].to(torch.int32 if name == "block_indices" else q.dtype)
    with pytest.raises(ValueError, match=BAD[name][1]):
        index_loss(**given, config=CASE.config)


@pytest.mark.parametrize("dense", [True, False])
def test_recall(dense, monkeypatch):
    """Masses and the best blocks, by a loop; each query in a part of its own."""
    monkeypatch.setattr("nsa.ops.index_loss.recall.MAX_SCORES", 0)
    lengths = (130, 130) if dense else (200, 1, 75)
    case = dataclasses.replace(CASE, lengths_k=lengths, dense=dense)
    x, ids, config = case.inputs(), case.block_indices(), case.config
    q, rows = 2 * x.q, torch.tensor([129, 30, 131, 64, 259 if dense else 275])
    offsets: Any = {} if dense else {"cu_seqlens_q": x.cu_seqlens_q}
    q_given, k_given, ids_given = (case.shaped(y) for y in (q, x.k_slc, ids))
    found = block_recall(q_given, k_given, ids_given, config, rows, **offsets)
    for i, row in enumerate(rows.tolist()):
        first = max(start for start in x.cu_seqlens_k[:-1].tolist() if start <= row)
        own = (row - first) // 16
        for g in range(2):
            keys = x.k_slc[first : row + 1, g]
            weights = (q[row, 2 * g : 2 * g + 2] @ keys.T / 4).softmax(-1).sum(0)
            mass = [float(weights[16 * j : 16 * j + 16].sum()) for j in range(1, own - 1)]
            chosen = [mass[j - 1] for j in {*ids[row, g].tolist()} if 1 <= j < own - 1]
            best = sorted(mass)[len(mass) - len(chosen) :]
            outside = sum(mass) or 1.0
            assert float(found.kept[i, g]) == pytest.approx(sum(chosen) / outside, abs=1e-12)
            assert float(found.best[i, g]) == pytest.approx(sum(best) / outside, abs=1e-12)
    assert found.kept.sum() < found.best.sum() < found.best.numel()
