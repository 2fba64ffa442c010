"""Sampled values are rows of the reference, and the gate made of them fails for planted errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import select_blocks
from nsa.testing import make_inputs, packed_offsets, sampled
from nsa.testing.sampled import Sample, sample_rows, sampled_selection, sampled_values
from tests.ops.cases import small
from tests.ops.public import CHECKS, RUNS, Case, Results, scoring_keys, select

CONFIG = small(num_heads=6)
PACKED = ((130, 0, 1, 200, 7), None)
FEWER = ((257, 160, 7, 64), (9, 130, 7, 0))
BRANCHES = ("compressed", "selected", "window")


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


@pytest.mark.parametrize("lengths", [PACKED, FEWER], ids=["packed", "fewer queries"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((branch, {}) for branch in BRANCHES),
        ("whole", {}),
        ("whole", {"phi": "linear", "compress_rope": "none"}),
        ("whole", {"phi": "mlp", "branches": ("cmp", "win")}),
        ("whole", {"branches": ("slc",)}),
        ("whole", {"scores": "token_max", "compress_rope": "none"}),
        ("whole", {"scores": "token_max", "branches": ("slc", "win")}),
    ],
    ids=str,
)
def test_rows_are_those_of_the_reference(name, changes, lengths):
    """All rows in fp64, and some in any order."""
    results = RUNS[name](case_of(lengths, **changes))
    results.check()
    results.check(shuffled(len(results.dout), 2), shuffled(results.num_keys, 3))


@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
def test_compression_is_that_of_the_reference(phi):
    CHECKS["compress"](case_of(phi=phi))


def fails(results: Results, name: str, planted: Tensor) -> None:
    """The gate over some rows of a result that is replaced."""
    rows, keys = torch.tensor([5, 100, 250]), torch.arange(0, results.num_keys, 7)
    results.check(rows, keys)
    of_queries, of_keys = dict(results.of_queries), dict(results.of_keys)
    (of_queries if name in of_queries else of_keys)[name] = planted
    wrong = dataclasses.replace(results, of_queries=of_queries, of_keys=of_keys)
    with pytest.raises(AssertionError, match=f"{results.operator} {name}"):
        wrong.check(rows, keys)


# A kernel that differs in its pattern: the window is a token longer or shorter, blocks are seen
# when their last token is still missing, the last selected block is dropped.
WRONG_PATTERNS: dict[str, dict[str, dict[str, Any]]] = {
    "window": {"longer": {"window_size": 33}, "shorter": {"window_size": 31}},
    "compressed": {"future": {"compress_block_size": 4}},
    "selected": {},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("branch", BRANCHES)
def test_gate_fails_for_planted_errors(branch, dtype):
    """Neighbours' rows, lse of a masked row, a sign, queries that add nothing, scale, pattern."""
    results = RUNS[branch](case_of(dtype=dtype))
    out, lse, dq = (results.of_queries[name].clone() for name in ("out", "lse", "dq"))
    lse[5] = -torch.inf if lse[5].isfinite().all() else -1e30
    dq[100] *= -1
    for name, wrong in (("out", out.roll(1, 0)), ("lse", lse), ("dq", dq)):
        fails(results, name, wrong)
    few = results.dout * (torch.arange(338) < 300)[:, None, None]
    fewer = RUNS[branch](results.case, results.x, few)
    for name in ("dk", "dv"):
        fails(results, name, fewer.of_keys[name])
    louder = dataclasses.replace(results.x, q=1.05 * results.x.q)
    fails(results, "out", RUNS[branch](results.case, louder, results.dout).of_queries["out"])
    for changes in WRONG_PATTERNS[branch].values():
        case = case_of(dtype=dtype, **changes)
        other = RUNS[branch](case, results.x, results.dout)
        fails(results, "out", other.of_queries["out"])
    if branch == "selected":
        ids = results.inputs["block_indices"].clone()
        current = torch.tensor([5, 100, 119])[:, None, None] // 16
        seen = (ids[[5, 100, 250]] >= 0) & (ids[[5, 100, 250]] <= current)
        row, head, slot = seen.nonzero()[0].tolist()
        ids[[5, 100, 250][row], head, slot] = -1
        dropped = RUNS[branch](results.case, results.x, results.dout, ids)
        fails(results, "out", dropped.of_queries["out"])


def test_gate_of_the_whole():
    results = RUNS["whole"](case_of(dtype=torch.bfloat16, phi="linear"))
    fails(results, "dgates", results.of_queries["dgates"].flip(-1))
    fails(results, "dk_cmp_raw", results.of_keys["dk_cmp_raw"].roll(1, 0))


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
        {"scores": "token_max", "score_precision": "fp8", "num_init_blocks": 2},
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


def free_block(ids: list[int]) -> int:
    """A block that is neither selected nor forced, of a query in the tenth block."""
    return next(block for block in range(1, 8) if block not in ids)


# Wrong selections of the query at position 159 of the second sequence: blocks 0 to 9.
WRONG: dict[str, Callable[[list[int]], list[int]]] = {
    "forced block": lambda ids: sorted([*ids[1:], free_block(ids)]),
    "lower block": lambda ids: sorted([ids[0], free_block(ids), *ids[2:]]),
    "one block less": lambda ids: [ids[0], *ids[2:], -1],
    "future": lambda ids: [*ids[:-1], 10],
    "repeated": lambda ids: [ids[0], ids[0], *ids[2:]],
    "descending": lambda ids: ids[::-1],
}


@pytest.mark.parametrize("scores", ["compressed", "token_max"])
@pytest.mark.parametrize("error", WRONG)
def test_wrong_selections_are_seen(error, scores):
    case, q, k, sample, expected = selection(scores=scores)
    found = sampled_selection(q, k, sample, case.config)
    assert found.agreement(expected).against == 0
    assert found.agreement(expected.flip(1)).against > 0  # of the other KV head
    wrong = expected.clone()
    wrong[138, 0] = torch.tensor(WRONG[error](expected[138, 0].tolist()))
    if error in ("future", "repeated", "descending"):
        with pytest.raises(AssertionError, match="block_indices"):
            found.agreement(wrong)
    else:
        assert found.agreement(wrong).against > 0


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


def test_sequences_too_short_for_a_block():
    """No compressed row at all: outputs of the branch are 0, gradients too."""
    x, rows = make_inputs(CONFIG, (5, 0, 7)), torch.arange(12)
    config = dataclasses.replace(CONFIG, branches=("cmp",))
    given = {**vars(x), "dout": torch.ones(12, 6, 32, dtype=torch.float64)}
    sample = Sample(rows, rows, x.cu_seqlens_q, x.cu_seqlens_k)
    found = sampled_values("attention", given, sample, config, torch.float64)
    assert set(found) == {"out", "dq", "dgates", "dk_cmp_raw", "dv_cmp_raw"}
    assert all(len(values) == 12 and not bool(values.any()) for _, values in found.values())
