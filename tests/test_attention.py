"""nsa.native_sparse_attention against the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import (
    NSAConfig,
    Rope,
    apply_rope,
    compress,
    compressed_attention,
    compressed_positions,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.config import BRANCHES
from nsa.testing import assert_within_budget
from tests import oracle
from tests.ops.cases import (
    BATCHES,
    SHORT,
    array,
    disagreements,
    grad,
    leaf,
    make_batch,
    mask_of,
    named_batch,
    near,
    offsets,
    plain_attention,
    small,
)
from tests.ops.whole import NAMES, finite_difference, make, run, run_oracle

PHIS = ("mean", "linear", "mlp")
POSITIONS = ("middle", "start", "none")
SUBSETS = [tuple(c) for size in (1, 2, 3) for c in itertools.combinations(BRANCHES, size)]


@pytest.mark.parametrize("name", BATCHES)
def test_matches_the_oracle(name):
    batch = named_batch(name)
    inputs = make(batch)
    near(
        run(batch.config, inputs, Rope.from_config(batch.config), **batch.kwargs),
        run_oracle(batch, inputs)[0],
    )


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("phi", PHIS)
def test_compression_and_rotation(phi, where):
    """Keys are compressed before they are rotated, at the middle or the start of their block; values are not rotated."""
    config = small(phi=phi, compress_rope=where)
    batch = make_batch(config, (140, 9, 257), (140, 9, 30))
    inputs = make(batch)
    near(
        run(config, inputs, Rope.from_config(config), **batch.kwargs), run_oracle(batch, inputs)[0]
    )


@pytest.mark.parametrize("phi", ["linear", "mlp"])
def test_keys_and_values_have_their_own_phi(phi):
    """Equal head sizes, so that exchanged parameters would fit."""
    config = small(phi=phi, value_dim=16)
    batch = make_batch(config, (140,))
    inputs = make(batch)
    near(run(config, inputs, Rope.from_config(config)), run_oracle(batch, inputs)[0])


def test_without_rope():
    batch = named_batch("packed")
    inputs = make(batch)
    near(run(batch.config, inputs, None, **batch.kwargs), run_oracle(batch, inputs, rope=False)[0])


@pytest.mark.parametrize("branches", SUBSETS)
def test_branch_switches(branches):
    """A branch that is off adds nothing, and its inputs may be missing; with slc on, k_cmp_raw still scores."""
    config = small(branches=branches)
    batch = make_batch(config, (140, 257), (140, 12))
    inputs = make(batch)
    expected, _ = run_oracle(batch, inputs)
    near(run(config, inputs, Rope.from_config(config), **batch.kwargs), expected)
    needed = {f"{kind}_{branch}" for kind in "kv" for branch in branches}
    needed |= {"k_cmp"} if "slc" in branches else set()
    given: dict[str, Any] = {
        name: x if name in ("q", "gates") or name.removesuffix("_raw") in needed else None
        for name, x in inputs.tensors.items()
    }
    out = native_sparse_attention(
        **given, phi=None, config=config, rope=Rope.from_config(config), **batch.kwargs
    )
    near(out, expected)


@pytest.mark.parametrize("branches", SUBSETS)
def test_inputs_of_a_branch_that_is_off_are_not_read(branches):
    config = small(branches=branches)
    batch = make_batch(config, (140,))
    inputs = make(batch)
    expected = run(config, inputs, Rope.from_config(config))
    for name in NAMES[1:7]:
        if name.split("_")[1] not in branches and not (name == "k_cmp_raw" and "slc" in branches):
            inputs.tensors[name] = torch.full_like(inputs.tensors[name], torch.nan)
    assert torch.equal(run(config, inputs, Rope.from_config(config)), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_init_blocks": 0, "num_local_blocks": 1},
        {"num_init_blocks": 2, "num_local_blocks": 2},
        {"num_selected_blocks": 1, "num_init_blocks": 0, "num_local_blocks": 1, "window_size": 1},
        {"window_size": 300},
        {"num_selected_blocks": 20},
        {
            "compress_block_size": 32,
            "compress_stride": 16,
            "block_size": 64,
            "num_selected_blocks": 3,
        },
        {"compress_block_size": 16, "compress_stride": 16, "block_size": 16},
        {"num_heads": 3, "num_kv_heads": 3},
        {"num_heads": 6, "num_kv_heads": 1},
        {"head_dim": 32, "rotary_dim": 8},
        {"head_dim": 192, "value_dim": 128},
        {"rope_theta": 10_000.0},
    ],
)
def test_other_configs(changes):
    config = small(**changes)
    batch = make_batch(config, (260, 31), (130, 31))
    inputs = make(batch)
    near(
        run(config, inputs, Rope.from_config(config), **batch.kwargs), run_oracle(batch, inputs)[0]
    )


def test_every_short_length_alone():
    config = small(num_selected_blocks=3)
    for length in SHORT:
        batch = make_batch(config, (length,), seed=length)
        inputs = make(batch)
        near(run(config, inputs, Rope.from_config(config)), run_oracle(batch, inputs)[0])


def test_scale():
    batch = named_batch("packed")
    inputs = make(batch)
    out = run(
        batch.config, inputs, Rope.from_config(batch.config), softmax_scale=0.6, **batch.kwargs
    )
    near(out, run_oracle(batch, inputs, scale=0.6)[0])


def test_dense_batch_with_more_keys_than_queries():
    config = small(compress_rope="none")
    batch = make_batch(config, (130, 130), (20, 20))
    inputs = make(batch)
    out = run(config, inputs.map(lambda x: x.unflatten(0, (2, -1))), Rope.from_config(config))
    near(out, run_oracle(batch, inputs)[0].reshape(2, 20, 4, 32))


@pytest.mark.parametrize("hint", [257, 300])
def test_length_hints_change_nothing(hint):
    batch = named_batch("packed")
    inputs = make(batch)
    out = run(
        batch.config,
        inputs,
        Rope.from_config(batch.config),
        **batch.kwargs,
        max_seqlen_q=hint,
        max_seqlen_k=hint,
    )
    near(out, run_oracle(batch, inputs)[0])


def one_hot(gates: Tensor, branch: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(branch), 3).to(gates.dtype).expand_as(gates)


@pytest.mark.parametrize("where", ["middle", "none"])
def test_one_hot_gates_give_the_single_branch(where):
    """The single branches are compared with the oracle in tests/ops; this holds that the whole is made of them."""
    config = small(compress_rope=where)
    batch = make_batch(config, (140, 257), (140, 12))
    inputs, rope = make(batch), Rope.from_config(config)
    x = inputs.tensors
    q_cmp = x["q"] if inputs.q_cmp is None else inputs.q_cmp
    k_cmp, _ = compress(x["k_cmp_raw"], None, config, batch.kwargs["cu_seqlens_k"])
    v_cmp, _ = compress(x["v_cmp_raw"], None, config, batch.kwargs["cu_seqlens_k"])
    if where != "none":
        k_cmp = apply_rope(
            k_cmp, compressed_positions(config, batch.kwargs["cu_seqlens_k"], k_cmp.shape[0]), rope
        )
    out_cmp, lse = compressed_attention(q_cmp, k_cmp, v_cmp, config, **batch.kwargs)
    ids = select_blocks(q_cmp, k_cmp, lse, config, **batch.kwargs)
    out_slc, _ = selected_attention(x["q"], x["k_slc"], x["v_slc"], ids, config, **batch.kwargs)
    out_win, _ = window_attention(x["q"], x["k_win"], x["v_win"], config, **batch.kwargs)
    for branch, expected in enumerate((out_cmp, out_slc, out_win)):
        assert expected is not None
        inputs.tensors["gates"] = one_hot(x["gates"], branch)
        near(run(config, inputs, rope, **batch.kwargs), array(expected), 1e-14)


@pytest.mark.parametrize("branch", [1, 2])
def test_full_coverage_with_one_hot_gates_is_dense_causal_attention(branch):
    config = small(num_selected_blocks=17, window_size=257)
    batch = make_batch(config, (257,))
    inputs = make(batch)
    inputs.tensors["gates"] = one_hot(inputs.tensors["gates"], branch)
    out = run(config, inputs, Rope.from_config(config))
    k, v = (array(inputs.tensors[f"{kind}_{('cmp', 'slc', 'win')[branch]}"]) for kind in "kv")
    near(out, oracle.attention(array(inputs.tensors["q"]), k, v, oracle.visible_dense(257, 257))[0])


def test_full_coverage_with_equal_branches_is_dense_causal_attention():
    """Selected and window branch over the same keys, both complete, weighted 1/4 and 3/4."""
    config = small(num_selected_blocks=17, window_size=257)
    batch = make_batch(config, (257,))
    inputs = make(batch)
    inputs.tensors["k_win"], inputs.tensors["v_win"] = (
        inputs.tensors["k_slc"],
        inputs.tensors["v_slc"],
    )
    inputs.tensors["gates"] = torch.tensor([0.0, 0.25, 0.75]).double().expand(257, 4, 3)
    out = run(config, inputs, Rope.from_config(config))
    q, k, v = (array(inputs.tensors[name]) for name in ("q", "k_slc", "v_slc"))
    near(out, oracle.attention(q, k, v, oracle.visible_dense(257, 257))[0])


# -----------------------------------------------------------------------------------------------------------
# gradients


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("where", ["middle", "none"])
def test_gradients_match_differences_of_the_oracle(phi, where):
    """Along random directions in all inputs at once, and in each input alone."""
    config = small(phi=phi, compress_rope=where, num_heads=2, num_kv_heads=1, value_dim=16)
    batch = make_batch(config, (140, 9), (140, 5))
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


@pytest.mark.parametrize("phi", PHIS)
def test_gradcheck(phi):
    config = small(
        phi=phi, num_heads=2, num_kv_heads=1, value_dim=16, num_selected_blocks=3, window_size=6
    )
    batch = make_batch(config, (70, 5), (20, 5))
    inputs = make(batch).map(leaf)

    def whole(*leaves: Tensor) -> Tensor:
        return run(config, inputs.rebuilt(leaves), Rope.from_config(config), **batch.kwargs)

    assert torch.autograd.gradcheck(whole, inputs.leaves, fast_mode=True)


def test_scores_learn_through_the_compressed_branch_alone():
    """With the gate of the compressed branch at 0 nothing reaches its keys, although they decide the choice."""
    batch = make_batch(small(), (140,))
    inputs = make(batch)
    inputs.tensors["gates"][..., 0] = 0
    inputs = inputs.map(leaf)
    run(batch.config, inputs, Rope.from_config(batch.config)).sum().backward()
    assert not bool(grad(inputs.tensors["k_cmp_raw"]).any())
    assert bool(grad(inputs.tensors["k_slc"]).any())


@pytest.mark.parametrize("phi", PHIS)
def test_sequences_shorter_than_a_compression_block(phi):
    """Nothing is compressed: the branch gives 0, and every input gets a gradient, of zeros where nothing flows."""
    config = small(phi=phi)
    batch = make_batch(config, (7, 0, 1, 5))
    inputs = make(batch).map(leaf)
    out = run(config, inputs, Rope.from_config(config), **batch.kwargs)
    near(out, run_oracle(batch, inputs)[0])
    out.sum().backward()
    for x in (
        inputs.tensors["k_cmp_raw"],
        inputs.tensors["v_cmp_raw"],
        *inputs.phi_k.values(),
        *inputs.phi_v.values(),
    ):
        assert torch.equal(grad(x), torch.zeros_like(x))


# ------------------------------------------------------------------------------------------- RoPE
# and low precision


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("offset", [1, 3, 16, 1000])
def test_shift_of_all_positions_changes_nothing(where, offset):
    """Queries, keys and compressed keys rotated ``offset`` further on; frequencies are such that fp32 angles are exact."""
    config = small(compress_rope=where)
    batch = make_batch(config, (140, 257), (140, 20))
    inputs = make(batch)
    cu = batch.kwargs

    def at(shift: int) -> Tensor:
        rope = Rope(16, theta=config.rope_theta, position_offset=shift)
        rotated = inputs.map(lambda x: x)
        for name in ("q", "k_slc", "k_win"):
            of_keys = np.concatenate([np.arange(n) for n in batch.lengths_k])
            positions = batch.positions if name == "q" else of_keys
            rotated.tensors[name] = apply_rope(
                inputs.tensors[name], torch.from_numpy(positions), rope
            )
        rotated.q_cmp = inputs.tensors["q"] if where == "none" else None
        return run(config, rotated, rope, **cu)

    near(at(offset), array(at(0)), 1e-11)


def test_shift_of_the_queries_alone_changes_much():
    config: NSAConfig = small()
    batch = make_batch(config, (140,))
    inputs, rope = make(batch), Rope(16, theta=config.rope_theta)
    moved = inputs.map(lambda x: x)
    moved.tensors["q"] = apply_rope(inputs.tensors["q"], torch.full((140,), 3), rope)
    assert float((run(config, moved, rope) - run(config, inputs, rope)).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_end_to_end(dtype):
    """Oracle and library start from the same compressed keys as stored; the choice then follows the agreement rule."""
    batch = make_batch(small(), (257,))
    config, rope, inputs = (
        batch.config,
        Rope.from_config(batch.config),
        make(batch).map(lambda x: x.to(dtype)),
    )
    out = run(config, inputs, rope)
    assert out.dtype == dtype
    x = inputs.tensors
    k_cmp, cu = compress(x["k_cmp_raw"], None, config)
    k_cmp = apply_rope(k_cmp, compressed_positions(config, offsets([257]), k_cmp.shape[0]), rope)[
        : int(cu[-1])
    ]
    v_cmp = compress(x["v_cmp_raw"], None, config)[0][: int(cu[-1])]
    _, lse = compressed_attention(x["q"], k_cmp, None, config)
    ids = select_blocks(x["q"], k_cmp, lse, config)
    scores = oracle.block_scores(array(x["q"]), array(k_cmp), 257, 8, 4, 16)
    assert disagreements(ids, scores, batch.positions, config)[1] == 0

    exact, plain = [], []
    for k, v, visible in (
        (k_cmp, v_cmp, oracle.visible_cmp(257, 257, 8, 4)),
        (x["k_slc"], x["v_slc"], oracle.visible_slc(257, 257, ids.numpy(), 16)),
        (x["k_win"], x["v_win"], oracle.visible_win(257, 257, 32)),
    ):
        exact.append(oracle.attention(array(x["q"]), array(k), array(v), visible)[0])
        plain.append(plain_attention(x["q"], k, v, mask_of(visible, 257, 2, k.shape[0]), 0.25))
    baseline = sum(branch * x["gates"][..., c, None] for c, branch in enumerate(plain))
    assert isinstance(baseline, Tensor)
    assert_within_budget(
        out, baseline, torch.from_numpy(oracle.combine(exact, array(x["gates"]))), "out"
    )
