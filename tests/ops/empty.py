"""Calls without a single token: a batch of size 0, sequences of length 0, no packed tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
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
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.ops._sequences import Sequences
from nsa.ops.embedding import embed
from nsa.ops.projection import Columns, Gates, Heads, project
from nsa.ops.statistics import add_statistics, new_statistics
from tests.ops.cases import make_batch, offsets, small
from tests.ops.whole import phi_parameters

CONFIG = small(num_heads=4, num_kv_heads=2)
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """Leading shapes of queries and keys, and lengths where there are offsets.

    Attributes:
        queries: leading shape of what belongs to queries.
        keys: of what belongs to keys.
        lengths: of packed sequences: queries and keys; None without offsets.
    """

    queries: Shape
    keys: Shape
    lengths: tuple[Shape, Shape] | None = None

    @property
    def where(self) -> dict[str, Any]:
        if self.lengths is None:
            return {}
        return {"cu_seqlens_q": offsets(self.lengths[0]), "cu_seqlens_k": offsets(self.lengths[1])}

    @property
    def batch_size(self) -> int:
        if self.lengths is not None:
            return len(self.lengths[1])
        return self.keys[0] if len(self.keys) == 2 else 1

    @property
    def num_cmp(self) -> int:
        """Rows of compressed keys."""
        return int(torch.tensor(self.keys).prod()) // CONFIG.compress_stride

    @property
    def is_refused(self) -> bool:
        """Compressed keys alone do not say how many tokens are behind them."""
        return self.lengths is None and self.queries != self.keys

    @property
    def out(self) -> Shape:
        return *self.queries, CONFIG.num_heads, CONFIG.value_dim

    def q(self) -> Tensor:
        return leaf(*self.queries, CONFIG.num_heads, CONFIG.head_dim)

    def k_and_v(self, *rows: int) -> list[Tensor]:
        sizes = CONFIG.head_dim, CONFIG.value_dim
        return [leaf(*(rows or self.keys), CONFIG.num_kv_heads, size) for size in sizes]

    def gates(self) -> Tensor:
        return leaf(*self.queries, CONFIG.num_heads, 3)

    def ids(self) -> Tensor:
        return torch.zeros(*self.queries, CONFIG.num_kv_heads, 4, dtype=torch.int32)


CASES = {
    "batch of size 0": Case((0, 40), (0, 40)),
    "batch of size 0, no length": Case((0, 0), (0, 0)),
    "sequences of length 0": Case((2, 0), (2, 0)),
    "no query": Case((2, 0), (2, 40)),
    "no token": Case((0,), (0,)),
    "no token, packed": Case((0,), (0,), ((0, 0), (0, 0))),
    "no sequence, packed": Case((0,), (0,), ((), ())),
    "no query, packed": Case((0,), (40,), ((0, 0), (7, 33))),
}


# Leading shapes of inputs of a module, and where their sequences lie.
WHERE: dict[str, tuple[Shape, dict[str, Tensor]]] = {
    "batch of size 0": ((0, 30), {}),
    "batch of size 0, no length": ((0, 0), {}),
    "sequences of length 0": ((2, 0), {}),
    "no token": ((0,), {}),
    "no sequence": ((0,), {"cu_seqlens": offsets(())}),
}


def check_language_model(attention: Any, shape: Shape, where: dict[str, Tensor]) -> None:
    """Empty logits, and every gradient is there and 0."""
    sizes: dict[str, Any] = {"vocab_size": 20, "width": 48, "num_layers": 1, "mlp_hidden_size": 16}
    model = LanguageModel(LMConfig(**sizes, attention=attention, nsa=small()))
    logits = model(torch.zeros(shape, dtype=torch.int64), **where)
    assert logits.shape == (*shape, 20)
    logits.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.any()] == []


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).requires_grad_()


def check(results: Iterable[tuple[Tensor | None, Shape]], leaves: list[Tensor]) -> None:
    """Results have these shapes; every gradient is there and 0."""
    differentiable = []
    for x, shape in results:
        assert x is not None
        assert tuple(x.shape) == shape
        if x.requires_grad:
            differentiable.append(x)
    if leaves:
        zeros = [torch.zeros_like(x) for x in differentiable]
        grads = torch.autograd.grad(differentiable, leaves, zeros)
        for x, grad in zip(leaves, grads, strict=True):
            assert grad.shape == x.shape
            assert not grad.any()


CHECKS: dict[str, Callable[[Case, str], None]] = {}


def named(function: Callable[[Case, str], None]) -> Callable[[Case, str], None]:
    CHECKS[function.__name__] = function
    return function


def phi_of(config: NSAConfig, size: int) -> tuple[PhiWeights | None, list[Tensor]]:
    parameters = phi_parameters(make_batch(config, ()), size)
    leaves = {name: leaf(*x.shape) for name, x in parameters.items()}
    return (PhiWeights(**leaves) if leaves else None), list(leaves.values())


@named
def compression(case: Case, backend: str) -> None:
    for phi in ("mean", "linear", "mlp"):
        config = small(phi=phi)
        x, _ = case.k_and_v()
        weights, parameters = phi_of(config, config.head_dim)
        cu = case.where.get("cu_seqlens_k")
        y, cu_cmp = compress(x, weights, config, cu, backend=backend)
        shape = case.num_cmp, config.num_kv_heads, config.head_dim
        check([(y, shape), (cu_cmp, (case.batch_size + 1,))], [x, *parameters])


@named
def selection(case: Case, backend: str) -> None:
    if case.is_refused:
        return
    k, _ = case.k_and_v(case.num_cmp)
    lse = torch.zeros(*case.queries, CONFIG.num_heads)
    for config in (CONFIG, small(coarse_block_size=32, num_coarse_blocks=6)):
        ids = select_blocks(case.q(), k, lse, config, backend=backend, **case.where)
        check([(ids, tuple(case.ids().shape))], [])


@named
def ranges(case: Case, backend: str) -> None:
    if not case.is_refused:
        found = blocks_to_ranges(case.ids(), CONFIG, **case.where)
        check([(found, (*case.ids().shape, 2))], [])


def attend(function: Callable[..., Any], case: Case, *inputs: Tensor, **options: Any) -> None:
    results = function(*inputs, CONFIG, **options, **case.where)
    check(zip(results, (case.out, case.out[:-1]), strict=True), list(inputs[:3]))


@named
def compressed(case: Case, backend: str) -> None:
    if not case.is_refused:
        k, v = case.k_and_v(case.num_cmp)
        attend(compressed_attention, case, case.q(), k, v, backend=backend)


@named
def selected(case: Case, backend: str) -> None:
    for algorithm in ("tiled", "gathered", "auto"):
        inputs = (case.q(), *case.k_and_v(), case.ids())
        attend(selected_attention, case, *inputs, algorithm=algorithm, backend=backend)


@named
def window(case: Case, backend: str) -> None:
    attend(window_attention, case, case.q(), *case.k_and_v(), backend=backend)


@named
def combination(case: Case, backend: str) -> None:
    leaves = [*(leaf(*case.out) for _ in range(3)), case.gates()]
    out = combine(leaves[0], leaves[1], leaves[2], leaves[3], backend=backend)
    check([(out, case.out)], leaves)


@named
def whole(case: Case, backend: str) -> None:
    branches = ("cmp", "slc", "win")
    for on in (branches, ("slc",), ("cmp",)):
        config = small(branches=on, phi="linear")
        q, gates = case.q(), case.gates()
        raw = {branch: case.k_and_v() for branch in branches}
        sizes = config.head_dim, config.value_dim
        (phi_k, weight_k), (phi_v, weight_v) = (phi_of(config, size) for size in sizes)
        keys = [x for branch in branches for x in raw[branch]]
        given: Any = (q, *keys, gates, (phi_k, phi_v), config)
        out = native_sparse_attention(*given, rope=Rope(16), backend=backend, **case.where)
        weights = [*weight_k, *weight_v] if "cmp" in on else []
        read = [x for branch in on for x in raw[branch]]
        check([(out, case.out)], [q, gates, *read, *weights])


@named
def statistics(case: Case, backend: str) -> None:
    """Switched on, a call without a token adds nothing."""
    found = new_statistics(leaf(0).device)
    found[0] = 1
    before = found.clone()
    batch = case.queries[0] if len(case.queries) == 2 else 1
    sequences = Sequences(None, batch, case.queries[-1], case.keys[-1], found.device)
    gates, ids = (x.detach().flatten(0, -3) for x in (case.gates(), case.ids()))
    add_statistics(found, gates, ids, torch.tensor([3, 2]), 12.0, CONFIG, sequences, backend)
    assert torch.equal(found, before)


@named
def projection(case: Case, backend: str) -> None:
    x, weights, bias = leaf(0, 24), [leaf(size, 24) for size in (32, 16, 6)], leaf(6)
    columns = Columns((Heads(2, 16, "yes"), Heads(1, 16)), Gates(2, (0, 1, 2)))
    sequences = Sequences(None, 1, 0, 0, x.device)
    found = project(x, weights, bias, columns, sequences, Rope(16), backend=backend)
    check(zip(found, ((0, 2, 16), (0, 1, 16), (0, 2, 3)), strict=True), [x, *weights, bias])


@named
def embedding(case: Case, backend: str) -> None:
    table = leaf(40, 16)
    out = embed(torch.zeros(case.queries, dtype=torch.int64), table, backend=backend)
    check([(out, (*case.queries, 16))], [table])
