"""The module in a foreign model: what its comparison notices, with attention that compiles quickly."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nsa import NSAConfig
from tools.accept import foreign, foreign_model
from tools.accept.case import Case
from tools.accept.foreign_model import SMALL, Decoder, judge, make_batches, measure, train
from tools.accept.setting import Machine, Setting

CPU = torch.device("cpu")
SHORT = dataclasses.replace(SMALL, width=16, num_layers=1, rounds=24)


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


def test_a_module_that_compiles_once_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_model, "NativeSparseAttention", RunningMean)
    found = measure(SHORT, CPU, "eager")
    assert found.faults == []
    assert found.steps == len(SHORT.warmup) + SHORT.rounds * len(SHORT.later)
    assert 0 < found.graphs <= 4
    assert found.graph_breaks == 0
    assert 0 < found.eager_error_nats < 0.05
    assert found.loss_last < found.loss_first - 0.5


def test_a_size_that_compiles_anew_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_model, "NativeSparseAttention", Specialising)
    found = measure(dataclasses.replace(SHORT, rounds=1), CPU, "eager")
    assert found.compilations_after_warmup > 0
    (fault,) = found.faults
    assert re.match(r"compiled anew for tokens of \[2, 129\]: \d/\d: .*\d, and 4 more", fault)
    assert not torch._dynamo.config.error_on_recompile


def test_a_compiled_model_that_computes_otherwise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_model, "NativeSparseAttention", ShiftedWhenCompiled)
    found = measure(dataclasses.replace(SHORT, rounds=2), CPU, "eager")
    assert len(found.faults) == 1
    assert found.faults[0].startswith("compiled, it is 0.")


NUMBER = len(SMALL.warmup) + len(SMALL.later)
EXACT = [5.0] * len(SMALL.warmup) + [4.0] * len(SMALL.later)


@pytest.mark.parametrize(
    ("eager", "compiled", "fault"),
    [
        (0.01, 0.019, None),
        (0.01, 0.021, "compiled, it is 0.0210 nats from fp32, at most 0.0200"),
        (0.0, 0.0019, None),
        (0.0, 0.0021, "compiled, it is 0.0021 nats"),
        (0.11, 0.0, "bf16 is 0.1100 nats from fp32"),
        (math.nan, 0.0, "bf16 is nan"),
        (0.01, math.nan, "compiled, it is nan"),
    ],
)
def test_compiled_losses_may_be_twice_as_far_off(
    eager: float,
    compiled: float,
    fault: str | None,
) -> None:
    near, other = ([loss + off for loss in EXACT] for off in (eager, compiled))
    found = judge(SMALL, EXACT, near, other, [])
    assert [text.startswith(fault or "") for text in found.faults] == ([True] if fault else [])


def test_a_model_that_does_not_learn_fails() -> None:
    flat = [5.0] * NUMBER
    found = judge(SMALL, flat, flat, flat, [])
    assert found.faults == ["the loss fell by 0.000 nats, at least 0.5"]


def test_the_module_itself_trains_in_it() -> None:
    torch.manual_seed(0)
    losses = train(Decoder(SMALL), make_batches(SMALL, CPU)[:3], autocast=True)
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("printed", "code", "fault"),
    [
        ('{"steps": 9, "graphs": 3, "graph_breaks": 0, "compilations_after_warmup": 0, '
         '"eager_error_nats": 0.001, "compiled_error_nats": 0.001, "loss_first": 5.0, '
         '"loss_last": 4.0, "faults": []}', 0, ()),
        ('{"steps": 9, "graphs": 3, "graph_breaks": 0, "compilations_after_warmup": 2, '
         '"eager_error_nats": 0.001, "compiled_error_nats": 0.001, "loss_first": 5.0, '
         '"loss_last": 4.0, "faults": ["compiled anew"]}', 1, ("compiled anew",)),
        ("Traceback", 1, ("exit code 1",)),
        ("nothing", 0, ("it printed no result",)),
    ],
)  # fmt: skip
def test_the_case_reads_what_the_program_prints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    printed: str,
    code: int,
    fault: tuple[str, ...],
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{printed}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(foreign, "PYTHON", str(program))
    machine = Machine("NVIDIA H200", 1, "c0ffee")
    setting = Setting(tmp_path, machine, "1", time.monotonic() + 60, say=lambda line: None)
    finding = foreign.foreign_model(Case("foreign model", "foreign model", "", 10), setting)
    assert finding.faults == fault
    if printed.startswith("{"):
        assert finding.remarks[0] == "9 steps, 3 graphs, 0 graph breaks"
        assert finding.figures.compilations_after_5 == 2 * code
