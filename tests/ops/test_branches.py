"""The three branches against the NumPy oracle in fp64: output and log-sum-exp."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, combine, compressed_attention, selected_attention, window_attention
from tests import oracle
from tests.ops.cases import BATCHES, SHORT, Batch, array, grad, leaf, make_batch, near, small, stack

BRANCHES = ("cmp", "slc", "win")


def run(branch: str, inputs: list[Tensor], config: NSAConfig, **given: Any) -> Any:
    function = {"cmp": compressed_attention, "slc": selected_attention, "win": window_attention}
    return function[branch](*inputs, config, **given)  # type: ignore[operator]


def inputs_of(branch: str, batch: Batch, num_blocks: int | None = None) -> list[Tensor]:
    """q, k and v of a branch, and block indices of the selected one."""
    if branch == "cmp":
        sizes = batch.config.head_dim, batch.config.value_dim
        return [batch.q(), *(batch.compressed(size) for size in sizes)]
    ids = [batch.block_indices(num_blocks)] if branch == "slc" else []
    return [batch.q(), batch.k(), batch.v(), *ids]


def visible_keys(branch: str, config: NSAConfig, num_keys: int, num_rows: int, ids: Any) -> Any:
    if branch == "cmp":
        sizes = config.compress_block_size, config.compress_stride
        return oracle.visible_cmp(num_rows, num_keys, *sizes)
    if branch == "slc":
        return oracle.visible_slc(num_rows, num_keys, ids, config.block_size)
    return oracle.visible_win(num_rows, num_keys, config.window_size)


def expected(
    branch: str, batch: Batch, inputs: list[Tensor], scale: float | None
) -> list[np.ndarray]:
    """Output and log-sum-exp; gradients are compared with fp64 in tests/ops/test_reference.py."""

    def one(rows: slice, tokens: slice, blocks: slice) -> tuple[np.ndarray, ...]:
        keys = blocks if branch == "cmp" else tokens
        q, k, v = (array(x)[part] for x, part in zip(inputs, (rows, keys, keys), strict=False))
        num_keys, num_rows = tokens.stop - tokens.start, rows.stop - rows.start
        ids = array(inputs[-1])[rows]
        visible = visible_keys(branch, batch.config, num_keys, num_rows, ids)
        return oracle.attention(q, k, v, visible, scale)

    return stack(batch, one)


def check(
    branch: str,
    batch: Batch,
    num_blocks: int | None = None,
    softmax_scale: float | None = None,
    **given: Any,
) -> None:
    inputs = inputs_of(branch, batch, num_blocks)
    leaves = [leaf(x) for x in inputs[:3]]
    everything = [*leaves, *inputs[3:]]
    out, lse = run(branch, everything, batch.config, softmax_scale=softmax_scale, **given)
    assert lse.dtype == torch.float64
    assert not lse.requires_grad
    out.sum().backward()
    for x, y in zip((out, lse), expected(branch, batch, inputs, softmax_scale), strict=True):
        near(x, y)
    # Rows of compressed keys that no sequence owns are NaN here; nobody read them.
    real = sum(batch.num_cmp) if branch == "cmp" else len(inputs[1])
    assert not bool(torch.cat([grad(x)[real:].flatten() for x in leaves[1:]]).any())


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("branch", BRANCHES)
def test_matches_the_oracle(branch, name):
    batch = make_batch(small(), *BATCHES[name])
    check(branch, batch, **batch.kwargs)


PATTERNS: list[tuple[str, dict[str, int], int | None]] = [
    *(("win", {"window_size": w}, None) for w in (1, 2, 7, 63, 64, 300)),
    *(
        ("cmp", {"compress_block_size": l, "compress_stride": d, "block_size": size}, None)
        for l, d, size in ((32, 16, 64), (16, 16, 16), (16, 4, 32), (4, 4, 16), (24, 8, 32))
    ),
    # The indices are the caller's: their number need not be that of the config.
    *(("slc", {"block_size": size}, n) for size, n in ((16, 7), (32, 1), (64, 2), (128, 4))),
]


@pytest.mark.parametrize(("branch", "changes", "num_blocks"), PATTERNS, ids=str)
def test_other_patterns(branch, changes, num_blocks):
    batch = make_batch(small(**changes), (160, 64, 1, 66, 23), (160, 64, 1, 3, 0))
    check(branch, batch, num_blocks, **batch.kwargs)


@pytest.mark.parametrize("branch", BRANCHES)
def test_one_sequence_without_offsets(branch):
    for length in SHORT:
        check(branch, make_batch(small(window_size=8), (length,), seed=length))
    if branch != "cmp":  # compressed keys do not say how many tokens they stand for
        check(branch, make_batch(small(), (130,), (9,)))


@pytest.mark.parametrize(
    "given",
    [
        {"softmax_scale": 0.7},
        {"max_seqlen_q": 140, "max_seqlen_k": 140},
        {"max_seqlen_q": 300, "max_seqlen_k": 300},
    ],
    ids=str,
)
@pytest.mark.parametrize("branch", BRANCHES)
def test_scale_and_length_hints(branch, given):
    batch = make_batch(small(), (66, 0, 140))
    check(branch, batch, **batch.kwargs, **given)


@pytest.mark.parametrize("branch", ["cmp", "slc"])
def test_queries_that_see_nothing(branch):
    """Output exactly 0, lse -inf, gradients exactly 0 and not None."""
    batch = make_batch(small(), (7, 1, 0, 3))
    q, *keys, ids = batch.q(), batch.k(), batch.v(), batch.block_indices()
    inputs = [leaf(q), *(leaf(x[:2] if branch == "cmp" else x) for x in keys)]
    absent = [torch.where(ids >= 0, 99, ids)] if branch == "slc" else []
    out, lse = run(branch, [*inputs, *absent], batch.config, **batch.kwargs)
    assert torch.equal(out, torch.zeros(11, 4, 32).double())
    assert torch.equal(lse, torch.full((11, 4), -torch.inf).double())
    out.sum().backward()
    for x in inputs:
        assert torch.equal(grad(x), torch.zeros_like(x))


def test_lse_alone_of_as_many_keys_as_there_are():
    batch = make_batch(small(), *BATCHES["chunks"])
    q, k, v = inputs_of("cmp", batch)
    _, wanted = compressed_attention(q, k, v, batch.config, **batch.kwargs)
    out, lse = compressed_attention(q, k[: sum(batch.num_cmp)], None, batch.config, **batch.kwargs)
    assert out is None
    assert torch.equal(lse, wanted)


# ------------------------------------------------------------------------------
# the gated sum


@pytest.mark.parametrize("on", list(itertools.product((False, True), repeat=3))[1:])
def test_combine(on):
    """A dense batch, its output and gradients."""
    batch = make_batch(small(), (130,))
    outputs = [leaf(batch.normal(5, 26, 4, 32)) if here else None for here in on]
    gates = leaf(batch.gates().unflatten(0, (5, 26)))
    cmp, slc, win = outputs
    total, d_total = combine(cmp, slc, win, gates), batch.normal(5, 26, 4, 32)
    given = [None if out is None else array(out.flatten(0, 1)) for out in outputs]
    near(total.flatten(0, 1), oracle.combine(given, array(gates.flatten(0, 1))))
    total.backward(d_total)
    for c, out in enumerate(outputs):
        if out is None:
            assert not bool(grad(gates)[..., c].any())
        else:
            near(grad(out), array(gates)[..., c, None] * array(d_total))
            near(grad(gates)[..., c], (array(out) * array(d_total)).sum(-1))
