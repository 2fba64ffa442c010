"""The gate lets right results pass and holds back each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa import NSAConfig, window_attention
from nsa.bench.attention import PROVIDERS
from nsa.bench.cases import CASES, Point, make_tensors, prepare
from nsa.bench.gate import Gate, approximates

SMALL = NSAConfig(4, 2, 16, 32, 8, 4, 16, num_selected_blocks=4, window_size=32)


BY_TOKEN = replace(SMALL, scores="token_max")
INDEX = replace(SMALL, scores="index", index_dim=32, index_keys="shared")
SHARED = replace(SMALL, share_kv=True)
RANKED = replace(INDEX, num_selected_blocks=7)  # four of them are ranked
UNCOMPRESSED = replace(BY_TOKEN, branches=("slc", "win"))


@cache
def measured(
    name: str, dtype: torch.dtype = torch.float32, config: NSAConfig = SMALL
) -> tuple[Gate, dict[str, Tensor]]:
    """Gate of a case, and right results by name."""
    point, case = Point("small", config, 160, 2, "shared4", dtype, torch.device("cpu")), CASES[name]
    problem = prepare(case, make_tensors(point), point, "reference")
    return Gate(problem), PROVIDERS["reference"].work(problem, case.modes[-1]).run()


def gradients(
    gate: Gate, names: tuple[str, ...], attend: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Results of another attention over inputs of the gate's problem."""
    x = gate.problem.tensors
    leaves = [x[name].detach().requires_grad_() for name in names]
    out = attend(*leaves)
    found = torch.autograd.grad(out, leaves, x["dout"])
    return dict(zip(("out", *(f"d{name}" for name in names)), (out, *found), strict=True))


@pytest.mark.parametrize(
    ("name", "config", "dtype"),
    [
        ("attention", BY_TOKEN, torch.bfloat16),
        ("attention.choice", BY_TOKEN, torch.float16),
        ("attention.selected", SMALL, torch.bfloat16),
        ("attention.compress", SMALL, torch.float16),
        ("attention", UNCOMPRESSED, torch.float32),
        ("attention", SHARED, torch.float32),
        ("attention.with_index_loss", RANKED, torch.bfloat16),
    ],
)
def test_right_results_pass(name, config, dtype):
    gate, results = measured(name, dtype, config)
    verdict = gate.check(results, backend="reference")
    assert verdict["correct"], verdict["note"]
    compared = set(results) - {"index_loss"}
    assert set(verdict["errors"]) == (compared if name != "attention.choice" else set())
    if dtype == torch.float32:
        assert gate.check(results, backend="reference") == verdict


def altered(
    name: str, which: str, change: Callable[[Tensor], Tensor], config: NSAConfig = SMALL
) -> str:
    """The error of the gate."""
    gate, results = measured(name, config=config)
    wrong = {**results, which: change(results[which].detach().clone())}
    verdict = gate.check(wrong, backend="reference")
    assert verdict["correct"] is False
    return str(verdict["note"])


def test_a_result_that_nothing_is_compared_with_is_rejected():
    gate, results = measured("attention.window")
    verdict = gate.check({**results, "dk_slc": results["dk_win"]}, backend="reference")
    assert not verdict["correct"]
    assert verdict["note"] == "attention.window dk_slc: nothing to compare with"


def one_infinite(x: Tensor) -> Tensor:
    x.flatten()[x.numel() // 3] = torch.inf  # on no sampled row
    return x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: 1.001 * x,
    "one infinite": one_infinite,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"attention.choice"}))
def test_a_wrong_result_is_rejected(name, change):
    results = [*CASES[name].outputs, *(f"d{leaf}" for leaf in CASES[name].inputs)]
    if CASES[name].is_whole:  # takes long: each result has one change, each branch's had all
        results = results[[*CHANGES].index(change) :: 2]
    config = SMALL
    if "index_loss" in CASES[name].outputs:
        config, results = RANKED, ["dq_idx", "dk_idx"]
    for which in results:
        assert f"{which}:" in altered(name, which, CHANGES[change], config)


def test_gradients_of_one_branch_for_shared_keys_are_rejected():
    own = measured("attention")[1]["dv_slc"]
    assert "dv_slc:" in altered("attention", "dv_slc", lambda _: own, SHARED)


def test_a_window_that_is_one_token_too_long_is_rejected():
    gate, results = measured("attention.window")
    longer = replace(SMALL, window_size=33)
    names = ("q", "k_win", "v_win")
    wrong = gradients(gate, names, lambda q, k, v: window_attention(q, k, v, longer)[0])
    for name, result in wrong.items():
        assert not gate.check({**results, name: result}, backend="reference")["correct"]


def test_a_branch_that_is_missing_is_rejected():
    gate, results = measured("attention")
    config = replace(SMALL, branches=("cmp", "slc"))
    wrong = CASES["attention"].call(gate.problem.tensors, config, "reference")
    assert gate.check({"out": results["out"]}, backend="reference")["correct"]
    assert not gate.check({"out": wrong}, backend="reference")["correct"]


def test_dense_attention_is_compared_with_dense_attention():
    gate, results = measured("attention")

    def dense(is_causal):
        def attend(*leaves):
            q, k, v = (x.transpose(1, 2) for x in leaves)
            out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
            return out.transpose(1, 2)

        return attend

    names = ("q", "k_slc", "v_slc")
    assert gate.check(gradients(gate, names, dense(True)), dense=True)["correct"]
    unmasked = gradients(gate, names, dense(False))["out"]
    for wrong in (results["out"], unmasked):
        assert not gate.check({"out": wrong}, dense=True)["correct"]


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


@pytest.mark.parametrize(
    ("change", "why", "config"),
    [*((*wrong, SMALL) for wrong in WRONG), (*WRONG[-1], BY_TOKEN)],
)
def test_a_wrong_selection_is_rejected(change, why, config):
    assert why in altered("attention.choice", "out", change, config)


def test_scores_of_another_kind_are_rejected():
    for config, other in ((SMALL, BY_TOKEN), (BY_TOKEN, INDEX), (INDEX, SMALL)):
        gate, _ = measured("attention.choice", config=config)
        verdict = gate.check(measured("attention.choice", config=other)[1], backend="reference")
        assert "differ from fp64" in verdict["note"]


def test_recall_counts_the_blocks_that_were_found():
    gate, results = measured("attention.choice")
    right = results["out"]
    assert gate.recall(right) == 1.0
    found = gate.recall(worse(right.clone()))
    crowded = 160 - 64  # queries with more candidates than four; three of four blocks are forced
    assert 1 - crowded / 160 / 4 - 0.02 < found < 1 - 0.3 * crowded / 160 / 4


@pytest.mark.parametrize("exact", [SMALL, BY_TOKEN], ids=["compressed", "token_max"])
def test_an_approximation_is_compared_with_its_own_selection(exact):
    """And finds a part of the exact one."""
    gate, results = measured("attention.choice", config=exact)
    config = replace(exact, score_precision="fp8")
    approximate = Gate(replace(gate.problem, point=replace(gate.problem.point, config=config)))
    found = PROVIDERS["reference"].work(approximate.problem, "fwd").run()
    assert approximate.check(found)["correct"]
    assert 0.9 < approximate.recall(found["out"]) < 1
    assert not approximate.check(results)["correct"]
    assert approximates(config)
    assert not approximates(exact)
