"""The learning rate, step by step."""

from __future__ import annotations

import math

import pytest

from nsa.train.optim import lr_factor


def test_warmup_rises_by_equal_steps_to_the_peak() -> None:
    assert [lr_factor(step, 100, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert lr_factor(0, 10, 0) == 1.0
    assert [lr_factor(step, 4, 8) for step in (0, 3, 8)] == [1 / 8, 4 / 8, 1.0]


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine(floor: float) -> None:
    """Its end comes after the last step, whose update is not wasted."""
    for step in range(10, 111):
        expected = floor + (1 - floor) * (1 + math.cos(math.pi * (step - 10) / 100)) / 2
        assert lr_factor(step, 110, 10, floor) == pytest.approx(expected, rel=1e-12)
    assert lr_factor(115, 110, 10, floor) == pytest.approx(floor)
