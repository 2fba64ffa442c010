"""Calls without a single token: a batch of size 0, sequences of length 0, packed tokens of which there are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa import (
    NSAConfig,
    PhiWeights,
    Rope,
    blocks_to_ranges,
    combine,
    compress,
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops._sequences import Sequences
from nsa.ops.embedding import embed
from nsa.ops.projection import Columns, Gates, Heads, project
from nsa.ops.statistics import add_statistics, new_statistics
from tests.ops.cases import offsets, small

CONFIG = small(num_heads=4, num_kv_heads=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """Leading shapes of queries and keys, and lengths where there are offsets.

    Attributes:
        queries: leading shape of what belongs to queries.
        keys: of what belongs to keys.
        lengths: of packed sequences: queries and keys; None without offsets.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def where(self) -> dict[str, Any]:
        if self.lengths is None:
            return {}
        return {"cu_seqlens_q": offsets(self.lengths[0]), "cu_seqlens_k": offsets(self.lengths[1])}

    @property
    def num_cmp(self) -> int:
        """Rows of compressed keys."""
        return int(torch.tensor(self.keys).prod()) // CONFIG.compress_stride


CASES = {
    "batch of size 0": Case((0, 40), (0, 40)),
    "batch of size 0, no length": Case((0, 0), (0, 0)),
    "sequences of length 0": Case((2, 0), (2, 0)),
    "no query": Case((2, 0), (2, 40)),
    "no token": Case((0,), (0,)),
    "no token, packed": Case((0,), (0,), ((0, 0), (0, 0))),
    "no query, packed": Case((0,), (40,), ((0, 0), (7, 33))),
}


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).requires_grad_()


def check(results: list[tuple[Tensor, tuple[int, ...]]], leaves: list[Tensor]) -> None:
    """Results have these shapes and hold no number that is not finite; every gradient is there and 0."""
    for x, shape in results:
        assert tuple(x.shape) == shape
        assert x.numel() == 0
    differentiable = [x for x, _ in results if x.requires_grad]
    if leaves:
        grads = torch.autograd.grad(
            differentiable, leaves, [torch.zeros_like(x) for x in differentiable]
        )
        for x, grad in zip(leaves, grads, strict=True):
            assert grad.shape == x.shape
            assert not grad.any()


CHECKS: dict[str, Callable[[Case, str], None]] = {}


def named(function: Callable[[Case, str], None]) -> Callable[[Case, str], None]:
    CHECKS[function.__name__] = function
    return function


def keys(case: Case, config: NSAConfig = CONFIG) -> tuple[Tensor, Tensor]:
    return leaf(*case.keys, config.num_kv_heads, config.head_dim), leaf(
        *case.keys, config.num_kv_heads, config.value_dim
    )


def queries(case: Case) -> Tensor:
    return leaf(*case.queries, CONFIG.num_heads, CONFIG.head_dim)


def attended(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse."""
    return (*case.queries, CONFIG.num_heads, CONFIG.value_dim), (*case.queries, CONFIG.num_heads)


@named
def compression(case: Case, backend: str) -> None:
    for phi in ("mean", "linear", "mlp"):
        config = dataclasses.replace(CONFIG, phi=phi)
        x, _ = keys(case)
        weights, parameters = phi_of(config, config.head_dim)
        cu = case.where.get("cu_seqlens_k")
        y, cu_cmp = compress(x, weights, config, cu, backend=backend)
        assert y.shape == (case.num_cmp, config.num_kv_heads, config.head_dim)
        batch = (
            case.keys[0]
            if len(case.keys) == 2
            else 1
            if case.lengths is None
            else len(case.lengths[1])
        )
        assert cu_cmp.shape == (batch + 1,)
        grads = torch.autograd.grad(y, [x, *parameters], torch.zeros_like(y))
        assert all(
            grad.shape == leaf.shape for grad, leaf in zip(grads, [x, *parameters], strict=True)
        )
        assert not any(grad.any() for grad in grads)


def phi_of(config: NSAConfig, size: int) -> tuple[PhiWeights | None, list[Tensor]]:
    heads, length = config.num_kv_heads, config.compress_block_size
    if config.phi == "linear":
        weight = leaf(heads, length, size)
        return PhiWeights(weight=weight), [weight]
    if config.phi == "mlp":
        shapes = {
            "position": (length, size),
            "w1": (length * size, 2 * size),
            "w2": (2 * size, size),
        }
        made = {name: leaf(heads, *shape) for name, shape in shapes.items()}
        return PhiWeights(**made), list(made.values())
    return None, []


@named
def compressed(case: Case, backend: str) -> None:
    q = queries(case)
    k, v = (
        leaf(case.num_cmp, CONFIG.num_kv_heads, size)
        for size in (CONFIG.head_dim, CONFIG.value_dim)
    )
    if case.lengths is None and case.queries != case.keys:
        return  # compressed keys alone do not say how many tokens are behind them
    results = compressed_attention(q, k, v, CONFIG, backend=backend, **case.where)
    check(list(zip(results, attended(case), strict=True)), [q, k, v])  # type: ignore[arg-type]


@named
def selection(case: Case, backend: str) -> None:
    if case.lengths is None and case.queries != case.keys:
        return
    for changes in ({}, {"coarse_block_size": 32, "num_coarse_blocks": 6}):
        config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
        k = leaf(case.num_cmp, config.num_kv_heads, config.head_dim)
        lse = torch.zeros(*case.queries, config.num_heads)
        ids = select_blocks(queries(case), k, lse, config, backend=backend, **case.where)
        check([(ids, (*case.queries, config.num_kv_heads, config.num_selected_blocks))], [])


@named
def ranges(case: Case, backend: str) -> None:
    ids = torch.zeros(*case.queries, CONFIG.num_kv_heads, 4, dtype=torch.int32)
    if case.lengths is not None or case.queries == case.keys:
        check([(blocks_to_ranges(ids, CONFIG, **case.where), (*ids.shape, 2))], [])


@named
def selected(case: Case, backend: str) -> None:
    for algorithm in ("tiled", "gathered", "auto"):
        q, (k, v) = queries(case), keys(case)
        ids = torch.zeros(*case.queries, CONFIG.num_kv_heads, 4, dtype=torch.int32)
        results = selected_attention(
            q, k, v, ids, CONFIG, algorithm=algorithm, backend=backend, **case.where
        )
        check(list(zip(results, attended(case), strict=True)), [q, k, v])


@named
def window(case: Case, backend: str) -> None:
    q, (k, v) = queries(case), keys(case)
    results = window_attention(q, k, v, CONFIG, backend=backend, **case.where)
    check(list(zip(results, attended(case), strict=True)), [q, k, v])


@named
def combination(case: Case, backend: str) -> None:
    shape = attended(case)[0]
    outs, gates = [leaf(*shape) for _ in range(3)], leaf(*case.queries, CONFIG.num_heads, 3)
    out = combine(outs[0], outs[1], outs[2], gates, backend=backend)
    check([(out, shape)], [*outs, gates])


@named
def whole(case: Case, backend: str) -> None:
    for branches in (("cmp", "slc", "win"), ("slc",), ("cmp",)):
        config = dataclasses.replace(CONFIG, branches=branches, phi="linear")
        q, gates = queries(case), leaf(*case.queries, CONFIG.num_heads, 3)
        raw = [x for _ in range(3) for x in keys(case)]
        (phi_k, weight_k), (phi_v, weight_v) = (
            phi_of(config, size) for size in (config.head_dim, config.value_dim)
        )
        assert phi_k is not None
        assert phi_v is not None
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = raw
        out = native_sparse_attention(
            q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, (phi_k, phi_v), config, rope=Rope(16), backend=backend,
            **case.where,
        )  # fmt: skip
        on = [x for name, pair in zip(("cmp", "slc", "win"), zip(raw[::2], raw[1::2], strict=True), strict=True)
              if name in branches for x in pair]  # fmt: skip
        weights = [*weight_k, *weight_v] if "cmp" in branches else []
        check([(out, attended(case)[0])], [q, gates, *on, *weights])


@named
def statistics(case: Case, backend: str) -> None:
    """Switched on, a call without a token adds nothing."""
    found = new_statistics(leaf(0).device)
    found[0] = 1
    before = found.clone()
    batch = case.queries[0] if len(case.queries) == 2 else 1
    sequences = Sequences(None, batch, case.queries[-1], case.keys[-1], found.device)
    gates = torch.zeros(0, CONFIG.num_heads, 3)
    ids = torch.zeros(0, CONFIG.num_kv_heads, 4, dtype=torch.int32)
    add_statistics(found, gates, ids, torch.tensor([3, 2]), 12.0, CONFIG, sequences, backend)
    assert torch.equal(found, before)


@named
def projection(case: Case, backend: str) -> None:
    x, weights, bias = leaf(0, 24), [leaf(size, 24) for size in (32, 16, 6)], leaf(6)
    columns = Columns((Heads(2, 16, "yes"), Heads(1, 16)), Gates(2, (0, 1, 2)))
    found = project(
        x, weights, bias, columns, Sequences(None, 1, 0, 0, x.device), Rope(16), backend=backend
    )
    check(
        [(found[0], (0, 2, 16)), (found[1], (0, 1, 16)), (found[2], (0, 2, 3))], [x, *weights, bias]
    )


@named
def embedding(case: Case, backend: str) -> None:
    table = leaf(40, 16)
    out = embed(torch.zeros(case.queries, dtype=torch.int64), table, backend=backend)
    check([(out, (*case.queries, 16))], [table])
