"""Every public operator with backend "triton", forward and backward, in the interpreter: fp32 and
the small pattern.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nsa.ops._triton.tuning import Tile, TileKey, default_tile, tiles_chosen_by
from nsa.ops.projection import ops as projection_launch
from nsa.ops.selected import launch as triton_launch
from tests.ops import properties
from tests.ops.cases import small
from tests.ops.checks import CHECKS, check_project
from tests.ops.public import (
    ALGORITHMS,
    RUNS,
    Case,
    check_combine,
    check_compress,
    check_selection,
)

CONFIG = small(num_heads=6, phi="linear")
CASES = {
    "packed": Case(CONFIG, (70, 0, 1, 8)),
    "fewer queries": Case(CONFIG, (70, 3, 33), (12, 0, 5)),
    "dense": Case(dataclasses.replace(CONFIG, num_heads=2), (40, 40), dense=True),
}
NARROW = small(num_heads=2, num_kv_heads=1, value_dim=16)
ONE = Case(NARROW, (84,))
TWO_HEADS = Case(small(num_heads=2, value_dim=16), (100,))
PACKED = Case(NARROW, (66, 9, 12))
# What these hold is held for the gathered algorithm by test_selected_gather.py, in segments. The
# whole is made of the others: what holds for them in turn is tried on a GPU for the whole, too.
ALONE = [name for name in properties.OPERATORS if name != "gathered"]
PARTS = [name for name in ALONE if name != "whole"]

# NumPy's words inside the interpreter: a maximum over NaN, powers of keys that are masked
# afterwards.
pytestmark = pytest.mark.filterwarnings(
    "ignore:All-NaN slice encountered", "ignore:overflow encountered in exp2"
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operator", CHECKS)
def test_operator(operator, case):
    CHECKS[operator](CASES[case])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_selected_blocks_table": ((-1, 130, 3), (-1, 200, 4))},
        {"coarse_block_size": 32, "num_coarse_blocks": 4},
        {"score_precision": "fp8"},
    ],
    ids=["table", "two stages", "fp8"],
)
def test_options_of_the_choice(changes):
    check_selection(Case(dataclasses.replace(NARROW, **changes), (270, 9)))


def test_steps_without_a_kept_block():
    """Most steps of the second stage are left out; the key before a kept block still counts."""
    stages: Any = {
        "coarse_block_size": 64,
        "num_coarse_blocks": 5,
        "num_init_blocks": 0,
        "num_local_blocks": 1,
    }
    with tiles_chosen_by(lambda key, tile: Tile(16, 4, 4, 1)):
        check_selection(Case(dataclasses.replace(NARROW, **stages), (1200,) * 6, (1,) * 6))


@pytest.mark.parametrize("branches", [("cmp", "slc", "win"), ("cmp", "win"), ("slc",)], ids=str)
@pytest.mark.parametrize("gate", [("sigmoid", 1.0), ("softmax", 1.0), ("softmax", 0.3)], ids=str)
def test_gates_of_a_projection(gate, branches):
    activation, temperature = gate
    changes = {"gate": activation, "gate_temperature": temperature, "branches": branches}
    check_project(Case(dataclasses.replace(NARROW, **changes), (70, 3)))


def test_heads_of_many_tokens_in_fewer_programs(monkeypatch):
    monkeypatch.setattr(projection_launch, "SOME_TOKENS", 0)
    check_project(Case(NARROW, (70, 3)))


def test_compression_by_mlp():
    check_compress(Case(dataclasses.replace(NARROW, phi="mlp"), (45, 9)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_queries_without_a_block(algorithm):
    """Lists of tiles that are empty, and queries without a block beside others."""
    ids = torch.full((66, 1, 4), -1, dtype=torch.int32)
    ids[40::3, :, 2] = 1
    results = RUNS[algorithm](Case(NARROW, (66,)), block_indices=ids)
    results.check()
    assert not results.of_queries["out"][:40].any()
    assert not results.of_queries["dq"][:40].any()


@pytest.mark.parametrize("group_size", [11, 40])
def test_tiles_that_end_between_the_heads_of_a_query(group_size):
    """Whole queries would leave more than an eighth of a tile's rows out, or do not fit into it."""
    tile, used = triton_launch.tile_of(
        default_tile(TileKey("selected_attention_fwd", 32, 4), (9, 0)), group_size, 16
    )
    assert used == tile.rows
    RUNS["selected"](
        Case(small(num_heads=group_size, num_kv_heads=1, value_dim=16), (37, 0, 9), (21, 0, 9))
    ).check()


@pytest.mark.parametrize("branches", [("slc", "win"), ("cmp",)])
def test_some_branches(branches):
    check_combine(Case(NARROW, (20,)), branches)
    RUNS["whole"](Case(dataclasses.replace(NARROW, branches=branches), (36,))).check()


def test_whole_gathered():
    RUNS["whole"](Case(NARROW, (66, 9), algorithm="gathered")).check()


@pytest.mark.parametrize("operator", ALONE)
def test_causality_bit_for_bit(operator):
    properties.check_causality(operator, ONE, (79,))


@pytest.mark.parametrize("operator", PARTS)
def test_same_bits_on_every_run(operator):
    properties.check_same_bits(operator, PACKED, runs=2)


@pytest.mark.parametrize("operator", PARTS)
def test_nan_reaches_no_other_sequence(operator):
    properties.check_nan_isolation(operator, PACKED, 1)


@pytest.mark.parametrize("operator", RUNS)
def test_packed_equals_separate(operator):
    properties.check_packed_equals_separate(operator, Case(NARROW, (70, 0, 33), (20, 0, 7)))


def test_queries_of_a_block_in_chunks(monkeypatch):
    """dK and dV of a block are added up over several programs."""
    monkeypatch.setattr(triton_launch, "BACKWARD_CHUNK", 12)
    RUNS["selected"](TWO_HEADS).check()


def test_full_coverage_is_dense_attention():
    properties.check_full_coverage(Case(NARROW, (52,)))


def test_one_hot_gates_are_one_branch():
    properties.check_one_hot_gates(Case(NARROW, (36,)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_order_of_indices_does_not_matter(algorithm):
    properties.check_shuffled_indices(algorithm, Case(NARROW, (52, 9)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_block_that_is_named_again_counts_once(algorithm):
    properties.check_repeated_indices(algorithm, Case(NARROW, (52, 9)))


def test_unchosen_blocks_have_no_gradient():
    properties.check_unchosen_blocks("selected", TWO_HEADS)


def test_shifted_positions_change_nothing():
    properties.check_rope_shift(Case(NARROW, (36,)))
