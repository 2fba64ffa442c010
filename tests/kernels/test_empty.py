"""No token at all: kernels are not launched, or do nothing; results are empty and gradients 0."""

from __future__ import annotations

import pytest

from tests.ops.empty import CASES, CHECKS, WHERE, check_language_model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operator", CHECKS)
def test_operator(operator, case):
    CHECKS[operator](CASES[case], "triton")


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(("shape", "where"), WHERE.values(), ids=WHERE)
def test_language_model(attention, shape, where, monkeypatch):
    for place in ("attention", "ops.embedding", "ops.projection"):
        monkeypatch.setattr(f"nsa.{place}.choose_backend", lambda *_: "triton")
    check_language_model(attention, shape, where)
