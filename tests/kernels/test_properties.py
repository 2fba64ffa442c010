"""The suite of operators and properties on kernels in the interpreter: fp32, the small pattern."""

from __future__ import annotations

import dataclasses

import pytest

from nsa.ops._triton import selected_index
from nsa.ops.selected import launch
from tests.ops.cases import small
from tests.ops.properties import *  # noqa: F403
from tests.ops.properties import Setting
from tests.ops.public import Case
from tests.ops.test_empty import WHERE, check_language_model

# NumPy's words inside the interpreter: a maximum over NaN, powers of keys that are masked
# afterwards, and the difference of two infinite lse.
pytestmark = pytest.mark.filterwarnings(
    "ignore:All-NaN slice encountered",
    "ignore:overflow encountered in exp2",
    "ignore:invalid value encountered in subtract",
)

CONFIG = small(num_heads=6, phi="linear")
NARROW = small(num_heads=2, num_kv_heads=1, value_dim=16)
SETTING = Setting(
    {
        "packed": Case(CONFIG, (70, 0, 1, 8)),
        "fewer queries": Case(CONFIG, (70, 3, 33), (12, 0, 5)),
        "dense": Case(dataclasses.replace(CONFIG, num_heads=2), (40, 40), dense=True),
    },
    {"fp32": Case(NARROW, (1,))},
    one=84,
    times=(79,),
    packed=(66, 9, 12),
    covered=52,
)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Chunks and segments that short sequences fill, too, and merges of several steps.

    Many rows a program are quick here.
    """
    sizes = {"FORWARD_CHUNK": 12, "BACKWARD_CHUNK": 20, "DQ_CHUNK": 12, "MERGED": 32}
    for name, value in {**sizes, "MERGE_ROWS": 64}.items():
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(launch, "num_segments", lambda *_: 2)
    monkeypatch.setattr(selected_index, "MOST_IN_CHUNK", 20)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(("shape", "where"), WHERE.values(), ids=WHERE)
def test_language_model_without_a_token(attention, shape, where, monkeypatch):
    for place in ("attention", "ops.embedding", "ops.projection"):
        monkeypatch.setattr(f"nsa.{place}.choose_backend", lambda *_: "triton")
    check_language_model(attention, shape, where)
