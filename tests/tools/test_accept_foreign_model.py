"""The module in a foreign model: what the comparison notices, with attention that compiles fast."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nsa import NSAConfig
from tools.accept import foreign_model
from tools.accept.foreign_model import Decoder, Size, judge, make_batches, measure, train

CPU = torch.device("cpu")
PATTERN = NSAConfig(
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    value_dim=16,
    compress_block_size=8,
    compress_stride=4,
    block_size=16,
    num_selected_blocks=3,
    num_local_blocks=1,
    window_size=16,
)
SMALL = Size(
    width=16,
    num_layers=1,
    config=PATTERN,
    warmup=((4, 64), (3, 96), (2, 80), (1, 64), (1, 128), (1, 48)),
    later=((2, 128), (1, 100), (5, 33), (3, 77), (1, 60)),
    rounds=24,
)


class RunningMean(nn.Module):
    """Stands in for the attention: the mean of all tokens so far."""

    def __init__(self, width: int, config: NSAConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.proj(x.cumsum(1) / count[:, None])


class Specialising(RunningMean):
    """Formats a size, which makes the compiler take it for a constant."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(f"{x.shape[1]}") > 0
        return super().forward(x)


class ShiftedWhenCompiled(RunningMean):
    """Wrong under the compiler alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.5 * x if torch.compiler.is_compiling() else 0.0)


def test_a_module_that_compiles_once_passes(monkeypatch):
    monkeypatch.setattr(foreign_model, "NativeSparseAttention", RunningMean)
    found = measure(SMALL, CPU, "eager")
    assert found.faults == []
    assert found.figures["compilations_after_5"] == 0
    assert found.figures["loss_last"] < found.figures["loss_first"] - 0.5
    steps, graphs, breaks = map(int, re.findall(r"\d+", found.remarks[0]))
    assert (steps, breaks) == (6 + 24 * 5, 0)
    assert 0 < graphs <= 4


@pytest.mark.parametrize(
    ("attention", "fault"),
    [
        (Specialising, r"compiled anew for tokens of \[2, 129\], and \d+ more"),
        (ShiftedWhenCompiled, r"compiled, it is 0\.\d+ nats from fp32"),
    ],
)
def test_attention_that_the_compiler_does_not_get_right_fails(monkeypatch, attention, fault):
    monkeypatch.setattr(foreign_model, "NativeSparseAttention", attention)
    size = replace(SMALL, rounds=1, later=SMALL.later[:3])
    found = measure(size, CPU, "eager")
    assert re.match(fault, found.faults[0])
    assert (found.figures["compilations_after_5"] > 0) == (attention is Specialising)


NUMBERS = len(SMALL.warmup), len(SMALL.later)
EXACT = [5.0] * NUMBERS[0] + [4.0] * NUMBERS[1]
FLAT = [5.0] * sum(NUMBERS)


@pytest.mark.parametrize(
    ("exact", "eager", "compiled", "fault"),
    [
        (EXACT, 0.01, 0.019, None),
        (EXACT, 0.01, 0.021, "compiled, it is 0.0210 nats from fp32, at most 0.0200"),
        (EXACT, 0.0, 0.0019, None),
        (EXACT, 0.0, 0.0021, "compiled, it is 0.0021 nats"),
        (EXACT, 0.11, 0.0, "bf16 is 0.1100 nats from fp32"),
        (EXACT, math.nan, 0.0, "bf16 is nan"),
        (EXACT, 0.01, math.nan, "compiled, it is nan"),
        (FLAT, 0.0, 0.0, "the loss fell by 0.000 nats, at least 0.5"),
    ],
)
def test_compiled_losses_may_be_twice_as_far_off(exact, eager, compiled, fault):
    near, other = ([loss + off for loss in exact] for off in (eager, compiled))
    faults = judge(SMALL, exact, near, other, []).faults
    assert [text.startswith(fault or "") for text in faults] == ([True] if fault else [])


def test_the_module_itself_trains_in_it():
    torch.manual_seed(0)
    losses, _ = train(Decoder(SMALL), make_batches(SMALL, CPU)[:3], autocast=True)
    assert all(math.isfinite(loss) for loss in losses)
