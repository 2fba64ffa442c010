"""The learning rate, step by step."""

from __future__ import annotations

import math

import pytest

from nsa.train.schedule import lr_factor


def test_warmup_rises_by_equal_steps_to_the_peak() -> None:
    assert [lr_factor(step, 100, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine(floor: float) -> None:
    steps, warmup = 110, 10
    for step in range(warmup, steps):
        expected = floor + (1 - floor) * (1 + math.cos(math.pi * (step - warmup) / 100)) / 2
        assert lr_factor(step, steps, warmup, floor) == pytest.approx(expected, rel=1e-12)
    assert lr_factor(60, steps, warmup, floor) == pytest.approx((1 + floor) / 2)


def test_last_update_is_not_wasted() -> None:
    assert lr_factor(99, 100, 10) > 0
    assert lr_factor(100, 100, 10) == pytest.approx(0.0)
    assert lr_factor(105, 100, 10, 0.2) == pytest.approx(0.2)


def test_no_warmup_and_nothing_but_warmup() -> None:
    assert lr_factor(0, 10, 0) == 1.0
    assert [lr_factor(step, 4, 8) for step in range(4)] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert lr_factor(8, 8, 8) == 1.0
