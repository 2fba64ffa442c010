"""nsa.combine against the NumPy oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nsa import combine
from tests import oracle
from tests.ops.cases import array, grad, leaf, make_batch, near, small


@pytest.mark.parametrize("on", list(itertools.product((False, True), repeat=3))[1:])
def test_matches_the_oracle(on):
    """A dense batch, its output and gradients."""
    batch = make_batch(small(), (130,))
    outputs = [leaf(batch.normal(5, 26, 4, 32)) if here else None for here in on]
    gates = leaf(batch.gates().unflatten(0, (5, 26)))
    cmp, slc, win = outputs
    total, d_total = combine(cmp, slc, win, gates), batch.normal(5, 26, 4, 32)
    given = [None if out is None else array(out.flatten(0, 1)) for out in outputs]
    near(total.flatten(0, 1), oracle.combine(given, array(gates.flatten(0, 1))))
    total.backward(d_total)
    for c, out in enumerate(outputs):
        if out is None:
            assert not bool(grad(gates)[..., c].any())
        else:
            near(grad(out), array(gates)[..., c, None] * array(d_total))
            near(grad(gates)[..., c], (array(out) * array(d_total)).sum(-1))


def test_gates_in_fp32_with_low_precision_branches():
    batch = make_batch(small(), (130,))
    cmp, slc, win = (batch.normal(130, 4, 32).bfloat16() for _ in range(3))
    gates = batch.gates().float()
    total = combine(cmp, slc, win, gates)
    assert total.dtype == torch.bfloat16
    wanted = oracle.combine([array(x) for x in (cmp, slc, win)], array(gates))
    assert np.linalg.norm(array(total) - wanted) / np.linalg.norm(wanted) < 2**-8
