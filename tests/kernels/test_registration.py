"""The registered operators on the CPU: opcheck of each, torch.compile of the whole; kernels are
interpreted.
"""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import pytest
import torch
from torch.export import Dim, export
from torch.func import functional_call, grad, jacrev, vmap

from nsa import NativeSparseAttention
from nsa.ops import _register
from nsa.ops._backend import as_on_gpu
from nsa.ops.embedding import embed_backward_op
from nsa.ops.projection import kernels as projection
from tests.ops.cases import small
from tests.ops.public import Case
from tests.ops.registration import (
    check_compiled,
    check_operator,
    check_plan,
    operator_names,
    record_calls,
)

CONFIG = small(num_heads=2, num_kv_heads=1, value_dim=16, phi="linear")
CASE = Case(CONFIG, (18, 3))


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Those of a projection share its heads, each for few tokens."""
    with mock.patch.object(projection, "PROGRAMS", projection.PROGRAMS[-1:]):
        yield


@pytest.fixture(scope="module")
def calls(few_programs):
    return record_calls(
        CASE, [dataclasses.replace(CASE, config=dataclasses.replace(CONFIG, phi="mlp"))]
    )


@pytest.mark.parametrize("name", operator_names())
def test_operator(name, calls):
    assert name in calls, "no public function calls it"
    check_operator(name, calls[name])


@pytest.mark.parametrize("name", operator_names())
def test_plan_of_an_operator(name, calls):
    check_plan(name, calls[name])


class AskedError(Exception):
    """The guard was asked for the device."""


@pytest.mark.parametrize("name", operator_names())
def test_operator_guards_its_device(name, calls, monkeypatch):
    """Every operator looks at the device of its tensors before it runs."""

    def ask(arguments):
        raise AskedError

    monkeypatch.setattr(_register, "cuda_index", ask)
    args, kwargs = calls[name]
    with pytest.raises(AskedError):
        getattr(torch.ops.nsa, name.removeprefix("nsa::")).default(*args, **kwargs)


def test_compiled_whole_serves_all_lengths():
    config = small(num_heads=1, num_kv_heads=1, num_selected_blocks=3)
    # From 257 tokens on the choice decides which algorithm of the selected branch runs.
    check_compiled([Case(config, lengths) for lengths in ((20, 9), (257, 3))], "aot_eager")


def test_a_sign_that_is_still_to_be_applied():
    """PyTorch's lazily negated tensors go through its dispatcher, which applies the sign."""
    tokens, dout = torch.tensor([0, 1, 1], dtype=torch.int32), torch.randn(3, 4)
    found = embed_backward_op(torch._neg_view(dout), tokens, 2)
    torch.testing.assert_close(found, -embed_backward_op(dout, tokens, 2))


def test_function_transforms():
    """Gradients are those of the reference; mapping and second derivatives are refused."""
    torch.manual_seed(0)
    layer, x = NativeSparseAttention(32, CONFIG), torch.randn(2, 9, 32)
    given = {name: value.detach() for name, value in layer.named_parameters()}

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,)).sin().sum()

    wanted = grad(loss)(given, x)
    with as_on_gpu():
        torch.testing.assert_close(grad(loss)(given, x), wanted)
        by_row = vmap(functools.partial(grad(loss), given))
        for transformed in (vmap(layer), by_row, jacrev(layer)):
            with pytest.raises(NotImplementedError, match="cannot be mapped over"):
                transformed(x)
        with pytest.raises(NotImplementedError, match="backward has no gradient"):
            grad(lambda x: grad(loss, argnums=1)(given, x).sum())(x)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_calls_the_operators(strict):
    """As on a GPU; the program serves batch sizes and lengths that it was not traced with."""
    torch.manual_seed(0)
    layer = NativeSparseAttention(32, dataclasses.replace(CONFIG, phi="mean", share_kv=True))
    dims = {"x": {0: Dim("batch"), 1: Dim("length")}}
    with as_on_gpu():
        program = export(layer, (torch.randn(2, 70, 32),), dynamic_shapes=dims, strict=strict)
        called = {node.name for node in program.graph.nodes if "nsa." in str(node.target)}
        assert called == {"project", "compress", "attention"}
        for batch, length in ((1, 1), (2, 9)):
            x = torch.randn(batch, length, 32)
            assert torch.equal(program.module()(x), layer(x))
