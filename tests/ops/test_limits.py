"""Sizes beyond the index limits of kernels are refused; kernels are left out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa import NSAConfig, window_attention
from nsa.ops import _checks
from nsa.ops._plan import PLANS
from nsa.ops._sequences import Sequences
from nsa.ops._triton.kernel import Launch
from nsa.ops._triton.selected_index import new_index
from tests.ops.cases import small
from tests.ops.test_bad_input import LENGTH, good


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr(Launch, "__call__", lambda self, *args: None)
    monkeypatch.setattr("nsa.ops._backend.kernels_run_on_cpu", lambda: True)


def run(function: str, **changes: Any) -> Tensor:
    """The first result of a public function on fp32 inputs."""
    for plans in PLANS:  # made under another limit
        plans.clear()
    given = {**good(function), **changes, "backend": "triton"}
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            given[name] = x.float().requires_grad_()
    found = getattr(nsa, function)(**given)
    return found[0] if isinstance(found, tuple) else found


def ids(num_blocks: int) -> Tensor:
    return torch.zeros(LENGTH, 2, num_blocks, dtype=torch.int32)


ROWS = LENGTH * 4  # queries by heads
SELECTIONS = LENGTH * 2 * 4
BLOCKS = -(-LENGTH // 16)
QUERIES = 16  # of a tile of 32 rows, 2 heads a group
TILED = {"block_indices": ids(4), "algorithm": "tiled"}
GATHERED = {"block_indices": ids(8), "algorithm": "gathered"}
PARTIALS = ROWS * 8
TOKENS = "tokens of keys"

# The function and its arguments, the limit that is set, the number that must stay below it, and
# what the message says.
WHOLE, SELECTED = "native_sparse_attention", "selected_attention"
CASES: list[tuple[str, dict[str, Any], str, int, str]] = [
    (WHOLE, {"config": small(branches=("cmp", "win"))}, "NUMBERS", ROWS, "q rows (tokens times"),
    (WHOLE, {"config": small(branches=("win",))}, "TOKENS", LENGTH, f"k_win {TOKENS}"),
    (WHOLE, {}, "TOKENS", LENGTH, f"x {TOKENS}"),
    ("window_attention", {}, "NUMBERS", ROWS, "q rows"),
    ("window_attention", {}, "TOKENS", LENGTH, f"k {TOKENS}"),
    ("compressed_attention", {}, "NUMBERS", ROWS, "q rows"),
    ("compressed_attention", {}, "TOKENS", LENGTH, f"k_cmp {TOKENS}"),
    ("select_blocks", {}, "NUMBERS", ROWS, "q rows"),
    ("select_blocks", {}, "TOKENS", LENGTH, f"k_cmp {TOKENS}"),
    ("compress", {}, "TOKENS", LENGTH, f"x {TOKENS}"),
    (SELECTED, TILED, "TOKENS", LENGTH, f"k {TOKENS}"),
    (SELECTED, TILED, "NUMBERS", SELECTIONS, "block_indices selections"),
    (SELECTED, GATHERED, "NUMBERS", PARTIALS, "q partial results"),
    (SELECTED, TILED, "LISTED", QUERIES * 4, "block_indices slots"),
    (SELECTED, TILED, "SORTED", BLOCKS * QUERIES * 4, "k blocks a sequence"),
]


@pytest.mark.parametrize(("function", "given", "limit", "number", "said"), CASES)
def test_what_cannot_be_numbered_is_refused(function, given, limit, number, said, monkeypatch):
    factor = QUERIES * 4 if limit == "SORTED" else 1
    monkeypatch.setattr(_checks, limit, number + factor)
    run(function, **given)
    monkeypatch.setattr(_checks, limit, number)
    argument, _, what = said.partition(" ")
    rule = f"{argument} must have fewer than {number // factor} {what}"
    with pytest.raises(ValueError, match=rf"^{re.escape(rule)}.*, got {number // factor}\. Give "):
        run(function, **given)


@pytest.mark.parametrize(
    ("given", "number", "what"),
    [
        # Of dQ, whose tile is another one than that of the forward.
        (GATHERED, PARTIALS, "q must have fewer than {} partial results"),
        (
            {**TILED, "config": small(block_size=128)},
            (SELECTIONS // 128 + 2) * 128,
            "k must have fewer than {} rows of sums of dK and dV",
        ),
    ],
    ids=["slots", "sums"],
)
def test_numbers_of_the_backward(given, number, what, monkeypatch):
    monkeypatch.setattr(_checks, "NUMBERS", number + 1)
    run("selected_attention", **given).sum().backward()
    out = run("selected_attention", **given)
    monkeypatch.setattr(_checks, "NUMBERS", number)
    with pytest.raises(ValueError, match=rf"^{what.format(number)}.*, got {number}\."):
        out.sum().backward()


def test_keys_of_the_index(monkeypatch):
    """Called directly: these are the most of all only where there are many sequences."""
    sequences = Sequences(None, 1, LENGTH, LENGTH, torch.device("cpu"))
    number = BLOCKS * 2
    monkeypatch.setattr(_checks, "NUMBERS", number)
    rule = f"k must have fewer than {number} blocks times KV heads"
    with pytest.raises(ValueError, match=rf"^{rule} .*, got {number}\."):
        new_index(ids(4), sequences, 16, LENGTH, 1)
    monkeypatch.setattr(_checks, "NUMBERS", number + 1)
    assert new_index(ids(4), sequences, 16, LENGTH, 1).absent == number


def test_limits_as_they_are():
    """Without memory for so many."""
    for tokens, heads in ((2**29 - 2**14 - 1, 4), (2**29 - 2**14, 4), (2**30, 2)):
        q = torch.empty(tokens, heads, 16, device="meta")
        if tokens * heads < 2147418112:
            _checks.check_queries(q)
            _checks.check_keys("k", q)
            continue
        rule = rf"q must have fewer than 2147418112 rows .*, got {tokens * heads}\."
        with pytest.raises(ValueError, match=rule):
            _checks.check_queries(q)


def test_patterns_and_hints_that_kernels_cannot_number():
    rule = r"window_size must be at most 1,073,741,824, got 1073741825"
    with pytest.raises(ValueError, match=rule):
        NSAConfig(window_size=2**30 + 1)
    with pytest.raises(ValueError, match="num_kv_heads must be less than 65,536, got 65536"):
        NSAConfig(num_heads=2**16, num_kv_heads=2**16)
    rule = r"max_seqlen_q must be at least 0 and at most 2\*\*30, got 2147483647"
    with pytest.raises(ValueError, match=rule):
        window_attention(**good("window_attention"), max_seqlen_q=2**31 - 1)
