"""Compilations and captures are counted and, after the start, reported; the start is logged."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
from torch._dynamo.utils import counters

from nsa.train.config import ParallelConfig
from nsa.train.execution.compilation import CompilationCounter, Compiled, compilations
from nsa.train.execution.cuda_graphs import Replay
from nsa.train.telemetry.metrics import read_metrics
from nsa.train.telemetry.progress import RunReport
from nsa.train.trainer import Trainer
from tests.train.cases import new_trainer

CPU = torch.device("cpu")


@pytest.fixture
def counter():
    """A new one, which leaves nothing behind in PyTorch."""
    torch.compiler.reset()
    found = CompilationCounter()
    found.listen(CPU)
    yield found
    torch.compiler.reset()
    compilations.listen(CPU)


def test_graphs_are_counted_once_each(counter):
    """As many as PyTorch counts itself, recompilations included."""
    function = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager", dynamic=False)
    before = counters["stats"]["unique_graphs"]
    counter.listen(CPU)  # a second time
    for size in (3, 4, 4, 3, 5):
        function(torch.ones(size, requires_grad=True)).backward()
    assert counters["stats"]["unique_graphs"] - before == 3
    assert counter.now == Compiled(graphs=3)


def test_a_capture_counts_when_it_has_succeeded():
    counter = CompilationCounter()
    with counter.capturing():
        pass
    with pytest.raises(RuntimeError, match="invalidated"), counter.capturing():
        raise RuntimeError("capture invalidated")
    assert counter.now == Compiled(captures=1)


def test_kernels_are_counted_through_the_hook_of_triton(counter, monkeypatch):
    """The hook that was there is still called, and may take over a compilation."""
    runtime = SimpleNamespace(jit_cache_hook=lambda repr: repr == "taken")
    monkeypatch.setattr(triton.knobs, "runtime", runtime)
    for _ in range(2):
        counter.listen(torch.device("cuda", 0))
    before = counter.before_kernel = Mock()
    skipped = [runtime.jit_cache_hook(repr=name) for name in ("one", "taken", "two")]
    assert skipped == [False, True, False]
    assert counter.now == Compiled(kernels=2)
    assert before.call_count == 2


# --- in a run -------------------------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch):
    """``torch.compile`` without a C++ compiler; every size is a constant to it."""
    quick = functools.partial(torch.compile, backend="eager", dynamic=False)
    monkeypatch.setattr(torch, "compile", quick)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(trainer: Trainer) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Rows, events of kind compilation, and the log."""
    folder = trainer.run_folder
    with RunReport(folder.log, trainer.config.steps):
        trainer.run()
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    events = [event for event in events if event["kind"] == "compilation"]
    return read_metrics(folder.metrics_jsonl), events, folder.log.read_text()


@pytest.mark.usefixtures("traced")
def test_a_late_compilation_is_a_warning(tmp_path, monkeypatch):
    """A new number of sequences in the eighth step; those in the first five steps are expected."""
    changes: dict[str, Any] = {"steps": 10, "log_every": 1, "eval_every": 4, "checkpoint_every": 0}
    model = {"attention": "dense"}  # quick to trace
    made = new_trainer(tmp_path, accumulation=1, compile=True, model=model, **changes)
    config, draw, sizes = made.config, made._draw, iter([2, 1, 2, 2, 2, 2, 2, 3, 2, 2, 2, 2, 2, 2])

    def uneven(sampler, step):
        size = next(sizes)
        made.config = dataclasses.replace(config, micro_batch=size, global_batch=size)
        return draw(sampler, step)

    monkeypatch.setattr(made, "_draw", uneven)
    first = compilations.now.compilations
    rows, (event,), _ = run(made)
    counts = [row["compilations"] - first for row in rows]
    assert counts == [1, *[2] * 6, *[3] * 3]
    late = "after the first 5 steps of this process"
    assert event["message"] == f"step 8, {late}: torch.compile graphs compiled: 1"
    assert event["step"] == 7
    assert [row["step"] for row in rows if "first_step_s" in row] == [1]
    assert not {"kernel_compilations", "host_time_ms"} & rows[0].keys()


@pytest.mark.parametrize(("number", "warned"), [(1, 0), (2, 1)])
def test_the_first_evaluation_may_compile(tmp_path, monkeypatch, number, warned):
    made = new_trainer(tmp_path, steps=12, eval_every=6)
    share, calls = made._reports._share, itertools.count(1)

    def compiling(batches):
        if next(calls) == number:
            compilations.add(Compiled(graphs=1))
        return share(batches)

    monkeypatch.setattr(made._reports, "_share", compiling)
    _, events, _ = run(made)
    places = [event["message"].partition(",")[0] for event in events]
    assert places == ["evaluation after step 12"] * warned


def test_captures_are_counted(tmp_path, monkeypatch):
    """Where a graph is made; the graph itself is a stand-in."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(torch.cuda, "Stream", Mock)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: nullcontext())
    made = new_trainer(tmp_path, accumulation=1)
    replay, updates = Replay(made._forward_backward, made.state.optimizer.parameters()), Mock()
    (batch,) = made.next_batches()
    before, counts = compilations.now.captures, []
    for step in (batch, batch, batch, batch.padded(9)):
        for is_first in (True, False, False):
            replay(step, torch.ones(()), is_first)
        replay.update(updates, torch.zeros(()))
        counts.append((compilations.now.captures - before, updates.call_count))
    # The first step runs as it is; the second captures the graph that makes gradients, the one that
    # adds to them and that of the update, and so does another shape.
    assert counts == [(0, 1), (3, 2), (3, 2), (6, 3)]


@pytest.mark.usefixtures("traced")
def test_the_start_is_told_while_it_happens(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    whole, model = ParallelConfig(compile_layers=False), {"attention": "dense"}
    made = new_trainer(tmp_path, steps=2, compile=True, parallel=whole, model=model)
    rows, _, _ = run(made)
    said = [re.sub(r"\d+\.\d", "X", message) for message in caplog.messages]
    begins = ("start: ", "torch.compile", "first step")
    assert [line for line in said if line.startswith(begins)] == [
        *(f"start: {phase}" for phase in ("device", "model", "data", "first batch", "first step")),
        "torch.compile is compiling",
        "torch.compile has compiled in X s",
        "first step after X s: device X s, model X s, data X s, first batch X s, first step X s",
    ]
    assert made.startup.first_step_s == rows[0]["first_step_s"]
    (last,) = [message for message in caplog.messages if message.startswith("first step after")]
    whole_s, *phases = map(float, re.findall(r"(\d+\.\d) s", last))
    assert whole_s == pytest.approx(rows[0]["first_step_s"], abs=0.1)
    assert sum(phases) == pytest.approx(whole_s, abs=0.5)
