"""Kernels of the loss of an index head, in the interpreter, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nsa.ops._operator import Call
from nsa.ops._sequences import Sequences
from nsa.ops._triton import tuning
from nsa.ops._triton.tuning import tiles_chosen_by
from nsa.ops.index_loss import IndexLossInputs, index_loss, launch, run_index_loss
from nsa.ops.selected import selected_attention_op
from nsa.ops.selected.types import SelectedInputs
from tests.kernels.test_operators import heads
from tests.ops.cases import leaf
from tests.ops.index_loss import Head, check_index_loss, inputs_of, run_loss
from tests.ops.public import Case
from tests.ops.registration import Recorder, check_operator

CASES: dict[str, tuple[Case, Head]] = {
    "G 1": (Case(heads(1, 2), (84, 1, 0, 37), (18, 1, 0, 5)), Head()),
    "G 6": (Case(heads(6, 2), (70,), (20,)), Head(2)),
    "shared, 3 heads": (Case(heads(2, 2), (90, 33), (18, 1)), Head(3, shared=True)),
    "dense": (Case(heads(2), (52, 52), dense=True), Head()),
    "Di 32, D 48": (Case(heads(2, head_dim=48), (90,), (9,)), Head(dim=32)),
    "Di 128, repeated": (Case(heads(2), (90,), (30,)), Head(2, dim=128, repeats=True)),
    "n 20": (Case(heads(2, num_selected_blocks=20), (340,), (6,)), Head(2)),
    **{
        f"forced {init} {local}": (
            Case(heads(2, num_init_blocks=init, num_local_blocks=local), (100, 33), (9, 5)),
            Head(2),
        )
        for init, local in ((0, 1), (2, 2))
    },
    **{
        f"l' {size}": (Case(heads(2, block_size=size), (6 * size + 5,), (6,)), Head(2))
        for size in (32, 128)
    },
    "fp16": (Case(heads(3), (70,), (18,), dtype=torch.float16), Head(2)),
    "no block to rank": (Case(heads(3), (48, 20), (9, 9)), Head()),
}


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all"])
@pytest.mark.parametrize("name", CASES)
def test_index_loss(name, selected):
    case, head = CASES[name]
    check_index_loss(case, head._replace(selected=selected))


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all"])
def test_products_with_a_part_of_a_block(selected, monkeypatch):
    monkeypatch.setattr(launch, "PRODUCT_BYTES", 0)
    case = Case(heads(2, block_size=64), (330,), (40,))
    with tiles_chosen_by(lambda _, tile: tile._replace(rows=16, keys=16)):
        check_index_loss(case, Head(2, dim=16, selected=selected))


@pytest.mark.parametrize("scatter", [0.0, 100.0], ids=["sorted", "tiled"])
@pytest.mark.parametrize("name", ["G 1", "G 6", "shared, 3 heads", "dense", "forced 2 2"])
def test_results_of_the_branch(name, scatter, monkeypatch):
    """With lse and order of the selected branch the loss is the same."""
    monkeypatch.setattr(tuning, "SCATTER", dict.fromkeys(tuning.SCATTER, scatter))
    case, head = CASES[name]
    (q_idx, k_idx, q, k), ids = inputs_of(case, head)
    assert ids is not None
    x = case.inputs()
    offsets = x.cu_seqlens_q, x.cu_seqlens_k
    longest = max(case.queries), max(case.lengths_k)
    sequences = Sequences(offsets, len(case.queries), *longest, x.q.device)
    call = Call(case.config, sequences, case.config.head_dim**-0.5)
    leaves = [leaf(y, case.dtype) for y in (q_idx, k_idx)]
    branch = selected_attention_op(SelectedInputs(q, k, k, ids), call)
    assert branch.order.any() == (scatter == 0)
    found = []
    # Without results last: the first run must not find what another has computed.
    for results in ((branch.lse, branch.order), ()):
        inputs = IndexLossInputs(leaves[0], leaves[1], q, k, ids, *results)
        with tiles_chosen_by(lambda _, tile: tile._replace(rows=16, keys=16)):
            total, count = run_index_loss(inputs, call, "triton")
            found.append([total.detach(), count, *torch.autograd.grad(total, leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def sum_of(case: Case, head: Head, function: Any) -> list[torch.Tensor]:
    tensors, ids = inputs_of(case, head)
    leaves = [leaf(x, case.dtype) for x in tensors[:2]]
    total, _ = function(*leaves, *tensors[2:], ids, case.config, **case.offsets(case.inputs()))
    return [total.detach(), *torch.autograd.grad(0.5 * total, leaves)]


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all"])
def test_compiled_and_recomputed(selected):
    """The same bits in a compiled graph and with activation checkpointing."""
    case, head = Case(heads(2), (70, 3), (5, 3)), Head(2, selected=selected)
    compiled = torch.compile(index_loss, fullgraph=True, backend="aot_eager")
    expected = sum_of(case, head, index_loss)

    def recomputed(*arguments: Any, **named: Any) -> Any:
        return checkpoint(index_loss, *arguments, use_reentrant=False, **named)

    for function in (compiled, recomputed):
        assert all(map(torch.equal, sum_of(case, head, function), expected))


def test_operators_over_all_blocks():
    with Recorder() as recorder:
        run_loss(Case(heads(2), (70, 3), (9, 3)), Head(2, selected=False))
    assert len(recorder.calls) == 2
    for name, call in recorder.calls.items():
        check_operator(name, call)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("whole", [True, False], ids=["all", "one"])
@pytest.mark.parametrize("name", ["q_idx", "k_idx", "q", "k"])
@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all blocks"])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_nan_is_seen(backend, selected, name, whole):
    """NaN in all rows of a sequence, or in one number of a ranked block: the loss is NaN.

    With kernels it does not reach the gradients of the other sequence.
    """
    case = Case(heads(2), (80, 66), (10, 6), backend=backend)
    (q_idx, k_idx, q, k), _ = inputs_of(case, Head(2))
    named: dict[str, Any] = {"q_idx": q_idx, "k_idx": k_idx, "q": q, "k": k}
    some, every = {"q": (9, slice(10)), "k": (20, slice(80))}[name[0]]
    named[name][every if whole else some, 0, 0] = torch.nan
    leaves = [named[key].requires_grad_() for key in ("q_idx", "k_idx")]
    ids = torch.tensor([0, 1, 2, -1]).int().expand(16, 1, 4) if selected else None
    options = case.offsets(case.inputs())
    total, _ = index_loss(**named, block_indices=ids, config=case.config, **options)
    assert total.isnan()
    if backend == "triton":
        dq, dk = torch.autograd.grad(total, leaves)
        assert not dq[10:].isnan().any()
        assert not dk[80:].isnan().any()
