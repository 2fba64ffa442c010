"""The properties of docs/semantics.md for kernels, at lengths where tiles and lists have edges."""

from __future__ import annotations

import dataclasses

import pytest

from tests.gpu.matrix import MATRIX, seed_case
from tests.ops import properties
from tests.ops.public import ALGORITHMS, RUNS, Case

LIKE = {"bf16": "bf16 G6 D64", "wide": "bf16 G16 D128", "fp32": "fp32 G6 D64"}


def case_like(name: str, *lengths: int) -> Case:
    return dataclasses.replace(MATRIX[LIKE[name]], lengths_k=lengths, lengths_q=None)


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_causality_bit_for_bit(operator, like):
    properties.check_causality(operator, case_like(like, 1500), (100, 640, 1037, 1151, 1400))


def test_causality_of_the_whole_gathered():
    case = dataclasses.replace(seed_case(1500), algorithm="gathered")
    properties.check_causality("whole", case, (100, 1037, 1151))


@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_causality_with_fewer_queries_than_keys(operator):
    properties.check_causality(operator, seed_case(1500, queries=(700,)), (900, 1151))


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_same_bits_on_every_run(operator, like):
    properties.check_same_bits(operator, case_like(like, 1500, 0, 77, 300), runs=5)


@pytest.mark.parametrize("poisoned", [1, 2])
@pytest.mark.parametrize("like", ["bf16", "fp32"])
@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_nan_reaches_no_other_sequence(operator, like, poisoned):
    properties.check_nan_isolation(operator, case_like(like, 300, 77, 1500, 40), poisoned)


@pytest.mark.parametrize("operator", RUNS)
def test_packed_equals_separate(operator):
    case = seed_case(1200, 0, 33, 300, queries=(1200, 0, 7, 100))
    properties.check_packed_equals_separate(operator, case)


@pytest.mark.parametrize("like", ["bf16", "fp32"])
def test_full_coverage_is_dense_attention(like):
    properties.check_full_coverage(case_like(like, 1000))


def test_one_hot_gates_are_one_branch():
    properties.check_one_hot_gates(seed_case(1200, 70))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_indices_of_blocks(algorithm):
    """Order and repetition do not matter, and blocks that are not named have no gradient."""
    properties.check_shuffled_indices(algorithm, seed_case(1200, 70))
    properties.check_repeated_indices(algorithm, seed_case(1200, 70))
    properties.check_unchosen_blocks(algorithm, seed_case(2500))


def test_shifted_positions_change_nothing():
    like = MATRIX["fp32 G3 D16 l'=32"]
    config = dataclasses.replace(like.config, rope_theta=256)
    properties.check_rope_shift(dataclasses.replace(like, config=config, lengths_k=(1200,)))
