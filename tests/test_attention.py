"""nsa.native_sparse_attention against the NumPy oracle in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, Rope, apply_rope, native_sparse_attention
from nsa.config import BRANCHES
from tests import oracle
from tests.ops.cases import BATCHES, SHORT, array, grad, leaf, make_batch, near, small
from tests.ops.whole import NAMES, Inputs, finite_difference, make, run, run_oracle

PHIS = ("mean", "linear", "mlp")
POSITIONS = ("middle", "start", "none")
SUBSETS = [tuple(c) for size in (1, 2, 3) for c in itertools.combinations(BRANCHES, size)]
Lengths = Sequence[int]


def check(
    config: NSAConfig,
    lengths_k: Lengths,
    lengths_q: Lengths | None = None,
    offsets: bool = True,
    **given: Any,
) -> None:
    batch = make_batch(config, lengths_k, lengths_q)
    inputs = make(batch)
    if offsets:
        given |= batch.kwargs
    out = run(config, inputs, Rope.from_config(config), **given)
    near(out, run_oracle(batch, inputs, scale=given.get("softmax_scale"))[0])


@pytest.mark.parametrize("name", BATCHES)
def test_matches_the_oracle(name):
    check(small(), *BATCHES[name])


CONFIGS: list[dict[str, Any]] = [
    # Keys are compressed before they are rotated, at the middle or the start of their block; values
    # are not rotated.
    *({"phi": phi, "compress_rope": where} for phi in PHIS for where in POSITIONS),
    # Equal head sizes, so that exchanged parameters of phi would fit.
    *({"phi": phi, "value_dim": 16} for phi in PHIS[1:]),
    {"num_init_blocks": 0, "num_local_blocks": 1},
    {"num_init_blocks": 2, "num_local_blocks": 2},
    {"num_selected_blocks": 1, "num_init_blocks": 0, "num_local_blocks": 1, "window_size": 1},
    {"window_size": 300},
    {"num_selected_blocks": 20},
    {"compress_block_size": 32, "compress_stride": 16, "block_size": 64, "num_selected_blocks": 3},
    {"compress_block_size": 16, "compress_stride": 16, "block_size": 16},
    {"num_heads": 3, "num_kv_heads": 3},
    {"num_heads": 6, "num_kv_heads": 1},
    {"head_dim": 32, "rotary_dim": 8},
    {"head_dim": 192, "value_dim": 128},
    {"rope_theta": 10_000.0},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_other_configs(changes):
    check(small(**changes), (140, 9, 257), (140, 9, 30))


@pytest.mark.parametrize(
    "given",
    [{"softmax_scale": 0.6}, *({"max_seqlen_q": n, "max_seqlen_k": n} for n in (257, 300))],
    ids=str,
)
def test_scale_and_length_hints(given):
    check(small(), *BATCHES["packed"], **given)


def test_every_short_length_alone():
    for length in SHORT:
        check(small(num_selected_blocks=3), (length,), offsets=False)


def test_without_rope():
    batch = make_batch(small(), *BATCHES["packed"])
    inputs = make(batch)
    near(run(batch.config, inputs, None, **batch.kwargs), run_oracle(batch, inputs, rope=False)[0])


@pytest.mark.parametrize("dim", [34, 5])
def test_a_rotation_that_does_not_fit_a_head(dim):
    batch = make_batch(small(), *BATCHES["packed"])
    rule = rf"rope must have an even dim of at most head_dim \(16\), got {dim}"
    with pytest.raises(ValueError, match=rule):
        run(batch.config, make(batch), Rope(dim=dim), **batch.kwargs)


def test_dense_batch_with_more_keys_than_queries():
    config = small(compress_rope="none")
    batch = make_batch(config, (130, 130), (20, 20))
    inputs = make(batch)
    out = run(config, inputs.map(lambda x: x.unflatten(0, (2, -1))), Rope.from_config(config))
    near(out, run_oracle(batch, inputs)[0].reshape(2, 20, 4, 32))


@pytest.mark.parametrize("branches", SUBSETS)
def test_branch_switches(branches):
    """The inputs of a branch that is off may be missing or NaN; with slc on, k_cmp_raw scores."""
    config = small(branches=branches)
    batch = make_batch(config, (140, 257), (140, 12))
    inputs, rope = make(batch), Rope.from_config(config)
    expected, _ = run_oracle(batch, inputs)
    out = run(config, inputs, rope, **batch.kwargs)
    near(out, expected)
    off: dict[str, Any] = {
        name: torch.full_like(inputs.tensors[name], torch.nan)
        for name in NAMES[1:7]
        if name.split("_")[1] not in branches and not (name == "k_cmp_raw" and "slc" in branches)
    }
    for others in (off, dict.fromkeys(off)):
        given: Any = {**inputs.tensors, **others, **batch.kwargs}
        same = native_sparse_attention(**given, phi=None, config=config, rope=rope)
        assert torch.equal(same, out)


def test_full_coverage_is_dense_causal_attention():
    """Selected and window branch over the same keys, both complete, weighted 1/4 and 3/4."""
    config = small(num_selected_blocks=17, window_size=257)
    inputs = make(make_batch(config, (257,)))
    x = inputs.tensors
    x["k_win"], x["v_win"] = x["k_slc"], x["v_slc"]
    x["gates"] = torch.tensor([0.0, 0.25, 0.75]).double().expand(257, 4, 3)
    q, k, v = (array(x[name]) for name in ("q", "k_slc", "v_slc"))
    dense, _ = oracle.attention(q, k, v, oracle.visible_dense(257, 257))
    near(run(config, inputs, Rope.from_config(config)), dense)


# ------------------------------------------------------------------------------
# gradients


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("where", ["middle", "none"])
def test_gradients_match_differences_of_the_oracle(phi, where):
    """Along random directions in all inputs at once, and in each input alone."""
    config = small(phi=phi, compress_rope=where, num_heads=2, num_kv_heads=1, value_dim=16)
    batch = make_batch(config, (100, 9), (70, 5))
    inputs = make(batch).map(leaf)
    out = run(config, inputs, Rope.from_config(config), **batch.kwargs)
    d_out = batch.normal(*out.shape)
    out.backward(d_out)
    gradients = [array(grad(x)) for x in inputs.leaves]
    directions = [batch.rng.standard_normal(g.shape) / g.size**0.5 for g in gradients]
    zero = [np.zeros_like(g) for g in gradients]
    for alone in (None, *range(len(gradients))):
        along = (
            directions if alone is None else [*zero[:alone], directions[alone], *zero[alone + 1 :]]
        )
        analytic = sum(float((g * y).sum()) for g, y in zip(gradients, along, strict=True))
        numeric = finite_difference(batch, inputs, along, array(d_out))
        assert abs(analytic - numeric) < 1e-7 * max(1.0, abs(numeric))
        assert abs(numeric) > 1e-4


def test_scores_learn_through_the_compressed_branch_alone():
    """With the gate of the compressed branch at 0 its keys get no gradient, although they score."""
    batch = make_batch(small(), (140,))
    inputs = make(batch)
    inputs.tensors["gates"][..., 0] = 0
    inputs = inputs.map(leaf)
    run(batch.config, inputs, Rope.from_config(batch.config)).sum().backward()
    assert not bool(grad(inputs.tensors["k_cmp_raw"]).any())
    assert bool(grad(inputs.tensors["k_slc"]).any())


@pytest.mark.parametrize("phi", PHIS)
def test_sequences_shorter_than_a_compression_block(phi):
    """Nothing is compressed: the branch gives 0, and its inputs get zeros as gradients."""
    config = small(phi=phi)
    batch = make_batch(config, (7, 0, 1, 5))
    inputs = make(batch).map(leaf)
    out = run(config, inputs, Rope.from_config(config), **batch.kwargs)
    near(out, run_oracle(batch, inputs)[0])
    out.sum().backward()
    raw = (inputs.tensors["k_cmp_raw"], inputs.tensors["v_cmp_raw"])
    for x in (*raw, *inputs.phi_k.values(), *inputs.phi_v.values()):
        assert torch.equal(grad(x), torch.zeros_like(x))


# ------------------------------------------------------------------------------
# RoPE


def rotated(inputs: Inputs, positions: dict[str, Tensor], rope: Rope) -> Inputs:
    """The same with some tensors rotated."""
    moved = inputs.map(lambda x: x)
    for name, at in positions.items():
        moved.tensors[name] = apply_rope(inputs.tensors[name], at, rope)
    return moved


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("offset", [1, 16, 1000])
def test_shift_of_all_positions_changes_nothing(where, offset):
    """Queries, keys and compressed keys ``offset`` further on; fp32 angles are exact here."""
    config = small(compress_rope=where)
    batch = make_batch(config, (140, 257), (140, 20))
    inputs = make(batch)
    of_keys = torch.cat([torch.arange(n) for n in batch.lengths_k])
    positions = {"q": torch.from_numpy(batch.positions), "k_slc": of_keys, "k_win": of_keys}

    def at(shift: int) -> Tensor:
        rope = Rope(16, theta=config.rope_theta, position_offset=shift)
        return run(config, rotated(inputs, positions, rope), rope, **batch.kwargs)

    near(at(offset), array(at(0)), 1e-11)


def test_shift_of_the_queries_alone_changes_much():
    config = small()
    inputs, rope = make(make_batch(config, (140,))), Rope(16, theta=config.rope_theta)
    moved = rotated(inputs, {"q": torch.full((140,), 3)}, rope)
    assert float((run(config, moved, rope) - run(config, inputs, rope)).abs().max()) > 0.1
