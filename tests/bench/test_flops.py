"""Useful operations and bytes, compared with counting what the reference lets a query see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa.bench.cases import CASES, Problem
from nsa.bench.flops import useful_bytes, useful_flops
from nsa.bench.points import Point, hand_made_selection, parse_shape
from nsa.ops._masked_attention import visible_compressed, visible_tokens, visible_window
from nsa.ops._sequences import open_sequences
from nsa.ops.selected.reference import visible_selected
from tests.bench.test_gate import SMALL

SHAPE, CPU = parse_shape("4x2x16x32"), torch.device("cpu")


@pytest.mark.parametrize("seq_len", [1, 7, 8, 16, 17, 64, 65, 200])
def test_pairs_are_those_that_the_reference_sees(seq_len: int) -> None:
    point, config = Point(SHAPE, seq_len, 3, "random", torch.float32, CPU), SHAPE.config(SMALL)
    q = torch.zeros(1, seq_len, config.num_heads, config.head_dim)
    sequences = open_sequences("test", q, (1, seq_len), None, None, None, None, "reference")
    selection = hand_made_selection(replace(point, batch=1), config).flatten(0, 1)
    selected = visible_selected(selection, config, sequences)
    assert bool((selected.sum((0, 2, 3)) == selected[:, 0].sum()).all())
    pairs = {
        "attention.window": int(visible_window(sequences, config).sum()),
        "attention.compressed": int(visible_compressed(sequences, config).sum()),
        "attention.selected": int(selected[:, 0].sum()),
    }
    whole = Problem(CASES["attention"], point, config, {})
    heads, forward, both = 3 * 4, 2 * 16 + 2 * 32, (2 * 16 + 2 * 32) + (6 * 16 + 4 * 32)
    dense = heads * int(visible_tokens(sequences).sum()) * forward
    assert useful_flops(whole, backward=False, dense=True) == dense
    assert useful_flops(whole, backward=True) == heads * sum(pairs.values()) * both
    for name, count in pairs.items():
        problem = replace(whole, case=CASES[name])
        assert useful_flops(problem, backward=False) == heads * count * forward
        assert useful_flops(problem, backward=True) == heads * count * both
    selection_alone = replace(whole, case=CASES["attention.choice"])
    operations = heads * pairs["attention.compressed"] * 2 * 16
    assert useful_flops(selection_alone, backward=False) == operations


COMPRESS = {"k_cmp_raw": 10, "v_cmp_raw": 10, "dk_cmp": 3, "dv_cmp": 3}
COMBINE = dict.fromkeys(("out_cmp", "out_slc", "out_win", "gates", "dout"), 8)


@pytest.mark.parametrize(
    ("case", "sizes", "forward", "both"),
    [("compress", COMPRESS, 26, 52), ("combine", COMBINE, 8 * 5, 8 * (5 + 1 + 4 + 4))],
)
def test_useful_bytes_count_each_tensor_as_often_as_it_must_move(
    case: str, sizes: dict[str, int], forward: int, both: int
) -> None:
    point = Point(SHAPE, 64, 1, "random", torch.float32, CPU)
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    problem = Problem(CASES[f"attention.{case}"], point, SHAPE.config(), tensors)
    assert useful_bytes(problem, backward=False) == 4 * forward
    assert useful_bytes(problem, backward=True) == 4 * both
    assert useful_flops(problem, backward=True) is None
