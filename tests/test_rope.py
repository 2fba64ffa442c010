"""nsa.apply_rope against the oracle, and what rotation promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nsa import Rope, RopeScaling, apply_rope
from nsa.testing import assert_within_budget
from tests import oracle
from tests.ops.cases import array, make_batch, near, small


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("linear", 4.0),
        RopeScaling("yarn", 8.0, 64),
        RopeScaling("llama3", 8.0, 64, 4.0, 1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("theta", [10_000.0, 256.0])
@pytest.mark.parametrize("dim", [16, 8, 2])
def test_matches_the_oracle(dim, theta, scaling):
    x = make_batch(small(), (130,)).q()
    for positions in (range(130), range(1000, 1130), [7] * 130):
        rotated = apply_rope(x, torch.tensor(list(positions)), Rope(dim, theta, scaling))
        near(rotated, oracle.rotate(array(x), positions, dim, theta, scaling), 1e-9)
        assert torch.equal(rotated[..., dim:], x[..., dim:])


def test_by_hand():
    """The pair (0, 2) turns by 1, the pair (1, 3) by 1/100: halves are paired, not neighbours."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).double()
    one = apply_rope(x, torch.tensor([1]), Rope(4))[0, 0]
    c, s, c2, s2 = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    near(one, np.array([c - 3 * s, 2 * c2 - 4 * s2, 3 * c + s, 4 * c2 + 2 * s2]), 1e-8)


def test_offset_is_added_to_every_position():
    x = make_batch(small(), (130,)).q()
    moved = apply_rope(x, torch.arange(130), Rope(16, position_offset=300))
    assert torch.equal(moved, apply_rope(x, torch.arange(300, 430), Rope(16)))


def test_dense_positions():
    x = make_batch(small(), (130, 130)).q()
    positions = torch.stack((torch.arange(130), torch.arange(50, 180)))
    flat = apply_rope(x, positions.flatten(), Rope(16))
    assert torch.equal(
        apply_rope(x.unflatten(0, (2, 130)), positions, Rope(16)), flat.unflatten(0, (2, 130))
    )


def test_gradient():
    x = make_batch(small(), (3,)).q().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda y: apply_rope(y, torch.tensor([0, 5, 99]), Rope(8)), (x,)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    """Angles are fp32 whatever the dtype: at position 4,000 bf16 angles would be noise."""
    x = make_batch(small(), (130,)).q().to(dtype)
    positions = torch.arange(4000, 4130)
    rotated = apply_rope(x, positions, Rope(16))
    assert rotated.dtype == dtype
    exact = torch.from_numpy(oracle.rotate(array(x), positions.tolist()))
    angle = positions[:, None].float() * 10_000.0 ** (-torch.arange(8).double() / 8).float()
    cos, sin = angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    plain = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert_within_budget(rotated, plain, exact, "rotated")


# ------------------------------------------------------------------------------
# scaling


def angles(rope: Rope, position: int) -> np.ndarray:
    """Angle of each pair, by rotating (1, 0)."""
    x = torch.zeros(1, 1, rope.dim).double()
    x[..., : rope.dim // 2] = 1
    rotated = array(apply_rope(x, torch.tensor([position]), rope))[0, 0]
    return np.arctan2(rotated[rope.dim // 2 :], rotated[: rope.dim // 2])


def test_yarn_keeps_fast_and_divides_slow_frequencies():
    """Frequencies of more than beta_fast turns within the original length stay.

    Those of fewer than beta_slow turns are interpolated; attention is sharpened by
    (0.1 ln(factor) + 1) squared.
    """
    factor, original, dim, theta = 8.0, 2048, 128, 10_000.0
    rope = Rope(dim, theta, RopeScaling("yarn", factor, original))
    frequency = theta ** (-2 * np.arange(dim // 2) / dim)
    turns = original * frequency / (2 * math.pi)
    found = angles(rope, 1)
    fast, slow = turns > 34, turns < 0.9
    assert fast.any()
    assert slow.any()
    np.testing.assert_allclose(found[fast], frequency[fast], rtol=1e-6)
    np.testing.assert_allclose(found[slow], frequency[slow] / factor, rtol=1e-6)
    share = (found * factor / frequency - 1) / (factor - 1)  # 1 where kept, 0 where divided
    assert bool((np.diff(share) <= 1e-5).all())
    assert bool(((share > 0.01) & (share < 0.99)).any())
    size = apply_rope(torch.ones(1, 1, dim).double(), torch.tensor([3]), rope).norm() / dim**0.5
    assert abs(float(size) - (0.1 * math.log(factor) + 1)) < 1e-7


def test_llama3_has_the_frequencies_of_transformers():
    scaling = RopeScaling("llama3", 8.0, 8192, 4.0, 1.0)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=128, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    found = Rope(128, 500_000.0, scaling).inverse_frequencies(torch.device("cpu"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("theta", [0.0, 1.0, -10_000.0, math.inf, math.nan])
def test_bad_base(theta):
    with pytest.raises(ValueError, match=r"^theta must be (above 1|a finite number), got .*\.$"):
        Rope(16, theta)


def test_from_config():
    scaling = RopeScaling("linear", 2.0)
    assert Rope.from_config(small()) == Rope(16, 256.0)
    assert Rope.from_config(small(rotary_dim=8, rope_theta=5.0, rope_scaling=scaling)) == Rope(
        8, 5.0, scaling
    )
