"""Commands that run out of memory end in one line with advice; simulated."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from nsa.bench import train
from nsa.bench.rows import read_rows
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.train.config import ParallelConfig, TrainConfig
from nsa.train.load import to_yaml
from nsa.train.runs import evaluation, inspection
from nsa.train.trainer import Trainer
from nsa.train.watch import out_of_memory
from nsa.train.watch.out_of_memory import (
    check_run_fits,
    free_memory,
    is_out_of_memory,
    memory_use,
)
from tests.faults.cases import Nsa
from tests.train.cases import MODEL, tiny_config

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "train tiny.yaml --run-dir run"
WORDS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 9 GiB."
START = "the run must fit into memory, got out of memory; 2.50 GiB more were asked for. "


def no_memory(*_: Any, **__: Any) -> NoReturn:
    raise torch.OutOfMemoryError(WORDS)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run of micro-batches of six sequences."""
    monkeypatch.chdir(tmp_path)
    changes = {"steps": 6, "micro_batch": 6, "accumulation": 2, "checkpoint_every": 2}
    path = tmp_path / "tiny.yaml"
    path.write_text(to_yaml(tiny_config(tmp_path, **changes)), encoding="utf-8")
    return path


def fails_at(step: int, fail: Callable[[], NoReturn], monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = Trainer.train_step

    def failing(self: Trainer, *args: Any) -> Any:
        return fail() if self.state.progress.step == step else train_step(self, *args)

    monkeypatch.setattr(Trainer, "train_step", failing)


def fail_in_capture() -> NoReturn:
    try:
        no_memory()
    finally:
        raise RuntimeError("CUDA error: operation failed due to an error during capture")


def test_a_run_that_does_not_begin(config, nsa, refusal, monkeypatch):
    """At the set-up of the model, in the first step and in a capture; nothing is left of it."""
    help = "Give --micro-batch 3 --accumulation 4 or --checkpointing.policy full (slower)"
    expected = f"nsa: {START}{help}; `nsa plan` says what a run needs."
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "to", no_memory)
        assert refusal(TRAIN) == expected
    for fail in (no_memory, fail_in_capture):
        with monkeypatch.context() as patch:
            fails_at(0, fail, patch)
            assert refusal(TRAIN) == expected
    assert not Path("run").exists()
    nsa(TRAIN + help.removeprefix("Give").partition(" or ")[0])


def test_a_later_step_names_the_checkpoint_and_how_to_go_on(config, nsa, refusal, monkeypatch):
    with monkeypatch.context() as patch:
        fails_at(3, no_memory, patch)
        line = refusal(TRAIN)
    said, _, command = line.partition(" Continue with: nsa ")
    assert said == f"nsa: {START}The last checkpoint is run/checkpoints/step-00000002."
    first, _, second = command.partition(" or ")
    assert second == "--checkpointing.policy full (slower)"
    assert "ended by UserError: the run must fit" in Path("run/log.txt").read_text()
    nsa(first)
    assert Path("run/checkpoints/step-00000006").exists()


def test_evaluation_and_generation(config, nsa, refusal, monkeypatch):
    nsa(f"{TRAIN} --steps 2")
    first, second = (nsa(f"eval run {words}") for words in ("", "--micro-batch 1"))
    assert first == second
    assert "--micro-batch must be positive" in refusal("eval run --micro-batch 0")
    monkeypatch.setattr(evaluation, "measure", no_memory)
    monkeypatch.setattr(Decoder, "prefill", no_memory)
    monkeypatch.setattr(inspection, "inspect_text", no_memory)
    end = "must fit into memory, got out of memory; 2.50 GiB more were asked for. Give"
    batch = "a smaller --batch-size, fewer --max-new-tokens or --device cpu."
    for line, said in (
        ("eval run", f"evaluation {end} --micro-batch 3 or --device cpu."),
        ("eval run --micro-batch 1", f"evaluation {end} --device cpu."),
        ("generate run --prompt a", f"text {end} {batch}"),
        ("inspect run", f"text {end} fewer --tokens or --device cpu."),
    ):
        assert refusal(line) == f"nsa: the {said}"


BENCH = "bench train --config tiny.yaml --provider nsa --device"


@pytest.mark.parametrize("where", ["measure_steps", "measure_forward"])
def test_bench_train(config, nsa, monkeypatch, where):
    """A row contains the reason; earlier measurements stay, and other models are measured."""
    monkeypatch.setattr(train, where, no_memory)
    nsa(f"{BENCH} cpu --steps 2 --warmup 1 --out rows.jsonl")
    step, forward = read_rows([Path("rows.jsonl")])
    why = "not run: out of memory; 2.50 GiB more were asked for. Give --micro-batch 3"
    assert (forward.ms_p50, forward.note) == (None, why)
    assert step.note == (why if where == "measure_steps" else None)


# --- messages -------------------------------------------------------------------------------------
def test_what_was_in_use(monkeypatch):
    gib = 2**30
    for name, value in {
        "is_available": True,
        "mem_get_info": (gib // 2, 24 * gib),
        "max_memory_allocated": 20 * gib,
        "memory_reserved": 22 * gib,
        "get_device_name": "NVIDIA Test",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert memory_use(torch.OutOfMemoryError(WORDS)) == (
        "out of memory on NVIDIA Test with 24.0 GiB: 22.0 GiB reserved by PyTorch, at most "
        "20.0 GiB in tensors, 0.5 GiB free; 2.50 GiB more were asked for"
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("out of resource: shared memory"), False),
        (None, False),
    ],
)
def test_what_counts(error, expected):
    assert is_out_of_memory(error) == expected
    around = RuntimeError("compiling failed")
    around.__cause__ = error
    assert is_out_of_memory(around) == expected


# --- checks before a start ------------------------------------------------------------------------
def test_what_cannot_fit_is_refused_before_a_folder_is_made(config, nsa, refusal, monkeypatch):
    count, free = LanguageModel(MODEL).num_parameters()["total"], 0
    monkeypatch.setattr(out_of_memory, "free_memory", lambda device: free)
    for line, needed in (
        ("train tiny.yaml --run-dir new", 16),
        ("profile tiny.yaml --wait 1 --warmup 1 --active 1 --run-dir new", 16),
        (f"{BENCH} cpu", 16),
    ):
        free = count * needed - 1
        said = refusal(line)
        assert "free memory of the cpu device, got 0.00B parameters, which take at least" in said
    assert not Path("new").exists()
    free = 10 * count
    fsdp = ParallelConfig(strategy="fsdp")
    config = TrainConfig(model=MODEL, world_size=2, global_batch=8, seq_len=1, parallel=fsdp)
    check_run_fits(config, torch.device("cpu"))


def test_free_memory_of_this_machine(monkeypatch):
    assert 2**20 < free_memory(torch.device("cpu")) < math.inf
    monkeypatch.setattr(out_of_memory, "_MEMORY", Path("none"))
    assert free_memory(torch.device("cpu")) == math.inf


def test_bench_train_wants_a_gpu_unless_it_is_told_otherwise(config, refusal, monkeypatch):
    monkeypatch.setattr(train, "check_model", no_memory)
    said = refusal(f"{BENCH} auto")
    hint = "Give --device cpu to measure on this CPU all the same."
    assert said == f"nsa: the machine must have a CUDA GPU, got none. {hint}"


def test_sigterm_ends_a_benchmark_at_once(config):
    """Its run, in a folder of its own, writes no checkpoint first."""
    words = "--provider nsa --device cpu --warmup 1 --steps 100000 --mode fwd_bwd"
    given, folder = ("bench", "train", "--config", config, *words.split()), config.parent
    with Nsa(*given, said=folder / "said", env={"TMPDIR": str(folder)}) as run:
        run.wait_until(lambda: any(rows.read_text() for rows in folder.glob("*/run/metrics.jsonl")))
        begin = time.monotonic()
        run.kill(signal.SIGTERM)
        assert run.end(30) == -signal.SIGTERM, run.text
        assert time.monotonic() - begin < 2
        assert "received" not in run.text
