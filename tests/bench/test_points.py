"""Shapes, inputs whose selection is shared, random selections."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa import check_inputs, select_blocks
from nsa.bench.cases import CASES, prepare
from nsa.bench.points import (
    CHOICES,
    SHAPES,
    Point,
    batch_of,
    hand_made_selection,
    make_tensors,
    parse_shape,
)
from nsa.errors import UserError
from nsa.testing import packed_offsets
from nsa.testing.sampled import assert_legal


def point(choice: str, seq_len: int = 1024, batch: int = 2, shape: str = "6x2x16x32") -> Point:
    cpu = torch.device("cpu")
    return Point(parse_shape(shape), seq_len, batch, choice, torch.float32, cpu)


def test_shapes() -> None:
    assert parse_shape("paper") is SHAPES["paper"]
    config = parse_shape("12x3x64x32").config({"window_size": 256})
    heads = (config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim)
    assert (heads, config.window_size) == ((12, 3, 64, 32), 256)
    for text in ("sead", "12x2x64", "12x2x64x64x1", "12x5x64x64", "-1x1x64x64", "12x2x60x64"):
        with pytest.raises(UserError):
            parse_shape(text)


def test_the_seed_shape_always_has_as_many_tokens() -> None:
    seed, wide = SHAPES["seed"], SHAPES["wide"]
    assert [batch_of(seed, s, None) for s in (2048, 65_536, 131_072)] == [32, 1, 1]
    assert [batch_of(wide, 128, tokens) for tokens in (None, 1024)] == [1, 8]


@pytest.mark.parametrize("choice", CHOICES)
def test_inputs_are_independent_unless_a_selection_is_shared(choice: str) -> None:
    group = CHOICES[choice]
    x = make_tensors(point(choice), point(choice).shape.config())
    assert x["q"].shape == (2, 1024, 6, 16)
    assert x["dout"].shape == (2, 1024, 6, 32)
    first, second, last = (x["q"][:, row].flatten() for row in (0, 1, group))
    assert (torch.cosine_similarity(first, second, dim=0) > 0.99) == (group > 1)
    assert not torch.equal(first, second)  # own noise
    assert abs(torch.cosine_similarity(first, last, dim=0)) < 0.5
    assert x["q"].std() == pytest.approx(1.0, abs=0.05)


def shared(block_indices: Tensor, group: int) -> float:
    """Share of the blocks of late queries that the first query of their group selects, too."""
    ids = block_indices[0, 1024:].unflatten(0, (-1, group))
    return float((ids[:, 1:, ..., None] == ids[:, :1, ..., None, :]).any(-1).float().mean())


@pytest.mark.parametrize("choice", ["shared4", "shared16"])
def test_shared_selections_are_really_shared(choice: str) -> None:
    for asked, low, high in ((choice, 0.98, 1.0), ("random", 0.0, 0.8)):
        at = point(asked, seq_len=2048, batch=1, shape="4x1x64x64")
        config = at.shape.config()
        base = make_tensors(at, config)
        x = prepare(CASES["attention.choice"], base, at, config, "reference").tensors
        selected = select_blocks(x["q"], x["k_cmp"], x["lse"], config)
        assert low < shared(selected, CHOICES[choice]) <= high
        assert low < shared(hand_made_selection(at, config), CHOICES[choice]) <= high


@pytest.mark.parametrize("choice", sorted(CHOICES))
@pytest.mark.parametrize("seq_len", [96, 1500])
def test_random_selections_are_legal(choice: str, seq_len: int) -> None:
    at = point(choice, seq_len)
    config = at.shape.config({"num_selected_blocks": 6})
    ids = hand_made_selection(at, config)
    assert (ids.shape, ids.dtype) == ((2, seq_len, 2, 6), torch.int32)
    offsets, positions = packed_offsets([seq_len] * 2), torch.arange(seq_len)
    check_inputs(config, cu_seqlens_q=offsets, block_indices=ids.flatten(0, 1))
    assert_legal(ids, positions, config)
    current = (positions // config.block_size)[None, :, None]
    count = (ids >= 0).sum(-1)
    assert torch.equal(count, (current + 1).clamp(max=6).expand(count.shape))
    for forced in (torch.zeros_like(current), current, (current - 1).clamp(min=0)):
        assert bool((ids == forced[..., None]).any(-1).all())
    if seq_len > 1000:
        assert not torch.equal(ids[:, :, 0], ids[:, :, 1])  # groups of heads select by themselves
