"""The suite of every backend: operators against fp64, and the properties of docs/semantics.md.

A test module that imports everything from here runs the suite on its ``SETTING``: the references,
kernels in Triton's interpreter, or kernels on a GPU. Results are compared bit for bit, or within
the error budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa import (
    Rope,
    apply_rope,
    compress,
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops._operator import Call
from nsa.ops._packed import query_positions
from nsa.ops.attention import AttentionResult, BranchInputs, run_attention
from nsa.testing import assert_within_budget
from nsa.testing.budget import CEILING
from tests.ops.cases import plain_attention
from tests.ops.public import (
    ALGORITHMS,
    CHECKS,
    RUNS,
    Case,
    Results,
    by_token,
    leaves_of,
    named_tensors,
    run_whole,
)

SELECTIONS = ("choice", "token_max")
OF_QUERIES = ("q", "gates", "block_indices")


# Tokens of a case by name, and what an operator makes of them: every result has one row for each
# query.
Tokens = dict[str, Tensor]


def tokens_of(case: Case, seed: int = 0) -> Tokens:
    x = dataclasses.replace(case, seed=seed).inputs()
    return {**named_tensors(x), "block_indices": case.block_indices(seed)}


def offsets_of(case: Case) -> dict[str, Any]:
    return case.offsets(case.inputs())


def rows_cmp(x: Tokens, case: Case) -> list[Tensor]:
    cu = offsets_of(case)
    k, v = (
        compress(x[n], None, case.config, cu["cu_seqlens_k"], backend=case.backend)[0]
        for n in ("k_cmp_raw", "v_cmp_raw")
    )
    out, lse = compressed_attention(x["q"], k, v, case.config, **cu)
    assert out is not None
    return [out, lse]


def rows_selection(x: Tokens, case: Case) -> list[Tensor]:
    cu = offsets_of(case)
    k, _ = compress(x["k_cmp_raw"], None, case.config, cu["cu_seqlens_k"], backend=case.backend)
    _, lse = compressed_attention(x["q"], k, None, case.config, **cu)
    return [select_blocks(x["q"], k, lse, case.config, **cu)]


def rows_token_max(x: Tokens, case: Case) -> list[Tensor]:
    given, options = (x["q"], x["k_slc"], None), offsets_of(case)
    configs = (by_token(case.config, score_precision=name) for name in ("exact", "fp8"))
    return [select_blocks(*given, config, **options) for config in configs]


def rows_slc(x: Tokens, case: Case) -> list[Tensor]:
    tensors = (x["q"], x["k_slc"], x["v_slc"], x["block_indices"])
    return list(
        selected_attention(*tensors, case.config, algorithm=case.algorithm, **offsets_of(case))
    )


def rows_win(x: Tokens, case: Case) -> list[Tensor]:
    return list(window_attention(x["q"], x["k_win"], x["v_win"], case.config, **offsets_of(case)))


def rows_whole(x: Tokens, case: Case) -> list[Tensor]:
    given: Any = {name: tensor for name, tensor in x.items() if name != "block_indices"}
    options: Any = {"rope": Rope.from_config(case.config), **offsets_of(case)}

    def run(inputs: BranchInputs, call: Call, backend: str) -> AttentionResult:
        call = dataclasses.replace(call, algorithm=case.algorithm)
        return run_attention(inputs, call, backend)

    with mock.patch("nsa.attention.run_attention", run):
        return [native_sparse_attention(**given, phi=None, config=case.config, **options)]


def rows_shared(x: Tokens, case: Case) -> list[Tensor]:
    return rows_whole({**x, "k_win": x["k_slc"], "v_win": x["v_slc"]}, case)


OPERATORS: dict[str, Callable[[Tokens, Case], list[Tensor]]] = {
    "compressed": rows_cmp,
    "choice": rows_selection,
    "token_max": rows_token_max,
    "selected": rows_slc,
    "gathered": rows_slc,
    "window": rows_win,
    "whole": rows_whole,
    "shared": rows_shared,
}


def run_rows(name: str, x: Tokens, case: Case) -> list[Tensor]:
    """Results of an operator."""
    algorithm = ALGORITHMS.get(name, case.algorithm)
    return OPERATORS[name](x, dataclasses.replace(case, algorithm=algorithm))


def fixed(case: Case) -> Case:
    """The case with one algorithm of the selected branch.

    Otherwise it may change with the selected blocks, and another algorithm rounds differently.
    """
    return dataclasses.replace(case, algorithm="tiled") if case.algorithm == "auto" else case


def with_gradients(name: str, x: Tokens, case: Case) -> Tokens:
    """Results, and the gradient of each token tensor that has one."""
    leaves = {
        key: tensor if key == "block_indices" else leaves_of(tensor)[0] for key, tensor in x.items()
    }
    results = run_rows(name, leaves, case)
    found = {f"result {i}": result.detach() for i, result in enumerate(results)}
    if name in SELECTIONS:
        return found
    results[0].backward(case.normal(*results[0].shape, seed=5))
    return {**found, **{key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}}


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of every bit, NaN included."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


# ------------------------------------------------------------------------------
# the suite


@dataclasses.dataclass(frozen=True)
class Setting:
    """Cases of one backend.

    Attributes:
        cases: by name; every operator is checked on each.
        likes: by name; dtype, device, backend and pattern of the properties.
        one: tokens of one sequence that is longer than the selected blocks.
        times: positions of that sequence, at edges of blocks.
        packed: tokens of sequences, the second of them short.
        covered: tokens that the selected blocks cover.
        left_out: names of operators that the backend does not have.
        fewer: keys in front of the first query, in the tests of causality.
    """

    cases: Mapping[str, Case]
    likes: Mapping[str, Case]
    one: int
    times: tuple[int, ...]
    packed: tuple[int, ...]
    covered: int
    left_out: frozenset[str] = frozenset()
    fewer: tuple[int, ...] = (0,)

    def case(self, like: str, *lengths: int) -> Case:
        return dataclasses.replace(self.likes[like], lengths_k=lengths, lengths_q=None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    setting: Setting = metafunc.module.SETTING
    for argument, values in {
        "checked": CHECKS,
        "case": setting.cases,
        "operator": OPERATORS,
        "like": setting.likes,
        "algorithm": ALGORITHMS,
    }.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, [x for x in values if x not in setting.left_out])


@pytest.fixture
def setting(request):
    found: Setting = request.module.SETTING
    return found


# Calls without a token: of no sequence, of empty ones, and of no query before cached keys.
EMPTY: dict[str, dict[str, Any]] = {
    "no batch": {"lengths_k": (), "dense": True},
    "empty batch": {"lengths_k": (0, 0), "dense": True},
    "no sequence": {"lengths_k": ()},
    "no token": {"lengths_k": (0, 0)},
    "no query": {"lengths_k": (7, 33), "lengths_q": (0, 0)},
}


@pytest.mark.parametrize("changes", EMPTY.values(), ids=EMPTY)
def test_operator_without_a_token(checked, changes, setting):
    """Results are empty; gradients are 0, never None."""
    like = next(iter(setting.likes.values()))
    CHECKS[checked](dataclasses.replace(like, **changes))


def test_operator(checked, case, setting):
    CHECKS[checked](setting.cases[case])


def test_causality_bit_for_bit(operator, like, setting):
    """Other values for all tokens after t change no bit up to t."""
    for fewer in setting.fewer:
        case = fixed(setting.case(like, setting.one))
        case = dataclasses.replace(case, lengths_q=(setting.one - fewer,))
        x, other = tokens_of(case), tokens_of(case, seed=1)
        expected = run_rows(operator, x, case)
        changed_later = False
        for t in setting.times:
            mixed = {}
            for key, tensor in x.items():
                cut = t + 1 - fewer if key in OF_QUERIES else t + 1
                later = (1 if key == "block_indices" else 50) * other[key][cut:]
                mixed[key] = torch.cat((tensor[:cut], later))
            for actual, wanted in zip(run_rows(operator, mixed, case), expected, strict=True):
                rows = slice(t + 1 - fewer)
                assert equal_bits(actual[rows], wanted[rows]), f"a result up to {t} changed"
                changed_later |= not equal_bits(actual, wanted)
        assert changed_later


def test_same_bits_on_every_run(operator, like, setting):
    case = setting.case(like, *setting.packed)
    x = tokens_of(case)
    first = with_gradients(operator, x, case)
    for _ in range(4 if case.device == "cuda" else 1):
        for key, tensor in with_gradients(operator, x, case).items():
            assert equal_bits(first[key], tensor), f"{key} differs from run to run"


def test_nan_reaches_no_other_sequence(operator, like, setting):
    """The second sequence is all NaN: results and gradients of the others keep every bit."""
    case = fixed(setting.case(like, *setting.packed))
    x = tokens_of(case)
    start, end = case.lengths_k[0], sum(case.lengths_k[:2])
    dirty = {key: tensor.clone() for key, tensor in x.items()}
    for key, tensor in dirty.items():
        if key != "block_indices":
            tensor[start:end] = torch.nan
    clean, other = (with_gradients(operator, y, case) for y in (x, dirty))
    for key, tensor in clean.items():
        for part in (slice(start), slice(end, None)):
            assert equal_bits(tensor[part], other[key][part]), f"{key} without NaN changed"
        if key == "result 0" and operator not in SELECTIONS:
            assert bool(other[key][start:end].isnan().any())


def test_full_coverage_is_dense_attention(like, setting):
    """If blocks or the window cover the sequence, the branch is dense causal attention."""
    length = setting.covered
    case = setting.case(like, length)
    config = case.config
    wide = dataclasses.replace(case, config=dataclasses.replace(config, window_size=length))
    ids = torch.arange(config.num_selected_blocks, dtype=torch.int32, device=case.device)
    ids = ids.expand(length, config.num_kv_heads, -1).contiguous()
    visible = torch.ones(length, length, dtype=torch.bool, device=case.device).tril()[:, None]
    visible = visible.expand(-1, config.num_kv_heads, -1)
    chosen = [RUNS[name](case, block_indices=ids) for name in ALGORITHMS]
    for results in (*chosen, RUNS["window"](wide)):
        q, k, v, dout = (results.inputs[name] for name in ("q", "k", "v", "dout"))
        values = {}
        for dtype in (case.dtype, torch.float64):
            leaves = leaves_of(q.to(dtype), k.to(dtype), v.to(dtype))
            out = plain_attention(leaves[0], leaves[1], leaves[2], visible, config.head_dim**-0.5)
            grads = torch.autograd.grad(out, leaves, dout.to(dtype))
            values[dtype] = (out.detach(), *grads)
        actual = {**results.of_queries, **results.of_keys}
        for name, plain, exact in zip(("out", "dq", "dk", "dv"), *values.values(), strict=True):
            what = f"{results.operator} {name}"
            assert_within_budget(actual[name], plain, exact, what, case.factor)


def test_one_hot_gates_are_one_branch(like, setting):
    """A gate of 1 on one branch and 0 on the others: the others add nothing and get no gradient."""
    case = setting.case(like, setting.covered)
    for index, branch in enumerate(("cmp", "slc", "win")):
        x = case.inputs()
        gates = torch.zeros_like(x.gates)
        gates[..., index] = 1
        results = run_whole(case, dataclasses.replace(x, gates=gates))
        results.check()
        for key, grad in results.of_keys.items():
            assert bool(grad.any()) == (branch in key), f"one-hot {branch}: gradient of {key}"


def test_a_block_that_is_named_again_counts_once(algorithm, like, setting):
    """Results have the bits of the indices without the repetition, int64 ones too."""
    case = setting.case(like, *setting.packed)
    ids = case.block_indices()
    repeated = torch.cat((ids, ids.roll(1, -1)), dim=-1).long()
    repeated = torch.where(repeated < 0, 2**32 + 1, repeated)  # 32 bits would take it for block 1
    once = torch.cat((ids, torch.full_like(ids, -1)), dim=-1)
    found, expected = (RUNS[algorithm](case, block_indices=y) for y in (repeated, once))
    for x, y in ((found.of_queries, expected.of_queries), (found.of_keys, expected.of_keys)):
        assert all(torch.equal(x[key], y[key]) for key in y), algorithm


def test_unchosen_blocks_have_no_gradient(algorithm, like, setting):
    """dK and dV are exactly 0 for blocks that no query selects, and only there."""
    case, length = setting.case(like, setting.one), setting.one
    size, heads = case.config.block_size, case.config.num_kv_heads
    num_blocks = -(-length // size)
    # Head 0 takes block 0 and even blocks, the others odd ones; never the query's own block.
    odd = (torch.arange(heads, device=case.device) > 0).int()[None, :, None]
    ids = 2 * torch.arange(case.config.num_selected_blocks, device=case.device) + odd
    current = torch.arange(length, device=case.device)[:, None, None] // size
    ids = torch.where(ids < current, ids, -1).int().contiguous()
    results = RUNS[algorithm](case, block_indices=ids)
    results.check()
    found = {(h, b) for h in range(heads) for b in ids[:, h].unique().tolist() if b >= 0}
    assert 0 < len(found) < heads * num_blocks
    for name, grad in results.of_keys.items():
        for head in range(heads):
            for block in range(num_blocks):
                part = grad[block * size : (block + 1) * size, head]
                assert bool(part.any()) == ((head, block) in found), f"{name} {head} {block}"


def test_shifted_positions_change_nothing(setting):
    """The test is in fp32, with a base whose angles are exact."""
    like = next(case for case in setting.likes.values() if case.dtype == torch.float32)
    config = dataclasses.replace(like.config, rope_theta=256.0, rotary_dim=16)
    case = dataclasses.replace(like, config=config, lengths_k=(setting.one,), lengths_q=None)
    x = case.inputs()
    positions = query_positions(x.q.shape[0], x.cu_seqlens_q, x.cu_seqlens_k)
    found: list[Results] = []
    for offset in (0, 512):
        rope = dataclasses.replace(Rope.from_config(config), position_offset=offset)
        q, k_slc, k_win = (apply_rope(y, positions, rope) for y in (x.q, x.k_slc, x.k_win))
        moved = dataclasses.replace(x, q=q, k_slc=k_slc, k_win=k_win)
        found.append(run_whole(case, moved, rope=rope))
    assert torch.equal(*(results.inputs["block_indices"] for results in found))
    for key in ("out", "dgates"):
        a, b = (results.of_queries[key].double() for results in found)
        assert float((a - b).norm() / a.norm()) <= CEILING[torch.float32], key
