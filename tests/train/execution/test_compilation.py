"""Compilations and captures are counted and, when they come late, reported; the start is logged."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch._dynamo.utils import counters

from nsa.train import trainer
from nsa.train.config import ParallelConfig
from nsa.train.data import open_data
from nsa.train.execution.compilation import CompilationCounter, Compiled, compilations
from nsa.train.execution.cuda_graphs import Replay
from nsa.train.telemetry.metrics import read_metrics
from nsa.train.telemetry.progress import RunReport
from nsa.train.telemetry.throughput import STARTING_STEPS
from nsa.train.trainer import Trainer
from tests.train.cases import PATTERN, make_trainer, tiny_config

CPU = torch.device("cpu")
QUICK = {"attention": "dense"}  # to trace: what is counted is the same


@pytest.fixture
def counter() -> Iterator[CompilationCounter]:
    """A new one, which leaves nothing behind in PyTorch."""
    torch.compiler.reset()
    found = CompilationCounter()
    found.listen(CPU)
    yield found
    torch.compiler.reset()
    compilations.listen(CPU)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_graphs_are_counted_once_each_with_their_time(counter: CompilationCounter) -> None:
    """As many as PyTorch counts itself, recompilations included."""
    function = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager", dynamic=False)
    before, begin = graphs(), time.perf_counter()
    counter.listen(CPU)  # a second time
    for size in (3, 4, 4, 3, 5):
        function(torch.ones(size, requires_grad=True)).backward()
    elapsed = time.perf_counter() - begin
    assert (counter.now.graphs, counter.now.compilations, graphs() - before) == (3, 3, 3)
    assert 0 < counter.now.graphs_s <= elapsed
    assert (counter.now.captures, counter.now.kernels) == (0, 0)


def test_counting_goes_on_after_a_reset(counter: CompilationCounter) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    torch.compiler.reset()
    counter.listen(CPU)
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert counter.now.graphs == 2


def test_a_capture_counts_when_it_has_succeeded() -> None:
    counter = CompilationCounter()
    with counter.capturing():
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="invalidated"), counter.capturing():
        raise RuntimeError("capture invalidated")
    assert (counter.now.captures, counter.now.compilations) == (1, 1)
    assert counter.now.captures_s >= 0.01


def test_kernels_are_counted_through_the_hooks_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside hooks that are there; one that takes over a compilation has its way."""
    said: list[str] = []

    def note_begin(*, repr: str) -> bool:
        said.append("begin")
        return repr == "taken"

    def note_end(*, repr: str) -> None:
        said.append("end")

    runtime = SimpleNamespace(jit_cache_hook=note_begin, jit_post_compile_hook=note_end)
    monkeypatch.setattr(triton.knobs, "runtime", runtime)
    counter = CompilationCounter()
    counter.listen(torch.device("cuda", 0))
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    counter.listen(torch.device("cuda", 0))
    assert (runtime.jit_cache_hook, runtime.jit_post_compile_hook) == hooks, "chained twice"
    for name in ("one", "taken", "two"):  # as Triton does it
        if not runtime.jit_cache_hook(repr=name):
            time.sleep(0.005)
            runtime.jit_post_compile_hook(repr=name)
    torch.compiler.reset()  # the callbacks of this counter
    compilations.listen(CPU)
    assert (counter.now.kernels, counter.now.compilations) == (2, 0)
    assert counter.now.kernels_s >= 0.01
    assert said == ["begin", "end", "begin", "begin", "end"]


def test_what_happened_in_words() -> None:
    before, after = Compiled(2, 1, 9, 4.0, 0.5, 1.0), Compiled(3, 3, 9, 7.25, 0.75, 1.0)
    said = "torch.compile compiled 1 graph (3.2 s), 2 CUDA graphs captured (0.2 s)"
    assert str(after - before) == said
    assert before + (after - before) == after
    assert str(Compiled(kernels=1, kernels_s=0.04)) == "1 Triton kernel compiled or loaded (0.0 s)"
    assert str(Compiled(graphs_s=2.0)) == "torch.compile compiled a backward pass (2.0 s)"
    assert str(Compiled()) == ""


# ----------------------------------------------------------------------------------- in a run


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.compile`` without a C++ compiler; every size is a constant to it."""
    quick = functools.partial(torch.compile, backend="aot_eager", dynamic=False)
    monkeypatch.setattr(torch, "compile", quick)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(trainer: Trainer, path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Rows, events of kind compilation, and the log."""
    with RunReport(path / "log.txt", trainer.config.steps):
        trainer.run()
    lines = (path / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "compilation"]
    return read_metrics(path / "metrics.jsonl"), events, (path / "log.txt").read_text()


@pytest.mark.usefixtures("traced")
def test_a_late_compilation_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new number of windows in the eighth step; those in the first five steps are expected."""
    changes = {"steps": 10, "log_every": 1, "eval_every": 4, "checkpoint_every": 0, "model": QUICK}
    config = tiny_config(tmp_path, accumulation=1, compile=True, **changes)
    made = make_trainer(config, tmp_path / "run")
    draw, sizes = made._draw, iter([2, 1, 2, 2, 2, 2, 2, 3, 2, 2, 2, 2, 2, 2])

    def uneven(sampler: Any) -> Any:
        size = next(sizes)
        made.config = dataclasses.replace(config, micro_batch=size, global_batch=size)
        return draw(sampler)

    monkeypatch.setattr(made, "_draw", uneven)
    first = compilations.now.compilations
    rows, (event,), _ = run(made, tmp_path / "run")
    counts = [row["compilations"] - first for row in rows]
    assert counts[0] == 1
    assert counts[1:7] == [2] * 6
    assert counts[7:] == [3] * 3
    assert STARTING_STEPS == 5
    assert event["step"] == 7
    said = r"step 8: torch.compile compiled 1 graph \(\d+\.\d s\) after the first 5 steps of .*"
    assert re.fullmatch(said, event["message"])
    assert [row["step"] for row in rows if "first_step_s" in row] == [1]
    assert not {"kernel_compilations", "host_time_ms"} & rows[0].keys()


@pytest.mark.parametrize(("number", "warned"), [(1, 0), (2, 1)])
def test_the_first_evaluation_may_compile(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    warned: int,
) -> None:
    made = make_trainer(tiny_config(tmp_path, steps=12, eval_every=6), tmp_path / "run")
    share, seen = made._reports._share, []

    def compiling(batches: Any) -> Any:
        seen.append(1)
        if len(seen) == number:
            compilations._add(Compiled(graphs=1, graphs_s=2.0))
        return share(batches)

    monkeypatch.setattr(made._reports, "_share", compiling)
    _, events, _ = run(made, tmp_path / "run")
    places = [event["message"].partition(":")[0] for event in events]
    assert places == ["evaluation after step 12"] * warned


def test_captures_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a graph is made; the graph itself is a stand-in."""
    graph = SimpleNamespace(replay=lambda: None, pool=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: nullcontext())
    made = make_trainer(tiny_config(tmp_path, accumulation=1), tmp_path / "run")
    replay = Replay(made._forward_backward, made.state.optimizer.parameters())
    before = compilations.now.captures
    batches = made.next_batches()
    counts = []
    for _ in range(3):
        for is_first in (True, False, False):
            replay(batches[0], torch.ones(()), is_first)
        counts.append(compilations.now.captures - before)
    # The first step runs as it is; the second captures the graph that makes gradients and the one
    # that adds to them.
    assert counts == [0, 2, 2]
    replay(batches[0].padded(9), torch.ones(()), True)
    assert compilations.now.captures - before == 3


@pytest.mark.usefixtures("traced")
def test_the_start_is_told_while_it_happens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, window = (
        ParallelConfig(compile_layers=False),
        dataclasses.replace(PATTERN, branches=("win",)),
    )
    config = tiny_config(tmp_path, steps=2, compile=True, parallel=whole, model={"nsa": window})

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.1)
        return open_data(*args, **kwargs)

    monkeypatch.setattr(trainer, "open_data", slow)
    with RunReport(tmp_path / "before.txt", 2):
        begin = time.perf_counter()
        made = make_trainer(config, tmp_path / "new")
    rows, _, log = run(made, tmp_path / "new")
    elapsed = time.perf_counter() - begin
    log = (tmp_path / "before.txt").read_text() + log
    told = [re.sub(r"\d+\.\d", "X", line.partition(" INFO ")[2]) for line in log.splitlines()]
    parts = "model X s, data X s, first batch X s, torch.compile X s, the rest of the step X s"
    wanted = [
        "start: model",
        "start: data",
        "start: data took X s",
        "start: first batch",
        "start: first step",
        "torch.compile is compiling",
        "torch.compile has compiled in X s",
        f"first step after X s: {parts}",
    ]
    begins = ("start: ", "torch.compile", "first step")
    assert [line for line in told if line.startswith(begins)] == wanted
    assert made.startup.first_step_s == rows[0]["first_step_s"]
    assert 1.1 < float(rows[0]["first_step_s"]) < elapsed
    found = re.search(r"first step after ([\d.]+) s: (.*)", log)
    assert found is not None
    seconds = dict(re.findall(r"([a-z][a-z. ]*) ([\d.]+) s", found[2]))
    assert float(seconds["data"]) >= 1.1
    assert sum(map(float, seconds.values())) == pytest.approx(float(found[1]), abs=0.5)


def test_a_resumed_process_tells_its_own_start(tmp_path: Path) -> None:
    """The first row after the checkpoint says how long the start took."""
    config = tiny_config(tmp_path, steps=4, log_every=1, checkpoint_every=2)
    make_trainer(config, tmp_path / "run").run()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    rows, events, log = run(make_trainer(config, tmp_path / "run", resume=True), tmp_path / "run")
    assert [row["step"] for row in rows if "first_step_s" in row] == [1, 3]
    assert "checkpoint 0." in log[log.index("first step after") :]
    assert not events
