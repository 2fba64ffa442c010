"""The gate lets right results pass and holds back each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from nsa import window_attention
from nsa.bench.cases import CASES, prepare
from nsa.bench.gate import Gate, Verdict, approximates
from nsa.bench.implementations import IMPLEMENTATIONS
from nsa.bench.points import Point, make_tensors, parse_shape

SHAPE = parse_shape("4x2x16x32")
SMALL = {"compress_block_size": 8, "compress_stride": 4, "block_size": 16}
SMALL |= {"num_selected_blocks": 4, "window_size": 32}


@cache
def measured(name: str, dtype: torch.dtype = torch.float32) -> tuple[Gate, dict[str, Tensor]]:
    """Gate of a case, and right results by name."""
    point = Point(SHAPE, 160, 3, "shared4", dtype, torch.device("cpu"))
    config, case = SHAPE.config(SMALL), CASES[name]
    problem = prepare(case, make_tensors(point, config), point, config, "reference")
    work = IMPLEMENTATIONS["reference"].work(problem)
    return Gate(problem), problem.named(work.run(case.modes[-1]), work.leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(CASES))
def test_right_results_pass(name: str, dtype: torch.dtype) -> None:
    gate, results = measured(name, dtype)
    verdict = gate.check(results)
    assert verdict.correct, verdict.note
    assert set(verdict.errors) == (set(results) if name != "attention.choice" else set())
    assert gate.check(results) == verdict


def test_a_result_that_nothing_is_compared_with_is_held_back() -> None:
    gate, results = measured("attention.window")
    verdict = gate.check({**results, "dk_slc": results["dk_win"]})
    assert (verdict.correct, verdict.note) == (False, "dk_slc: nothing to compare with")


def altered(name: str, which: str, change: Callable[[Tensor], Tensor]) -> Verdict:
    gate, results = measured(name)
    return gate.check({**results, which: change(results[which].detach().clone())})


def scaled(x: Tensor) -> Tensor:
    return 1.001 * x


def one_infinite(x: Tensor) -> Tensor:
    x.flatten()[x.numel() // 3] = torch.inf  # on no sampled row
    return x


def neighbours(x: Tensor) -> Tensor:
    return x.roll(1, dims=0 if x.ndim == 3 else 1)


def other_group(x: Tensor) -> Tensor:
    return x.flip(-2)


RESULTS = [
    (name, which)
    for name in sorted(CASES)
    for which in (*CASES[name].outputs, *(f"d{leaf}" for leaf in CASES[name].inputs))
    if name != "attention.choice"
]


@pytest.mark.parametrize("change", [scaled, one_infinite, neighbours, other_group])
@pytest.mark.parametrize(("name", "which"), RESULTS)
def test_a_wrong_result_is_held_back(
    name: str,
    which: str,
    change: Callable[[Tensor], Tensor],
) -> None:
    verdict = altered(name, which, change)
    assert verdict.correct is False
    assert verdict.note is not None
    assert f"{which}:" in verdict.note


def test_a_window_that_is_one_token_too_long_is_held_back() -> None:
    gate, results = measured("attention.window")
    tensors = gate.problem.tensors
    longer = SHAPE.config({**SMALL, "window_size": 33})
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("q", "k_win", "v_win")}
    out, _ = window_attention(leaves["q"], leaves["k_win"], leaves["v_win"], longer)
    grads = torch.autograd.grad(out, tuple(leaves.values()), tensors["dout"])
    for name, wrong in zip(("out", "dq", "dk_win", "dv_win"), (out, *grads), strict=True):
        assert gate.check({**results, name: wrong}).correct is False


def test_a_branch_that_is_missing_is_held_back() -> None:
    gate, results = measured("attention")
    config = SHAPE.config({**SMALL, "branches": ("cmp", "slc")})
    (wrong,) = CASES["attention"].call(gate.problem.tensors, config, "reference")
    assert gate.check({"out": results["out"]}).correct
    assert gate.check({"out": wrong}).correct is False


def test_dense_attention_is_compared_with_dense_attention() -> None:
    gate, results = measured("attention")
    x = gate.problem.tensors
    leaves = [x[name].detach().requires_grad_() for name in ("q", "k_slc", "v_slc")]
    q, k, v = (y.transpose(1, 2) for y in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        enable_gqa=True,
    ).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, x["dout"])
    right = dict(zip(("out", "dq", "dk_slc", "dv_slc"), (out, *grads), strict=True))
    assert gate.check(right, dense=True).correct
    assert gate.check({"out": results["out"]}, dense=True).correct is False
    unmasked = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(
        1,
        2,
    )
    assert gate.check({"out": unmasked}, dense=True).correct is False


# ------------------------------------------------------------------------------------- selection


def swapped(ids: Tensor) -> Tensor:
    ids[0, 100] = ids[0, 100].flip(-1)
    return ids


def future(ids: Tensor) -> Tensor:
    ids[1, 20, 0] = torch.tensor(
        [0, 1, 2, -1],
    )  # a sequence that is not looked at, but 20 // 16 is 1
    return ids


def unforced(ids: Tensor) -> Tensor:
    ids[1, 159, 1] = torch.tensor([1, 2, 8, 9])
    return ids


def hole(ids: Tensor) -> Tensor:
    ids[0, 40, 0] = torch.tensor([0, -1, 1, 2])
    return ids


def twice(ids: Tensor) -> Tensor:
    ids[0, 100, 0, 1] = ids[0, 100, 0, 0]
    return ids


def dropped(ids: Tensor) -> Tensor:
    """The best of the blocks that are not forced is left out."""
    ids[0, 150, 1, 1:] = torch.cat((ids[0, 150, 1, 2:], torch.tensor([-1])))
    return ids


def worse(ids: Tensor) -> Tensor:
    """Everyone takes the first, the second and the last two blocks."""
    current = torch.arange(160)[None, :, None] // 16
    late = (current >= 4).expand(ids.shape[:3])
    made = torch.stack((0 * current, 0 * current + 1, current - 1, current), -1).expand(ids.shape)
    return torch.where(late[..., None], made, ids).int()


WRONG = (
    (swapped, "not ascending"),
    (future, "a block of the future"),
    (unforced, "a forced block is missing"),
    (hole, "not ascending"),
    (twice, "not ascending"),
    (dropped, "not as many blocks"),
    (worse, "differ from fp64"),
)


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_a_wrong_selection_is_held_back(change: Callable[[Tensor], Tensor], why: str) -> None:
    verdict = altered("attention.choice", "block_indices", change)
    assert verdict.correct is False
    assert why in str(verdict.note)


def test_recall_counts_the_blocks_that_were_found() -> None:
    gate, results = measured("attention.choice")
    right = results["block_indices"]
    assert gate.recall(right) == 1.0
    found = gate.recall(worse(right.clone()))
    late = 160 - 64  # queries with more candidates than four; three of their four blocks are forced
    assert found > 1 - late / 160 / 4 - 0.02
    assert found < 1 - 0.3 * late / 160 / 4


def test_an_approximation_is_held_to_its_own_selection() -> None:
    """And finds a part of the exact one."""
    gate, results = measured("attention.choice")
    problem = replace(gate.problem, config=SHAPE.config({**SMALL, "score_precision": "fp8"}))
    approximate = Gate(problem)
    (found,) = IMPLEMENTATIONS["reference"].work(problem).run("fwd")
    assert approximate.check({"block_indices": found}).correct
    assert 0.9 < approximate.recall(found) < 1
    assert approximate.check({"block_indices": results["block_indices"]}).correct is False
    assert approximates(problem.config)
    assert not approximates(gate.problem.config)
