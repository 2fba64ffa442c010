"""Shapes, inputs whose choice is shared, hand-made choices."""

from __future__ import annotations

import pytest
import torch

from nsa import NSAConfig, check_inputs, compressed_attention, select_blocks
from nsa.bench.cases import compress_and_rotate
from nsa.bench.points import (
    CHOICES,
    SHAPES,
    Point,
    batch_of,
    hand_made_choice,
    make_tensors,
    overlap,
    parse_shape,
)
from nsa.errors import UserError
from nsa.testing import packed_offsets

CPU = torch.device("cpu")


def point(choice: str, seq_len: int = 1024, batch: int = 2, shape: str = "6x2x16x32") -> Point:
    return Point(parse_shape(shape), seq_len, batch, choice, torch.float32, CPU)


def test_shapes() -> None:
    assert parse_shape("paper") is SHAPES["paper"]
    shape = parse_shape("12x3x64x32")
    config = shape.config({"window_size": 256})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim) == (12, 3, 64, 32)
    assert (config.window_size, config.compress_block_size, config.num_selected_blocks) == (256, 32, 16)


@pytest.mark.parametrize("text", ["sead", "12x2x64", "12x2x64x64x1", "12x5x64x64", "-1x1x64x64", "12x2x60x64"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(UserError):
        parse_shape(text)


def test_the_seed_shape_always_has_as_many_tokens() -> None:
    seed, wide = SHAPES["seed"], SHAPES["wide"]
    assert [batch_of(seed, s, None) for s in (2048, 65_536, 131_072)] == [32, 1, 1]
    assert [batch_of(wide, s, None) for s in (128, 65_536)] == [1, 1]
    assert batch_of(wide, 128, 1024) == 8


def test_inputs_are_independent_unless_a_choice_is_shared() -> None:
    for choice, group in CHOICES.items():
        x = make_tensors(point(choice), point(choice).shape.config())
        assert x["q"].shape == (2, 1024, 6, 16)
        assert x["dout"].shape == (2, 1024, 6, 32)
        first, second, last = x["q"][:, 0].flatten(), x["q"][:, 1].flatten(), x["q"][:, group].flatten()
        near = torch.nn.functional.cosine_similarity(first, second, dim=0)
        far = torch.nn.functional.cosine_similarity(first, last, dim=0)
        assert (near > 0.99) == (group > 1)
        assert not torch.equal(first, second)  # own noise
        assert abs(far) < 0.5
        assert x["q"].std() == pytest.approx(1.0, abs=0.05)


def chosen(at: Point) -> torch.Tensor:
    config = at.shape.config()
    x = make_tensors(at, config)
    k_cmp, v_cmp = compress_and_rotate(x, config, "reference")
    _, lse = compressed_attention(x["q"], k_cmp, v_cmp, config)
    return select_blocks(x["q"], k_cmp, lse, config)


@pytest.mark.parametrize("choice", ["shared4", "shared16"])
def test_shared_choices_are_really_shared(choice: str) -> None:
    group = CHOICES[choice]
    at = point(choice, seq_len=2048, batch=1, shape="4x1x64x64")
    late = slice(1024, None)  # where most blocks are not chosen
    assert overlap(chosen(at)[:, late], group) > 0.98
    random = Point(at.shape, at.seq_len, 1, "random", at.dtype, CPU)
    assert overlap(chosen(random)[:, late], group) < 0.8
    assert overlap(hand_made_choice(at, at.shape.config()), group) == 1.0
    assert overlap(hand_made_choice(random, at.shape.config())[:, late], group) < 0.8


def test_overlap_counts_what_is_found() -> None:
    ids = torch.tensor([[[[0, 1, 2, -1]], [[0, 2, 5, 6]], [[3, 4, -1, -1]], [[3, 4, -1, -1]]]])
    assert overlap(ids, 2) == pytest.approx((2 + 2) / (4 + 2))
    assert overlap(ids, 4) == pytest.approx((2 + 0 + 0) / (4 + 2 + 2))
    assert overlap(ids, 1) == 1.0


@pytest.mark.parametrize("choice", sorted(CHOICES))
@pytest.mark.parametrize("seq_len", [96, 1024, 1500])
def test_hand_made_choices_are_legal(choice: str, seq_len: int) -> None:
    at = point(choice, seq_len)
    config = NSAConfig(num_heads=6, num_kv_heads=2, head_dim=16, value_dim=32, num_selected_blocks=6)
    ids = hand_made_choice(at, config)
    assert ids.shape == (2, seq_len, 2, 6)
    assert ids.dtype == torch.int32
    check_inputs(config, cu_seqlens_q=packed_offsets([seq_len] * 2), block_indices=ids.flatten(0, 1))
    current = (torch.arange(seq_len) // config.block_size)[None, :, None]
    count = (ids >= 0).sum(-1)
    assert torch.equal(count, (current + 1).clamp(max=6).expand(count.shape))
    in_order = torch.where(ids < 0, 10**6, ids)
    assert bool((in_order[..., 1:] >= in_order[..., :-1]).all())
    assert bool((ids <= current[..., None]).all())
    for forced in (torch.zeros_like(current), current, (current - 1).clamp(min=0)):
        assert bool((ids == forced[..., None]).any(-1).all())
    if seq_len > 1000:
        assert not torch.equal(ids[:, :, 0], ids[:, :, 1])  # the groups of heads choose by themselves
