"""nsa.native_sparse_attention against the NumPy oracle in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa import Rope, native_sparse_attention
from tests.ops.cases import BATCHES, SUBSETS, make_batch, near, small
from tests.ops.whole import NAMES, make, run, run_oracle


@pytest.mark.parametrize(
    "given",
    [{"softmax_scale": 0.6}, *({"max_seqlen_q": n, "max_seqlen_k": n} for n in (257, 300))],
    ids=str,
)
def test_scale_and_length_hints(given):
    batch = make_batch(small(), *BATCHES["packed"])
    inputs = make(batch)
    out = run(batch.config, inputs, Rope.from_config(batch.config), **batch.kwargs, **given)
    near(out, run_oracle(batch, inputs, scale=given.get("softmax_scale"))[0])


@pytest.mark.parametrize("phi", ["linear", "mlp"])
def test_keys_and_values_have_their_own_phi(phi):
    """Head sizes are equal, so that exchanged parameters would fit."""
    batch = make_batch(small(phi=phi, value_dim=16), (140, 9))
    inputs = make(batch)
    out = run(batch.config, inputs, Rope.from_config(batch.config), **batch.kwargs)
    near(out, run_oracle(batch, inputs)[0])


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
    batched: Any = {name: x.unflatten(0, (2, -1)) for name, x in inputs.tensors.items()}
    batched["q_cmp"] = inputs.q_cmp.unflatten(0, (2, -1))  # type: ignore[union-attr]
    rope = Rope.from_config(config)
    out = native_sparse_attention(**batched, phi=None, config=config, rope=rope)
    near(out, run_oracle(batch, inputs)[0].reshape(2, 20, 4, 32))


@pytest.mark.parametrize("scores", ["compressed", "token_max", "index"])
@pytest.mark.parametrize("branches", SUBSETS)
def test_branch_switches(branches, scores):
    """The inputs of a branch that is off may be missing or NaN; with slc on, k_cmp_raw scores."""
    config = small(branches=branches, scores=scores)
    batch = make_batch(config, (140, 257), (140, 12))
    inputs, rope = make(batch), Rope.from_config(config)
    expected, _ = run_oracle(batch, inputs)
    out = run(config, inputs, rope, **batch.kwargs)
    near(out, expected)
    off: dict[str, Any] = {
        name: torch.full_like(inputs.tensors[name], torch.nan)
        for name in NAMES[1:7]
        if name.split("_")[1] not in branches
        and not (name == "k_cmp_raw" and "slc" in branches and scores == "compressed")
    }
    for others in (off, dict.fromkeys(off)):
        given: Any = {**inputs.tensors, **others, **batch.kwargs}
        same = native_sparse_attention(**given, phi=None, config=config, rope=rope)
        assert torch.equal(same, out)


@pytest.mark.parametrize("keys", ["group", "shared"])
def test_an_index_selects_and_gets_gradients_of_zero(keys):
    """The factor on the scores is not that of the index."""
    config = small(scores="index", index_heads=2, index_dim=32, index_keys=keys)
    batch = make_batch(config, (140, 257), (140, 12))
    inputs = make(batch)
    index = [inputs.tensors[name].requires_grad_() for name in ("q_idx", "k_idx")]
    out = run(config, inputs, **batch.kwargs, softmax_scale=0.4)
    near(out, run_oracle(batch, inputs, rope=False, scale=0.4)[0])
    q = inputs.tensors["q"].requires_grad_()
    out = run(config, inputs, **batch.kwargs)
    _, *found = torch.autograd.grad(out.sum(), [q, *index], materialize_grads=True)
    assert not any(gradient.any() for gradient in found)


def test_wrong_index_tensors():
    config = small(scores="index", index_dim=32)
    inputs = make(make_batch(config, (40,)))
    for changes, other, message in (
        ({"q_idx": None}, config, "q_idx must be given with scores index, got None"),
        ({"k_idx": None}, config, "k_idx must be given with scores index, got None"),
        ({}, small(), "q_idx must be None with scores compressed, got a tensor"),
        ({"k_idx": inputs.tensors["k_idx"][:39]}, config, r"k_idx must have tokens \(40,\), got"),
        ({"q_idx": inputs.tensors["q"]}, config, r"q_idx must have shape \[tokens, 2, 32\]"),
    ):
        given: Any = inputs.tensors | changes
        with pytest.raises(ValueError, match=message):
            native_sparse_attention(**given, phi=None, config=other)
