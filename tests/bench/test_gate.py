"""The gate lets right results pass and holds back each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa import window_attention
from nsa.bench.attention import PROVIDERS
from nsa.bench.cases import CASES, Point, make_tensors, parse_shape, prepare
from nsa.bench.clock import Verdict
from nsa.bench.gate import Gate, approximates

SHAPE = parse_shape("4x2x16x32")
SMALL = {"compress_block_size": 8, "compress_stride": 4, "block_size": 16}
SMALL |= {"num_selected_blocks": 4, "window_size": 32}


@cache
def measured(name: str, dtype: torch.dtype = torch.float32) -> tuple[Gate, dict[str, Tensor]]:
    """Gate of a case, and right results by name."""
    point = Point(SHAPE, 160, 3, "shared4", dtype, torch.device("cpu"))
    config, case = SHAPE.config(SMALL), CASES[name]
    problem = prepare(case, make_tensors(point, config), point, config, "reference")
    work = PROVIDERS["reference"].work(problem)
    return Gate(problem), problem.named(work.run(case.modes[-1]), work.leaves)


def gradients(
    gate: Gate, names: tuple[str, ...], attend: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Results of another attention over inputs of the gate's problem."""
    x = gate.problem.tensors
    leaves = [x[name].detach().requires_grad_() for name in names]
    out = attend(*leaves)
    found = torch.autograd.grad(out, leaves, x["dout"])
    return dict(zip(("out", *(f"d{name}" for name in names)), (out, *found), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(CASES))
def test_right_results_pass(name: str, dtype: torch.dtype) -> None:
    gate, results = measured(name, dtype)
    verdict = gate.check(results, backend="reference")
    assert verdict.correct, verdict.note
    assert set(verdict.errors) == (set(results) if name != "attention.choice" else set())
    assert gate.check(results, backend="reference") == verdict


def test_a_result_that_nothing_is_compared_with_is_held_back() -> None:
    gate, results = measured("attention.window")
    verdict = gate.check(backend="reference", results={**results, "dk_slc": results["dk_win"]})
    assert (verdict.correct, verdict.note) == (False, "dk_slc: nothing to compare with")


def altered(name: str, which: str, change: Callable[[Tensor], Tensor]) -> Verdict:
    gate, results = measured(name)
    return gate.check(
        backend="reference", results={**results, which: change(results[which].detach().clone())}
    )


def one_infinite(x: Tensor) -> Tensor:
    x.flatten()[x.numel() // 3] = torch.inf  # on no sampled row
    return x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: 1.001 * x,
    "one infinite": one_infinite,
    "neighbours": lambda x: x.roll(1, dims=0 if x.ndim == 3 else 1),
    "other group": lambda x: x.flip(-2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"attention.choice"}))
def test_a_wrong_result_is_held_back(name: str, change: str) -> None:
    for which in (*CASES[name].outputs, *(f"d{leaf}" for leaf in CASES[name].inputs)):
        verdict = altered(name, which, CHANGES[change])
        assert verdict.correct is False
        assert f"{which}:" in str(verdict.note)


def test_a_window_that_is_one_token_too_long_is_held_back() -> None:
    gate, results = measured("attention.window")
    longer = SHAPE.config({**SMALL, "window_size": 33})
    names = ("q", "k_win", "v_win")
    wrong = gradients(gate, names, lambda q, k, v: window_attention(q, k, v, longer)[0])
    for name, result in wrong.items():
        assert gate.check(backend="reference", results={**results, name: result}).correct is False


def test_a_branch_that_is_missing_is_held_back() -> None:
    gate, results = measured("attention")
    config = SHAPE.config({**SMALL, "branches": ("cmp", "slc")})
    (wrong,) = CASES["attention"].call(gate.problem.tensors, config, "reference")
    assert gate.check({"out": results["out"]}, backend="reference").correct
    assert gate.check({"out": wrong}, backend="reference").correct is False


def test_dense_attention_is_compared_with_dense_attention() -> None:
    gate, results = measured("attention")

    def dense(is_causal: bool) -> Callable[..., Tensor]:
        def attend(*leaves: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in leaves)
            out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
            return out.transpose(1, 2)

        return attend

    names = ("q", "k_slc", "v_slc")
    assert gate.check(gradients(gate, names, dense(True)), dense=True).correct
    unmasked = gradients(gate, names, dense(False))["out"]
    for wrong in (results["out"], unmasked):
        assert gate.check({"out": wrong}, dense=True).correct is False


# --- Selection
def with_ids(sequence: int, row: int, head: int, ids: list[int]) -> Callable[[Tensor], Tensor]:
    """Other block indices for one query and head."""

    def change(block_indices: Tensor) -> Tensor:
        block_indices[sequence, row, head] = torch.tensor(ids)
        return block_indices

    return change


def dropped(ids: Tensor) -> Tensor:
    """The best of the blocks that are not forced is left out."""
    ids[0, 150, 1, 1:] = torch.cat((ids[0, 150, 1, 2:], torch.tensor([-1])))
    return ids


def worse(ids: Tensor) -> Tensor:
    """All queries select the first, the second and the last two blocks."""
    current = torch.arange(160)[None, :, None] // 16
    crowded = (current >= 4).expand(ids.shape[:3])
    made = torch.stack((0 * current, 0 * current + 1, current - 1, current), -1).expand(ids.shape)
    return torch.where(crowded[..., None], made, ids).int()


WRONG = (
    (with_ids(0, 100, 0, [6, 5, 1, 0]), "not ascending"),
    (with_ids(1, 20, 0, [0, 1, 2, -1]), "a block outside"),  # not sampled, and 20 // 16 is 1
    (with_ids(1, 159, 1, [1, 2, 8, 9]), "differ from fp64"),  # a forced block is missing
    (with_ids(0, 40, 0, [0, -1, 1, 2]), "not ascending"),
    (with_ids(0, 100, 0, [0, 0, 5, 6]), "not ascending"),
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
    crowded = (
        160 - 64
    )  # queries with more candidates than four; three of their four blocks are forced
    assert 1 - crowded / 160 / 4 - 0.02 < found < 1 - 0.3 * crowded / 160 / 4


def test_an_approximation_is_held_to_its_own_selection() -> None:
    """And finds a part of the exact one."""
    gate, results = measured("attention.choice")
    problem = replace(gate.problem, config=SHAPE.config({**SMALL, "score_precision": "fp8"}))
    approximate = Gate(problem)
    (found,) = PROVIDERS["reference"].work(problem).run("fwd")
    assert approximate.check({"block_indices": found}).correct
    assert 0.9 < approximate.recall(found) < 1
    assert approximate.check({"block_indices": results["block_indices"]}).correct is False
    assert approximates(problem.config)
    assert not approximates(gate.problem.config)
