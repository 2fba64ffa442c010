"""Fuzzing of the kernels: random lengths in shapes of the matrix, every operator against fp64.

What is refused does not depend on the device: tests/faults/test_fuzz.py.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.gpu.matrix import MATRIX
from tests.ops.public import CHECKS, Case

# their kernels are compiled by now
NAMES = ("bf16 G6 D64", "bf16 G3 D32 small", "fp16 G2 D192/128 small", "fp32 G3 D16 l'=32")


@st.composite
def cases(draw: st.DrawFn, like: Case) -> Case:
    """A sequence longer than the selected blocks, and others; at times fewer queries."""
    covered = like.config.num_selected_blocks * like.config.block_size
    long = draw(st.integers(covered + 1, covered + 900))
    lengths = draw(st.lists(st.one_of(st.integers(0, 80), st.integers(0, 700)), max_size=6))
    lengths.insert(draw(st.integers(0, len(lengths))), long)
    queries = None
    if draw(st.integers(0, 3)) == 0:
        queries = tuple(n if n == long else draw(st.integers(0, n)) for n in lengths)
    return dataclasses.replace(
        like, lengths_k=tuple(lengths), lengths_q=queries, seed=draw(st.integers(0, 2**31))
    )


@pytest.mark.parametrize("name", NAMES)
def test_random_lengths(name):
    @seed(1)
    @settings(
        max_examples=60, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=cases(MATRIX[name]), operator=st.sampled_from(["whole", *CHECKS]))
    def run(case, operator):
        CHECKS[operator](case)

    run()
