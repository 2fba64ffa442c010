"""nsa.apply_rope against the oracle; scaled frequencies of transformers: hf/test_convert.py."""

from __future__ import annotations

import math

import pytest
import torch

from nsa import Rope, RopeScaling, apply_rope
from nsa.testing import assert_within_budget
from tests import oracle
from tests.ops.cases import array, make_batch, near, small


@pytest.mark.parametrize("scaling", [None, RopeScaling("yarn", 8.0, 64)], ids=str)
@pytest.mark.parametrize("theta", [10_000.0, 256.0])
@pytest.mark.parametrize("dim", [16, 8, 2])
def test_matches_the_oracle(dim, theta, scaling):
    x = make_batch(small(), (130,)).q()
    for positions in (range(130), range(1000, 1130), [7] * 130):
        rotated = apply_rope(x, torch.tensor(list(positions)), Rope(dim, theta, scaling))
        near(rotated, oracle.rotate(array(x), positions, dim, theta, scaling), 1e-9)
        assert torch.equal(rotated[..., dim:], x[..., dim:])


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
