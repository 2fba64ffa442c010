"""What kernels need inside an operator: the formulas against the launchers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from nsa.config import NSAConfig
from nsa.ops.attention.ops import _backward
from nsa.ops.selected.launch import selected_forward
from nsa.ops.selected.ops import selected_call
from nsa.plan.scratch import scratch_bytes
from nsa.plan.timeline import Timeline

SEED = NSAConfig(num_heads=12, num_kv_heads=2, head_dim=64, value_dim=64)
# Tiles of other GPUs hold other numbers of keys than the formulas take for granted.
WITHIN = 0.05


def follow(given: Sequence[Any]) -> Timeline:
    """A timeline that knows what was there before."""
    timeline = Timeline()
    for tensor in given:
        if isinstance(tensor, Tensor):
            timeline.hold(tensor, "given")
    return timeline


def beyond_results(timeline: Timeline) -> int:
    return sum(timeline.at_peak.values()) - sum(timeline.held.values())


# B, S, the pattern, packed: lists are short at 1,024 tokens; at 8,192 choices may scatter.
CASES = {
    "tiled": (8, 1024, SEED, False),
    "gathered": (1, 8192, SEED, False),
    "packed": (4, 2048, SEED, True),
    "other heads": (1, 8192, NSAConfig(num_heads=8, num_kv_heads=2, head_dim=128, value_dim=64, num_selected_blocks=8), False),
    "no window": (1, 4096, NSAConfig(num_heads=4, num_kv_heads=4, head_dim=32, value_dim=32, branches=("cmp", "slc")), False),
    "no choice": (1, 8192, NSAConfig(num_heads=8, num_kv_heads=8, head_dim=64, value_dim=64, branches=("cmp", "win")), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_formulas_follow_the_launchers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers allocate as always; kernels are left out."""
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    number, length, pattern, packed = CASES[name]
    tokens, heads, kv = number * length, pattern.num_heads, pattern.num_kv_heads

    def rows(count: int, number: int, size: int) -> Tensor:
        return torch.zeros(count, number, size, dtype=torch.bfloat16)

    cu = torch.arange(number + 1, dtype=torch.int32) * length if packed else None
    where: tuple[Any, ...] = (cu, cu, None, number, length, length, pattern.text, 0.125, "auto")
    on = pattern.branches
    key, value = rows(tokens, kv, pattern.head_dim), rows(tokens, kv, pattern.value_dim)
    compressed = [x[: tokens // pattern.compress_stride].clone() for x in (key, value)]
    branches = [x if branch in on else None for branch in ("slc", "win") for x in (key, value)]
    q, out = rows(tokens, heads, pattern.head_dim), rows(tokens, heads, pattern.value_dim)
    inputs: tuple[Any, ...] = (q, None, *compressed, *branches, torch.zeros(tokens, heads, 3))
    lse = torch.zeros(tokens, heads)
    order: Tensor | None = torch.zeros(0, dtype=torch.int32)
    union: Tensor | None = torch.zeros(0, dtype=torch.int64)
    chosen = torch.zeros(tokens, kv, pattern.num_selected_blocks, dtype=torch.int32)
    if "slc" in on:
        call = selected_call(q, value, cu, cu, number, length, length, pattern.block_size, 0.125, "auto")
        forward = follow([*inputs, chosen, cu])
        with forward:
            results = call.results(q, key, value, chosen)
            selected_forward(q, key, value, chosen, call, results)
        if results.order is not None:
            order, union = results.order, results.union
        later = (1 + ("win" in on)) * out.nbytes + ("win" in on) * lse.nbytes  # what the whole has not made yet
        found = scratch_bytes("nsa.attention.default", (*inputs, *where))
        assert found == pytest.approx(max(0, beyond_results(forward) - later), rel=WITHIN, abs=100_000)
    saved: tuple[Any, ...] = (out, lse, chosen, out.clone(), lse, order, union, out.clone(), lse, torch.zeros_like(out))
    backward = follow([*inputs, *saved, cu])
    with backward:
        grads = _backward(*inputs, *saved, *where)
    assert len(grads) == sum(x is not None for x in inputs)
    found = scratch_bytes("nsa.attention_backward.default", (*inputs, *([None] * len(saved)), *where))
    assert found == pytest.approx(beyond_results(backward), rel=WITHIN, abs=100_000)
