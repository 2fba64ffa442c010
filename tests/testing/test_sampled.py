"""Sampled values are rows of the reference, and the gate made of them fails for planted errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import select_blocks
from nsa.ops.selection.reference import coarse_keys
from nsa.testing import packed_offsets, sampled
from nsa.testing.sampled import Sample, sample_rows, sampled_selection
from tests.ops.cases import small
from tests.ops.public import RUNS, Case, Results, check_selection, scoring_keys, select

CONFIG = small(num_heads=6)
PACKED = ((130, 0, 1, 200, 7), None)
FEWER = ((257, 160, 7, 64), (9, 130, 7, 0))
FP8 = {"scores": "token_max", "score_precision": "fp8"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of a few rows, so that tests cross their edges."""
    monkeypatch.setattr(sampled, "PART_ELEMENTS", 2**13)


def case_of(lengths: Any = PACKED, dtype: Any = torch.float64, **changes: Any) -> Case:
    config = dataclasses.replace(CONFIG, **changes)
    lengths_k, lengths_q = lengths
    return Case(config, lengths_k, lengths_q, dtype=dtype, backend="reference")


def shuffled(count: int, part: int = 1) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(2))[: -(-count // part)]


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        (PACKED, {}),
        (FEWER, {"phi": "linear", "compress_rope": "none"}),
        (PACKED, {"phi": "mlp", "branches": ("cmp", "win")}),
        (FEWER, {"branches": ("slc",)}),
        (FEWER, {"scores": "token_max", "compress_rope": "none"}),
        (PACKED, {"scores": "token_max", "branches": ("slc", "win")}),
    ],
    ids=str,
)
def test_rows_are_those_of_the_reference(lengths, changes):
    """All rows in fp64, and some in any order; single operators: tests/ops/test_reference.py."""
    results = RUNS["whole"](case_of(lengths, **changes))
    results.check()
    results.check(shuffled(len(results.dout), 2), shuffled(results.num_keys, 3))


def fails(results: Results, name: str, planted: Tensor) -> None:
    """The gate over some rows of a result that is replaced."""
    rows, keys = torch.tensor([5, 100, 250]), torch.arange(0, results.num_keys, 7)
    results.check(rows, keys)
    of_queries, of_keys = dict(results.of_queries), dict(results.of_keys)
    (of_queries if name in of_queries else of_keys)[name] = planted
    wrong = dataclasses.replace(results, of_queries=of_queries, of_keys=of_keys)
    with pytest.raises(AssertionError, match=f"{results.operator} {name}"):
        wrong.check(rows, keys)


@pytest.mark.parametrize("branch", ["compressed", "selected", "window"])
def test_gate_fails_for_planted_errors(branch):
    """Lse of a masked row, queries that add nothing, a dropped block; more: bench/test_gate.py."""
    results = RUNS[branch](case_of(dtype=torch.bfloat16))
    lse = results.of_queries["lse"].clone()
    lse[5] = -torch.inf if lse[5].isfinite().all() else -1e30
    fails(results, "lse", lse)
    few = results.dout * (torch.arange(338) < 300)[:, None, None]
    fewer = RUNS[branch](results.case, results.x, few)
    for name in ("dk", "dv"):
        fails(results, name, fewer.of_keys[name])
    if branch == "selected":
        ids = results.inputs["block_indices"].clone()
        current = torch.tensor([5, 100, 119])[:, None, None] // 16
        seen = (ids[[5, 100, 250]] >= 0) & (ids[[5, 100, 250]] <= current)
        row, head, slot = seen.nonzero()[0].tolist()
        ids[[5, 100, 250][row], head, slot] = -1
        dropped = RUNS[branch](results.case, results.x, results.dout, ids)
        fails(results, "out", dropped.of_queries["out"])


# ------------------------------------------------------------------------------
# selection


def selection(**changes: Any) -> tuple[Case, Tensor, Tensor, Sample, Tensor]:
    """A case, its queries and keys, all rows, and the reference's selection."""
    case = case_of(FEWER, **changes)
    x = case.inputs()
    k = scoring_keys(case, x)
    rows = torch.arange(len(x.q))
    sample = Sample(rows, rows[:0], x.cu_seqlens_q, x.cu_seqlens_k)
    return case, x.q, k, sample, select(case, x.q, k, x)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_init_blocks": 0, "num_local_blocks": 1},
        {"num_selected_blocks_table": ((-1, 100, 3),)},
        {"coarse_block_size": 32, "num_coarse_blocks": 5},
        {"score_precision": "fp8"},
        {"scores": "token_max"},
        {**FP8, "num_init_blocks": 2, "num_selected_blocks": 6},
    ],
    ids=str,
)
def test_selection_is_that_of_the_reference(changes):
    case, q, k, sample, expected = selection(**changes)
    rows = shuffled(len(q))
    found = sampled_selection(q, k, sample._replace(queries=rows), case.config)
    assert float(found.clear.double().mean()) > 0.9
    assert torch.equal(found.indices[found.clear], expected[rows][found.clear])
    agreement = found.agreement(expected[rows])
    assert (agreement.rows, agreement.against) == (2 * len(q), 0)
    assert agreement.near <= int((~found.clear).sum())
    assert found.agreement(expected[rows].flip(1)).against > 0  # of the other KV head


def test_coarse_blocks_are_ranked_by_rounded_means(monkeypatch):
    """bf16 means, as stored, agree; exact means of the same keys select other blocks."""
    monkeypatch.setattr(sampled, "PART_ELEMENTS", 2**20)
    config = small(coarse_block_size=32, num_coarse_blocks=5)
    case = Case(config, (400,), dtype=torch.bfloat16, backend="reference", seed=3)
    check_selection(case)

    def exact_means(k: Tensor, *rest: Any) -> Any:
        return coarse_keys(k.double(), *rest)

    monkeypatch.setattr("nsa.ops.selection.reference.coarse_keys", exact_means)
    with pytest.raises(AssertionError, match="rows differ from fp64"):
        check_selection(case)


@pytest.mark.parametrize("scores", ["compressed", "token_max"])
def test_ties_are_nowhere_clear_and_near_if_they_differ(scores):
    """Inner blocks of the last queries of 257 tokens tie exactly if q is 0."""
    case, q, k, sample, other = selection(scores=scores)
    rows = torch.arange(9)
    sample = sample._replace(queries=rows)
    found = sampled_selection(torch.zeros_like(q), k, sample, case.config)
    assert not bool(found.clear.any())
    assert found.indices[0, 0].tolist() == [0, 1, 14, 15]
    agreement = found.agreement(other[rows])
    assert agreement.against == 0
    assert agreement.near > 0


@pytest.mark.parametrize(("loud", "most"), [(1.0, 1), (10.0, 1), (100.0, 9)])
def test_rounding_of_large_products(loud, most):
    """fp32 agrees with fp64 however large products are; keys with an error of 1 per cent do not.

    With the largest, some scores are too small for fp32, and tie.
    """
    case, q, k, sample, _ = selection(scores="token_max", dtype=torch.float32)
    q = loud * q
    offsets: Any = {"cu_seqlens_q": sample.cu_q, "cu_seqlens_k": sample.cu_k}
    found = sampled_selection(q, k, sample, case.config)
    chosen = select_blocks(q, k, None, case.config, **offsets)
    assert found.agreement(chosen).against == 0
    assert found.agreement(chosen).near <= most
    noise = 1 + 0.01 * torch.randn(k.shape, generator=torch.Generator().manual_seed(3))
    wrong = select_blocks(q, k * noise, None, case.config, **offsets)
    assert found.agreement(wrong).against > 0


# ------------------------------------------------------------------------------
# rows


def test_sampled_rows_hold_the_edges():
    cu = packed_offsets([0, 5, 0, 1000, 3])
    rows = sample_rows(cu, 40)
    assert {0, 4, 5, 1004, 1005, 1007} <= set(rows.tolist())
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert 30 < rows.numel() <= 40
    assert sample_rows(packed_offsets([0, 0]), 4).numel() == 0
    assert sample_rows(packed_offsets([1]), 8).tolist() == [0]
