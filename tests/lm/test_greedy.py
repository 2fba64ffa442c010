"""Generation with the cache writes what the model writes without it, token for token in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lm.greedy import first_differences, greedy, make_prompts
from tests.lm.test_decoder import make

PHIS = ("mean", "linear", "mlp")


def check(model_changes: dict[str, Any], prompts: int, count: int, **how: Any) -> None:
    model = make(**model_changes)
    model.head.weight.data *= 20  # so that texts do not stop at one token
    lengths = [1 + 7 * i % 90 for i in range(prompts)]
    texts = make_prompts(lengths, model.config.vocab_size)
    drawn = greedy(model, texts, count, **how)
    assert len({token for text in drawn for token in text}) > 10
    assert not first_differences(model, texts, drawn)


@pytest.mark.parametrize(
    ("phi", "how"),
    [
        ("mean", {"chunk": 31, "queries": 1}),
        ("linear", {"chunk": 200, "queries": 3}),
        ("mlp", {"chunk": 31, "queries": 8, "num_pages": 60}),
    ],
)
def test_some_prompts(phi, how):
    check({"phi": phi}, 6, 40, **how)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("num_pages", [None, 2300])
def test_a_hundred_prompts(phi, queries, num_pages):
    check({"phi": phi}, 100, 256, chunk=50, queries=queries, num_pages=num_pages)
