"""Every public operator's check by name; projection and embedding against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nsa import Rope
from nsa.config import BRANCHES
from nsa.ops._sequences import Sequences
from nsa.ops.embedding import embed
from nsa.ops.projection import Columns, Gates, Heads, lay_together, project
from tests.ops.cases import offsets
from tests.ops.public import (
    RUNS,
    Case,
    check_combine,
    check_compress,
    check_selection,
    check_statistics,
    compare,
    leaves_of,
)


def check_project(case: Case) -> None:
    """Heads unrotated, rotated and both, and gates, of sequences as they lie."""
    config = case.config
    rope = Rope.from_config(config)
    pair = (config.num_kv_heads, config.head_dim)
    parts = (
        Heads(config.num_heads, config.head_dim, "both"),
        Heads(config.num_kv_heads, config.value_dim),
        Heads(*pair, "yes"),
    )
    branches = tuple(BRANCHES.index(name) for name in config.branches)
    assert config.gate != "fixed"
    gates = Gates(config.num_heads, branches, config.gate, config.gate_temperature)
    columns = Columns(parts, gates)
    width, num_tokens, length = 24, sum(case.lengths_k), case.lengths_k[0]
    number, device = len(case.lengths_k), torch.device(case.device)
    sequences = Sequences(None, number, length, length, device)
    if not case.dense:
        sequences = Sequences.packed(offsets(case.lengths_k).to(case.device), max(case.lengths_k))
    x = case.normal(num_tokens, width, seed=1)
    weights = [
        nn.Parameter(case.normal(size, width, seed=i))
        for i, size in enumerate(columns.sizes, start=2)
    ]
    lay_together(weights)
    bias = case.normal(columns.sizes[-1], seed=9)
    queries, values = (config.num_heads, config.head_dim), (config.num_kv_heads, config.value_dim)
    shapes = [queries, queries, values, pair, (config.num_heads, 3)]
    douts = [case.normal(num_tokens, *shape, seed=i) for i, shape in enumerate(shapes, start=10)]
    # Branches differ in the mean, or the gradient of the bias is a sum that cancels.
    douts[-1] += torch.arange(3.0, device=case.device) - 1
    names = ("q", "q rotated", "v", "k", "gates")

    def run(dtype: torch.dtype, backend: str, given: Sequence[Tensor]) -> dict[str, Tensor]:
        leaf, leaf_bias = leaves_of(x.to(dtype), bias.to(dtype))
        out = project(leaf, given, leaf_bias, columns, sequences, rope, backend=backend)
        grads = torch.autograd.grad(
            out,
            [leaf, leaf_bias, *given],
            [dout.to(y.dtype) for dout, y in zip(douts, out, strict=True)],
        )
        found = {name: y.detach() for name, y in zip(names, out, strict=True)}
        return (
            found
            | {"dx": grads[0], "dbias": grads[1]}
            | {f"dweight {i}": grad for i, grad in enumerate(grads[2:])}
        )

    found = run(case.dtype, case.backend, weights)
    plain, exact = (
        run(dtype, "reference", leaves_of(*(w.to(dtype) for w in weights)))
        for dtype in (case.dtype, torch.float64)
    )
    # Gates are fp32 of a product in the tested dtype, and have no more digits than it.
    compare(
        found, {key: x.to(case.dtype) for key, x in plain.items()}, exact, "project", case.factor
    )
    apart = run(case.dtype, case.backend, leaves_of(*weights))
    same = [torch.equal(apart[name], value) for name, value in found.items()]
    assert all(same), "project: weights with memory of their own each"


def check_embed(case: Case) -> None:
    """One token is frequent, so that its places are cut into pieces, and some never occur."""
    num_tokens, num_rows, width = 6 * max(case.lengths_k), 40, 3 * case.config.head_dim
    often = torch.arange(num_tokens) % 3 == 0
    rare = torch.randint(0, num_rows - 5, (num_tokens,), generator=torch.Generator().manual_seed(1))
    tokens = torch.where(often, 7, rare).to(case.device)
    weight, dout = case.normal(num_rows, width, seed=2), case.normal(num_tokens, width, seed=3)

    def run(dtype: torch.dtype, function: Callable[..., Tensor]) -> dict[str, Tensor]:
        leaf = leaves_of(weight.to(dtype))[0]
        out = function(tokens, leaf)
        (dweight,) = torch.autograd.grad(out, [leaf], [dout.to(dtype)])
        return {"out": out.detach(), "dweight": dweight}

    found = run(case.dtype, partial(embed, backend=case.backend))
    plain, exact = (run(dtype, functional.embedding) for dtype in (case.dtype, torch.float64))
    compare(found, plain, exact, "embed", case.factor)
    assert torch.equal(found["out"], plain["out"]), "embed: rows of the table are copied"
    assert not found["dweight"][-5:].any(), "embed: a token that does not occur has no gradient"
    again = run(case.dtype, partial(embed, backend=case.backend))
    assert torch.equal(found["dweight"], again["dweight"]), "embed: the same bits again"


def check_run(name: str, case: Case) -> None:
    RUNS[name](case).check()


CHECKS: dict[str, Callable[[Case], Any]] = {
    "compress": check_compress,
    "choice": check_selection,
    "combine": check_combine,
    "statistics": check_statistics,
    "project": check_project,
    "embed": check_embed,
    **{name: partial(check_run, name) for name in RUNS},
}
