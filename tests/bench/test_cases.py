"""Shapes, inputs whose selection is shared, random selections, useful work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import check_inputs, select_blocks
from nsa.bench.cases import (
    CASES,
    CHOICES,
    Point,
    Problem,
    batch_of,
    make_tensors,
    parse_shape,
    prepare,
    random_selection,
    recorded_selection,
    useful_work,
)
from nsa.errors import UserError
from nsa.ops._masked_attention import visible_compressed, visible_tokens, visible_window
from nsa.ops._sequences import open_sequences
from nsa.ops.selected.reference import visible_selected
from nsa.testing import packed_offsets
from nsa.testing.sampled import assert_legal
from tests.bench.test_gate import SMALL

CPU = torch.device("cpu")


def point(choice: str, seq_len: int = 1024, batch: int = 2, shape: str = "6x2x16x32") -> Point:
    return Point(shape, parse_shape(shape), seq_len, batch, choice, torch.float32, CPU)


def test_shapes():
    for text, heads in (("12x3x64x32", (12, 3, 64, 32)), ("paper", (64, 4, 192, 128))):
        config = parse_shape(text)
        found = (config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim)
        assert found == heads
    for text in ("sead", "12x2x64", "12x2x64x64x1", "12x5x64x64", "-1x1x64x64", "12x2x60x64"):
        with pytest.raises(UserError):
            parse_shape(text)
    assert [batch_of("seed", s, None) for s in (2048, 65_536, 131_072)] == [32, 1, 1]
    assert [batch_of("wide", 128, tokens) for tokens in (None, 1024)] == [1, 8]


@pytest.mark.parametrize("choice", CHOICES)
def test_inputs_are_independent_unless_a_selection_is_shared(choice):
    group = CHOICES[choice]
    x = make_tensors(point(choice))
    assert (x["q"].shape, x["dout"].shape) == ((2, 1024, 6, 16), (2, 1024, 6, 32))
    first, second, last = (x["q"][:, row].flatten() for row in (0, 1, group))
    assert (torch.cosine_similarity(first, second, dim=0) > 0.99) == (group > 1)
    assert not torch.equal(first, second)  # own noise
    assert abs(torch.cosine_similarity(first, last, dim=0)) < 0.5
    assert x["q"].std() == pytest.approx(1.0, abs=0.05)


def shared(block_indices: Tensor, group: int) -> float:
    """Fraction of the blocks of late queries that the first query of their group selects, too."""
    ids = block_indices[0, 1024:].unflatten(0, (-1, group))
    return float((ids[:, 1:, ..., None] == ids[:, :1, ..., None, :]).any(-1).float().mean())


@pytest.mark.parametrize("choice", ["shared4", "shared16"])
def test_shared_selections_are_really_shared(choice):
    for asked, low, high in ((choice, 0.98, 1.0), ("random", 0.0, 0.8)):
        at = point(asked, seq_len=2048, batch=1, shape="4x1x64x64")
        x = prepare(CASES["attention.choice"], make_tensors(at), at, "reference").tensors
        selected = select_blocks(x["q"], x["k_cmp"], x["lse"], at.config)
        assert low < shared(selected, CHOICES[choice]) <= high
        assert low < shared(random_selection(at), CHOICES[choice]) <= high


@pytest.mark.parametrize("choice", sorted(CHOICES))
@pytest.mark.parametrize("seq_len", [96, 1500])
def test_random_selections_are_legal(choice, seq_len):
    at = point(choice, seq_len)
    config = replace(at.config, num_selected_blocks=6)
    at = replace(at, config=config)
    ids = random_selection(at)
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


@pytest.mark.parametrize("seq_len", [7, 8, 65, 200])
def test_pairs_are_those_that_the_reference_sees(seq_len):
    at = Point("small", SMALL, seq_len, 3, "random", torch.float32, CPU)
    config = at.config
    q = torch.zeros(1, seq_len, config.num_heads, config.head_dim)
    sequences = open_sequences(q, (1, seq_len), None, None, None, None, "reference")
    selection = random_selection(replace(at, batch=1)).flatten(0, 1)
    selected = visible_selected(selection, config, sequences)
    pairs = {
        "window": int(visible_window(sequences, config).sum()),
        "compressed": int(visible_compressed(sequences, config).sum()),
        "selected": int(selected[:, 0].sum()),
    }
    whole = Problem(CASES["attention"], at, {})
    heads, forward, both = 3 * 4, 2 * 16 + 2 * 32, (2 * 16 + 2 * 32) + (6 * 16 + 4 * 32)
    dense = heads * int(visible_tokens(sequences).sum()) * forward
    assert useful_work(whole, "fwd", dense=True) == {"flops": dense}
    assert useful_work(whole, "fwd_bwd") == {"flops": heads * sum(pairs.values()) * both}
    for name, count in pairs.items():
        problem = replace(whole, case=CASES[f"attention.{name}"])
        assert useful_work(problem, "fwd") == {"flops": heads * count * forward}
        assert useful_work(problem, "fwd_bwd") == {"flops": heads * count * both}
    selection_alone = replace(whole, case=CASES["attention.choice"])
    scored = heads * pairs["compressed"] * 2 * 16
    assert useful_work(selection_alone, "fwd") == {"flops": scored}
    # By tokens: one product with each visible one, which whole attention has besides its branches.
    tokens = heads * int(visible_tokens(sequences).sum()) * 2 * 16
    by_token = replace(at, config=replace(config, scores="token_max"))
    choice, whole_by_token = (replace(x, point=by_token) for x in (selection_alone, whole))
    assert useful_work(choice, "fwd") == {"flops": tokens}
    for mode in ("fwd", "fwd_bwd"):
        found, plain = (useful_work(x, mode)["flops"] for x in (whole_by_token, whole))
        assert found - plain == tokens
    assert useful_work(whole_by_token, "fwd", dense=True) == {"flops": dense}
    # An index has heads of its own.
    shared = replace(config, scores="index", index_heads=3, index_dim=32, index_keys="shared")
    by_index = replace(selection_alone, point=replace(at, config=shared))
    assert useful_work(by_index, "fwd") == {"flops": tokens // (4 * 16) * 3 * 32}


COMPRESS = {"k_cmp_raw": 10, "v_cmp_raw": 10, "dk_cmp": 3, "dv_cmp": 3}
COMBINE = dict.fromkeys(("out_cmp", "out_slc", "out_win", "gates", "dout"), 8)


@pytest.mark.parametrize(
    ("case", "sizes", "forward", "both"),
    [("compress", COMPRESS, 26, 52), ("combine", COMBINE, 8 * 5, 8 * (5 + 1 + 4 + 4))],
)
def test_moved_bytes_count_each_tensor_as_often_as_it_must_move(case, sizes, forward, both):
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    problem = Problem(CASES[f"attention.{case}"], point("random"), tensors)
    assert useful_work(problem, "fwd") == {"bytes": 4 * forward}
    assert useful_work(problem, "fwd_bwd") == {"bytes": 4 * both}


def test_recorded_selections(tmp_path):
    """Sequences take turns with the layers; other heads and too few tokens are refused."""
    at = point("recorded", seq_len=1600, batch=3, shape="4x2x16x16")  # of 25 blocks, 16 selected
    ids = [random_selection(replace(at, batch=1, seq_len=n, choice="random")) for n in (1700, 1700)]
    ids[1] = ids[1].flip(2)  # the other heads'
    arrays: Any = {
        f"layer{n}": x[0].permute(1, 2, 0).numpy() for n, x in zip((0, 3), ids, strict=True)
    }
    path = tmp_path / "run.npz"
    np.savez_compressed(path, **arrays, block_size=np.array(64))
    at = replace(at, recorded=path)
    found = prepare(CASES["attention.selected"], make_tensors(at), at, "reference").tensors
    wanted = torch.cat((ids[0], ids[1], ids[0]))[:, :1600]
    assert torch.equal(found["block_indices"], wanted)
    assert found["block_indices"].dtype == torch.int32
    wrong: dict[str, dict[str, Any]] = {
        "--seqs": {"seq_len": 1701},
        "--recorded": {"config": parse_shape("4x1x16x16")},
    }
    for argument, change in wrong.items():
        with pytest.raises(UserError, match=f"^{argument} must"):
            recorded_selection(replace(at, **change))
    np.savez_compressed(path, **arrays, block_size=np.array([64, 32]))
    with pytest.raises(UserError, match=r"--recorded must have \(2, 16, 64\)"):
        recorded_selection(at)
    path.write_text("no archive")
    for other in (path, tmp_path / "absent"):
        with pytest.raises(UserError, match="--recorded must be a file of recorded selections"):
            recorded_selection(replace(at, recorded=other))
