"""Properties of docs/semantics.md through the public operators: any backend, device and dtype.

Results are compared bit for bit, or within the error budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

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
from nsa.testing import PackedInputs, assert_within_budget
from nsa.testing.budget import CEILING
from nsa.testing.sampled import SampledWhole
from tests.ops.cases import plain_attention
from tests.ops.public import (
    ALGORITHMS,
    RUNS,
    Case,
    Results,
    every,
    leaves_of,
    named_tensors,
    run_whole,
)

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


OPERATORS: dict[str, Callable[[Tokens, Case], list[Tensor]]] = {
    "compressed": rows_cmp,
    "choice": rows_selection,
    "selected": rows_slc,
    "gathered": rows_slc,
    "window": rows_win,
    "whole": rows_whole,
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
    if name == "choice":
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


def check_causality(name: str, case: Case, times: Sequence[int]) -> None:
    """Other values for all tokens after t change no bit up to t; of one sequence."""
    case = fixed(case)
    x, other = tokens_of(case), tokens_of(case, seed=1)
    expected = run_rows(name, x, case)
    first = case.lengths_k[0] - case.queries[0]
    changed_later = False
    for t in times:
        mixed = {}
        for key, tensor in x.items():
            cut = t + 1 - first if key in OF_QUERIES else t + 1
            mixed[key] = torch.cat(
                (tensor[:cut], (1 if key == "block_indices" else 50) * other[key][cut:])
            )
        for actual, wanted in zip(run_rows(name, mixed, case), expected, strict=True):
            assert equal_bits(actual[: t + 1 - first], wanted[: t + 1 - first]), (
                f"{name}: a result up to {t} changed"
            )
            changed_later |= not equal_bits(actual, wanted)
    assert changed_later


def check_same_bits(name: str, case: Case, runs: int = 3) -> None:
    """Results and gradients of every run are the same bits."""
    x = tokens_of(case)
    first = with_gradients(name, x, case)
    for _ in range(runs - 1):
        for key, tensor in with_gradients(name, x, case).items():
            assert equal_bits(first[key], tensor), f"{name}: {key} differs from run to run"


def check_nan_isolation(name: str, case: Case, poisoned: int) -> None:
    """One sequence is all NaN: results and gradients of the others keep every bit."""
    case = fixed(case)
    x = tokens_of(case)
    dirty = {key: tensor.clone() for key, tensor in x.items()}
    keep = {}
    for key, tensor in dirty.items():
        lengths = case.queries if key in OF_QUERIES else case.lengths_k
        start = sum(lengths[:poisoned])
        if key != "block_indices":
            tensor[start : start + lengths[poisoned]] = torch.nan
        rows = torch.arange(tensor.shape[0], device=tensor.device)
        keep[key] = (rows < start) | (rows >= start + lengths[poisoned])
    clean, other = (with_gradients(name, y, case) for y in (x, dirty))
    for key, tensor in clean.items():
        others = keep["q" if key.startswith("result") else key]
        assert equal_bits(tensor[others], other[key][others]), (
            f"{name}: {key} of a sequence without NaN changed"
        )
        if key == "result 0" and name != "choice":
            assert bool(other[key][~others].isnan().any())


def _part(x: PackedInputs, case: Case, sequence: int) -> tuple[Case, PackedInputs]:
    """One sequence of a case as a case of its own."""
    q, k = (
        slice(sum(n[:sequence]), sum(n[: sequence + 1])) for n in (case.queries, case.lengths_k)
    )
    lengths_k, lengths_q = (case.lengths_k[sequence],), (case.queries[sequence],)
    alone = dataclasses.replace(case, lengths_k=lengths_k, lengths_q=lengths_q)
    tokens = named_tensors(x)
    tensors = {name: y[q if name in OF_QUERIES else k] for name, y in tokens.items()}
    return alone, dataclasses.replace(alone.inputs(), **tensors)


def _selection_of(results: Results) -> Tensor:
    assert isinstance(results.sampled, SampledWhole)
    assert results.sampled.block_indices is not None
    return results.sampled.block_indices


def check_packed_equals_separate(name: str, case: Case) -> None:
    """The sequences of a batch, run one by one, meet the budget of the batch."""
    x = case.inputs()
    packed = RUNS[name](case)
    packed.check()
    parts: list[Results] = []
    for sequence, length in enumerate(case.queries):
        alone, inputs = _part(x, case, sequence)
        first = sum(case.queries[:sequence])
        given: dict[str, Any] = {"dout": packed.dout[first : first + length]}
        if name in ALGORITHMS:
            given["block_indices"] = case.block_indices()[first : first + length]
        parts.append(RUNS[name](alone, inputs, **given))
    joined = dataclasses.replace(
        packed,
        name=f"separate {name}",
        of_queries={
            key: torch.cat([part.of_queries[key] for part in parts]) for key in packed.of_queries
        },
        of_keys={
            key: torch.cat([part.of_keys[key][: part.num_keys] for part in parts])
            for key in packed.of_keys
        },
        of_weights={},
    )
    if isinstance(packed.sampled, SampledWhole):
        ids = torch.cat([_selection_of(part) for part in parts])
        joined.sampled = dataclasses.replace(packed.sampled, block_indices=ids)
    joined.check()


def check_full_coverage(case: Case) -> None:
    """Where blocks or window cover the sequence, the branch is dense causal attention."""
    config, length = case.config, case.lengths_k[0]
    assert config.num_selected_blocks * config.block_size >= length
    wide = dataclasses.replace(case, config=dataclasses.replace(config, window_size=length))
    ids = torch.arange(config.num_selected_blocks, dtype=torch.int32, device=case.device)
    ids = ids.expand(length, config.num_kv_heads, -1).contiguous()
    x = case.inputs()
    visible = (
        torch.ones(length, length, dtype=torch.bool, device=case.device)
        .tril()[:, None]
        .expand(-1, config.num_kv_heads, -1)
    )
    chosen = [(RUNS[name](case, block_indices=ids), x.k_slc, x.v_slc) for name in ALGORITHMS]
    for results, k, v in (*chosen, (RUNS["window"](wide), x.k_win, x.v_win)):
        values = {}
        for dtype in (case.dtype, torch.float64):
            leaves = leaves_of(x.q.to(dtype), k.to(dtype), v.to(dtype))
            out = plain_attention(leaves[0], leaves[1], leaves[2], visible, config.head_dim**-0.5)
            grads = torch.autograd.grad(out, leaves, results.dout.to(dtype))
            values[dtype] = (out.detach(), *grads)
        actual = (
            results.of_queries["out"],
            results.of_queries["dq"],
            results.of_keys["dk"],
            results.of_keys["dv"],
        )
        for name, found, plain, exact in zip(
            ("out", "dq", "dk", "dv"), actual, *values.values(), strict=True
        ):
            assert_within_budget(
                found, plain, exact, f"full coverage: {results.name} {name}", case.factor
            )


def check_one_hot_gates(case: Case) -> None:
    """A gate of 1 on one branch and 0 on the others: the others add nothing and get no gradient."""
    for index, branch in enumerate(("cmp", "slc", "win")):
        x = case.inputs()
        gates = torch.zeros_like(x.gates)
        gates[..., index] = 1
        results = run_whole(case, dataclasses.replace(x, gates=gates))
        assert isinstance(results.sampled, SampledWhole)
        rows = every(results.dout)
        plain, exact = (
            results.sampled.branch(branch, d).at_queries(rows, d)["out"]
            for d in (case.dtype, torch.float64)
        )
        assert_within_budget(
            results.of_queries["out"], plain, exact, f"one-hot {branch}", case.factor
        )
        for key, grad in results.of_keys.items():
            assert bool(grad.any()) == (branch in key), f"one-hot {branch}: gradient of {key}"


def check_shuffled_indices(name: str, case: Case) -> None:
    """The order of the indices does not matter beyond rounding."""
    ids = case.block_indices()
    generator = torch.Generator(device=ids.device).manual_seed(6)
    order = torch.rand(ids.shape, generator=generator, device=ids.device).argsort(-1)
    shuffled = ids.gather(-1, order)
    assert not torch.equal(ids, shuffled)
    ascending, other = (
        RUNS[name](case, block_indices=indices) for indices in (ids.sort(-1).values, shuffled)
    )
    ascending.check()
    other.sampled = ascending.sampled
    other.check()


def check_repeated_indices(name: str, case: Case) -> None:
    """A block that is named twice counts once: the bits of the indices without the repetition."""
    ids = case.block_indices()
    once = torch.cat((ids, torch.full_like(ids, -1)), dim=-1)
    repeated = torch.cat((ids, ids.roll(1, -1)), dim=-1)
    found, expected = (RUNS[name](case, block_indices=indices) for indices in (repeated, once))
    for x, y in ((found.of_queries, expected.of_queries), (found.of_keys, expected.of_keys)):
        assert all(torch.equal(x[key], y[key]) for key in y), name


def check_unchosen_blocks(operator: str, case: Case) -> None:
    """dK and dV are exactly 0 for blocks of the sequence that no query selects, and only there."""
    config, length = case.config, case.lengths_k[0]
    num_blocks = -(-length // config.block_size)
    rows = torch.arange(length, device=case.device)
    # Head 0 takes block 0 and even blocks, head 1 and all others odd ones; the query's own block
    # never.
    parity = (torch.arange(config.num_kv_heads, device=case.device) > 0).int()
    ids = (
        2 * torch.arange(config.num_selected_blocks, device=case.device)[None, None]
        + parity[None, :, None]
    )
    ids = torch.where(ids < (rows // config.block_size)[:, None, None], ids, -1).int().contiguous()
    results = RUNS[operator](case, block_indices=ids)
    results.check()
    chosen = torch.zeros(config.num_kv_heads, num_blocks + 1, dtype=torch.bool, device=case.device)
    for head in range(config.num_kv_heads):
        chosen[head, ids[:, head].flatten().long()] = True
    assert not bool(chosen[:, :num_blocks].all())
    for name, grad in results.of_keys.items():
        for head in range(config.num_kv_heads):
            for block in range(num_blocks):
                part = grad[block * config.block_size : (block + 1) * config.block_size, head]
                assert bool(part.any()) == bool(chosen[head, block]), (
                    f"{name} of block {block}, head {head}"
                )


def check_rope_shift(case: Case, shift: int = 512) -> None:
    """Shifting all positions changes no output: in fp32, with a base whose angles are exact."""
    assert case.dtype == torch.float32
    assert case.config.rope_theta == 256
    x = case.inputs()
    positions = query_positions(x.q.shape[0], x.cu_seqlens_q, x.cu_seqlens_k)
    found: list[Results] = []
    for offset in (0, shift):
        rope = dataclasses.replace(Rope.from_config(case.config), position_offset=offset)
        q, k_slc, k_win = (apply_rope(y, positions, rope) for y in (x.q, x.k_slc, x.k_win))
        moved = dataclasses.replace(x, q=q, k_slc=k_slc, k_win=k_win)
        found.append(run_whole(case, moved, rope=rope))
    assert torch.equal(*(_selection_of(results) for results in found))
    for key in ("out", "gates"):
        a, b = (results.of_queries[key].double() for results in found)
        assert float((a - b).norm() / a.norm()) <= CEILING[torch.float32], key
