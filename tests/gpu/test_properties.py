"""The properties of docs/semantics.md for kernels, at lengths where tiles, chunks and lists have edges."""

from __future__ import annotations

import dataclasses

import pytest

from tests.gpu.matrix import MATRIX, seed_case
from tests.ops import properties
from tests.ops.public import ALGORITHMS, RUNS, Case

FP32 = MATRIX["fp32 G6 D64"]
WIDE = MATRIX["bf16 G16 D128"]


def case_like(like: Case, *lengths: int, queries: tuple[int, ...] | None = None) -> Case:
    return dataclasses.replace(like, lengths_k=lengths, lengths_q=queries)


@pytest.mark.parametrize("like", [MATRIX["bf16 G6 D64"], WIDE, FP32], ids=["bf16", "wide", "fp32"])
@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_causality_bit_for_bit(operator, like):
    properties.check_causality(operator, case_like(like, 1500), (100, 640, 1037, 1151, 1400))


def test_causality_of_the_whole_gathered():
    properties.check_causality(
        "whole", dataclasses.replace(seed_case(1500), algorithm="gathered"), (100, 1037, 1151)
    )


@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_causality_with_fewer_queries_than_keys(operator):
    properties.check_causality(operator, seed_case(1500, queries=(700,)), (900, 1151))


@pytest.mark.parametrize("like", [MATRIX["bf16 G6 D64"], WIDE, FP32], ids=["bf16", "wide", "fp32"])
@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_same_bits_on_every_run(operator, like):
    properties.check_same_bits(operator, case_like(like, 1500, 0, 77, 300), runs=5)


@pytest.mark.parametrize("like", [MATRIX["bf16 G6 D64"], FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("operator", properties.OPERATORS)
def test_nan_reaches_no_other_sequence(operator, like):
    properties.check_nan_isolation(operator, case_like(like, 300, 77, 1500, 40), 1)
    properties.check_nan_isolation(operator, case_like(like, 300, 77, 1500, 40), 2)


@pytest.mark.parametrize("operator", RUNS)
def test_packed_equals_separate(operator):
    properties.check_packed_equals_separate(
        operator, seed_case(1200, 0, 33, 300, queries=(1200, 0, 7, 100))
    )


@pytest.mark.parametrize("like", [MATRIX["bf16 G6 D64"], FP32], ids=["bf16", "fp32"])
def test_full_coverage_is_dense_attention(like):
    properties.check_full_coverage(case_like(like, 1000))


def test_one_hot_gates_are_one_branch():
    properties.check_one_hot_gates(seed_case(1200, 70))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_order_of_indices_does_not_matter(algorithm):
    properties.check_shuffled_indices(algorithm, seed_case(1200, 70))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_block_that_is_named_again_counts_once(algorithm):
    properties.check_repeated_indices(algorithm, seed_case(1200, 70))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_unchosen_blocks_have_no_gradient(algorithm):
    properties.check_unchosen_blocks(algorithm, seed_case(2500))


def test_shifted_positions_change_nothing():
    like = MATRIX["fp32 G3 D16 l'=32"]
    config = dataclasses.replace(like.config, rope_theta=256)
    properties.check_rope_shift(dataclasses.replace(case_like(like, 1200), config=config))
