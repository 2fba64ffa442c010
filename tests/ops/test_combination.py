"""nsa.combine against the oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import combine
from nsa.testing import assert_within_budget
from tests import oracle
from tests.ops.cases import array, grad, leaf, make_batch, near, small

SUBSETS = [on for on in itertools.product((False, True), repeat=3) if any(on)]


def branches() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    batch = make_batch(small(), (130,))
    return (
        batch.normal(130, 4, 32),
        batch.normal(130, 4, 32),
        batch.normal(130, 4, 32),
    ), batch.gates()


@pytest.mark.parametrize("on", SUBSETS)
def test_matches_the_oracle(on):
    outputs, gates = branches()
    cmp, slc, win = (out if here else None for out, here in zip(outputs, on, strict=True))
    given = cmp, slc, win
    wanted = oracle.combine([None if out is None else array(out) for out in given], array(gates))
    near(combine(*given, gates), wanted)


def test_one_hot_gates_give_the_branch():
    outputs, gates = branches()
    for c in range(3):
        one_hot = torch.zeros_like(gates)
        one_hot[..., c] = 1
        assert torch.equal(combine(*outputs, one_hot), outputs[c])


def test_gate_of_each_head_and_token_counts():
    outputs, gates = branches()
    changed = gates.clone()
    changed[57, 2, 1] += 1
    difference = array(combine(*outputs, changed) - combine(*outputs, gates))
    wanted = np.zeros((130, 4, 32))
    wanted[57, 2] = array(outputs[1])[57, 2]
    near(torch.from_numpy(difference), wanted)


def test_gradients():
    outputs, gates = branches()
    leaves = leaf(outputs[0]), leaf(outputs[1]), leaf(outputs[2]), leaf(gates)
    total = combine(*leaves)
    d_total = torch.from_numpy(np.random.default_rng(1).standard_normal(total.shape))
    total.backward(d_total)
    for c in range(3):
        near(grad(leaves[c]), array(gates)[..., c, None] * array(d_total))
        near(grad(leaves[3])[..., c], (array(outputs[c]) * array(d_total)).sum(-1))
    few = [leaf(x[:3]) for x in (*outputs, gates)]
    assert torch.autograd.gradcheck(combine, few)


def test_dense_batch():
    outputs, gates = branches()
    cmp, slc, win = (x.unflatten(0, (5, 26)) for x in outputs)
    dense = combine(cmp, slc, win, gates.unflatten(0, (5, 26)))
    near(dense, array(combine(*outputs, gates)).reshape(5, 26, 4, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    outputs, gates = branches()
    rounded, low_gates = (
        (outputs[0].to(dtype), outputs[1].to(dtype), outputs[2].to(dtype)),
        gates.to(dtype),
    )
    wanted = torch.from_numpy(oracle.combine([array(x) for x in rounded], array(low_gates)))
    total = combine(*rounded, low_gates)
    assert total.dtype == dtype
    plain = (
        rounded[0] * low_gates[..., 0, None]
        + rounded[1] * low_gates[..., 1, None]
        + rounded[2] * low_gates[..., 2, None]
    )
    assert_within_budget(total, plain, wanted, "out")


def test_gates_in_fp32_with_low_precision_branches():
    outputs, gates = branches()
    rounded = outputs[0].bfloat16(), outputs[1].bfloat16(), outputs[2].bfloat16()
    total = combine(*rounded, gates.float())
    assert total.dtype == torch.bfloat16
    wanted = oracle.combine([array(x) for x in rounded], array(gates.float()))
    assert (
        float((total.double() - torch.from_numpy(wanted)).norm() / np.linalg.norm(wanted)) < 2**-8
    )
