"""nsa.compress and nsa.compressed_positions against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, PhiWeights, compress, compressed_positions
from nsa.testing import assert_within_budget
from tests import oracle
from tests.ops.cases import (
    BATCHES,
    SHORT,
    array,
    grad,
    leaf,
    make_batch,
    named_batch,
    near,
    offsets,
    small,
    stack,
)

PHIS = ("mean", "linear", "mlp")


def random_weights(config: NSAConfig, size: int, seed: int = 0) -> PhiWeights | None:
    rng = np.random.default_rng(seed)
    heads, length = config.num_kv_heads, config.compress_block_size
    hidden = config.compress_hidden_size or 2 * size

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * scale)

    if config.phi == "linear":
        return PhiWeights(weight=normal(heads, length, size, scale=1.0))
    if config.phi == "mlp":
        return PhiWeights(
            position=normal(heads, length, size, scale=1.0),
            w1=normal(heads, length * size, hidden, scale=0.2),
            w2=normal(heads, hidden, size, scale=0.2),
        )
    return None


def arrays(weights: PhiWeights | None) -> dict[str, np.ndarray]:
    if weights is None:
        return {}
    named = {name: getattr(weights, name) for name in ("weight", "position", "w1", "w2")}
    return {name: array(x) for name, x in named.items() if x is not None}


def expected_rows(
    config: NSAConfig, x: Tensor, lengths: tuple[int, ...], weights: PhiWeights | None
) -> np.ndarray:
    batch = make_batch(config, lengths)
    sizes = (config.compress_block_size, config.compress_stride, config.phi, arrays(weights))
    return stack(batch, lambda _, tokens, __: (oracle.compress(array(x)[tokens], *sizes),))[0]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("phi", PHIS)
def test_matches_the_oracle(phi, name):
    batch = named_batch(name, small(phi=phi))
    for x in (batch.k(), batch.v()):
        weights = random_weights(batch.config, x.shape[-1])
        y, cu = compress(x, weights, batch.config, offsets(batch.lengths_k))
        assert tuple(y.shape) == (x.shape[0] // 4, *x.shape[1:])
        assert cu.dtype == torch.int32
        assert cu.tolist() == [0, *np.cumsum(batch.num_cmp)]
        near(y[: int(cu[-1])], expected_rows(batch.config, x, batch.lengths_k, weights))


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize(
    ("l", "d", "l_sel"),
    [(32, 16, 64), (16, 16, 16), (16, 4, 32), (8, 8, 16), (4, 4, 16), (24, 8, 32)],
)
def test_other_block_sizes(phi, l, d, l_sel):
    config = small(phi=phi, compress_block_size=l, compress_stride=d, block_size=l_sel)
    lengths = (3 * l + d - 1, l - 1, l, l + d, 2 * d - 1)
    batch = make_batch(config, lengths)
    x, weights = batch.k(), random_weights(config, 16)
    y, cu = compress(x, weights, config, offsets(lengths))
    near(y[: int(cu[-1])], expected_rows(config, x, lengths, weights))


@pytest.mark.parametrize("phi", PHIS)
def test_every_short_length_alone(phi):
    config = small(phi=phi)
    for length in SHORT:
        batch = make_batch(config, (length,), seed=length)
        x, weights = batch.k(), random_weights(config, 16)
        y, cu = compress(x, weights, config)
        assert y.shape[0] == length // 4
        assert cu.tolist() == [0, max(0, (length - 8) // 4 + 1)]
        near(y[: int(cu[-1])], expected_rows(config, x, (length,), weights))


def test_hidden_size_of_the_mlp():
    config = small(phi="mlp", compress_hidden_size=5)
    batch = make_batch(config, (130,))
    x, weights = batch.k(), random_weights(config, 16)
    y, cu = compress(x, weights, config)
    near(y[: int(cu[-1])], expected_rows(config, x, (130,), weights))


@pytest.mark.parametrize("phi", PHIS)
def test_dense_equals_packed(phi):
    config = small(phi=phi)
    batch = make_batch(config, (130, 130, 130))
    x, weights = batch.k(), random_weights(config, 16)
    packed, cu = compress(x, weights, config, offsets(batch.lengths_k))
    dense, cu_dense = compress(x.unflatten(0, (3, 130)), weights, config)
    assert torch.equal(cu, cu_dense)
    assert torch.equal(packed[: int(cu[-1])], dense[: int(cu[-1])])


@pytest.mark.parametrize("phi", PHIS)
def test_gradients(phi):
    config = small(phi=phi, value_dim=16, num_kv_heads=1, num_heads=1, compress_hidden_size=3)
    lengths = (21, 3, 8)
    x = leaf(make_batch(config, lengths).k())
    weights = random_weights(config, 16)
    names = (
        []
        if weights is None
        else [n for n in ("weight", "position", "w1", "w2") if getattr(weights, n) is not None]
    )
    leaves = [leaf(getattr(weights, name)) for name in names]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        given = PhiWeights(**dict(zip(names, parameters, strict=True))) if names else None
        y, cu = compress(x, given, config, offsets(lengths))
        return y[: int(cu[-1])]

    assert torch.autograd.gradcheck(run, (x, *leaves), fast_mode=True)


def test_gradient_of_the_mean_is_spread_evenly():
    """Token m lies in every block i with i * d <= m < i * d + l, and gets 1 / l of each block's gradient."""
    config = small()
    x = leaf(make_batch(config, (130,)).k())
    y, cu = compress(x, None, config)
    y[: int(cu[-1])].sum().backward()
    covered = [sum(1 for i in range(31) if i * 4 <= m < i * 4 + 8) for m in range(130)]
    near(grad(x), np.broadcast_to(np.array(covered)[:, None, None] / 8, (130, 2, 16)))


@pytest.mark.parametrize("phi", ["linear", "mlp"])
def test_parameters_get_zero_when_no_block_is_complete(phi):
    config = small(phi=phi)
    weights = random_weights(config, 16)
    assert weights is not None
    leaves = {name: leaf(torch.from_numpy(x)) for name, x in arrays(weights).items()}
    lengths = (7, 3, 0, 1)
    y, _ = compress(make_batch(config, lengths).k(), PhiWeights(**leaves), config, offsets(lengths))
    y.sum().backward()
    for parameter in leaves.values():
        assert torch.equal(grad(parameter), torch.zeros_like(parameter))


def test_start_values_give_the_mean():
    batch = make_batch(small(), (130,))
    x = batch.k()
    mean, cu = compress(x, None, small())
    linear, _ = compress(
        x, PhiWeights(weight=torch.full((2, 8, 16), 1 / 8).double()), small(phi="linear")
    )
    given = random_weights(small(phi="mlp"), 16)
    assert given is not None
    assert given.w2 is not None
    started = PhiWeights(position=given.position, w1=given.w1, w2=torch.zeros_like(given.w2))
    mlp, _ = compress(x, started, small(phi="mlp"))
    near(linear[: int(cu[-1])], array(mean)[: int(cu[-1])])
    near(mlp[: int(cu[-1])], array(mean)[: int(cu[-1])])


@pytest.mark.parametrize("phi", PHIS)
def test_nan_stays_in_its_sequence(phi):
    config = small(phi=phi)
    lengths = (130, 137, 128)
    batch = make_batch(config, lengths)
    clean, weights = batch.k(), random_weights(config, 16)
    poisoned = clean.clone()
    poisoned[130:267] = torch.nan
    cu = offsets(batch.num_cmp)
    others = torch.ones(int(cu[-1]), dtype=torch.bool)
    others[int(cu[1]) : int(cu[2])] = False
    expected, _ = compress(clean, weights, config, offsets(lengths))
    x = leaf(poisoned)
    y, _ = compress(x, weights, config, offsets(lengths))
    assert torch.equal(y[: int(cu[-1])][others], expected[: int(cu[-1])][others])
    y[: int(cu[-1])].sum().backward()
    assert not bool(grad(x)[:130].isnan().any())
    assert not bool(grad(x)[267:].isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("phi", PHIS)
def test_low_precision(phi, dtype):
    config = small(phi=phi)
    lengths = (130, 9, 257)
    x = make_batch(config, lengths).k().to(dtype)
    weights = random_weights(config, 16)
    rounded = PhiWeights(
        **{name: torch.from_numpy(w).to(dtype) for name, w in arrays(weights).items()}
    )
    y, cu = compress(x, rounded if arrays(weights) else None, config, offsets(lengths))
    assert y.dtype == dtype
    expected = torch.from_numpy(expected_rows(config, x, lengths, rounded))
    starts = torch.tensor([s + i * 4 for s, n in ((0, 31), (130, 1), (139, 63)) for i in range(n)])
    blocks = x[starts[:, None] + torch.arange(8)].transpose(1, 2)  # [C, Hkv, l, D]
    if phi == "linear":
        assert rounded.weight is not None
        baseline = (blocks * rounded.weight).sum(2)
    else:
        baseline = blocks.mean(2)
    if phi == "mlp":
        assert rounded.position is not None
        assert rounded.w1 is not None
        assert rounded.w2 is not None
        hidden = torch.nn.functional.silu(
            torch.einsum("che,heo->cho", (blocks + rounded.position).flatten(2), rounded.w1)
        )
        baseline = baseline + torch.einsum("cho,hod->chd", hidden, rounded.w2)
    assert_within_budget(y[: int(cu[-1])], baseline, expected, phi)


@pytest.mark.parametrize("where", ["middle", "start"])
@pytest.mark.parametrize(("l", "d"), [(8, 4), (16, 4), (4, 4), (12, 4), (16, 16)])
def test_positions(where, l, d):
    config = small(compress_rope=where, compress_block_size=l, compress_stride=d)
    lengths = (130, 0, l, 257, l - 1)
    counts = [oracle.num_compressed(n, l, d) for n in lengths]
    expected = [
        oracle.compressed_position(i, l, d, where) for count in counts for i in range(count)
    ]
    actual = compressed_positions(config, offsets(lengths), sum(lengths) // d)
    assert actual.dtype == torch.int64
    assert actual.shape == (sum(lengths) // d,)
    assert actual[: len(expected)].tolist() == expected
