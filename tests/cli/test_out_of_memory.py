"""Where GPU memory is not enough, each command ends in one line that says what helps; simulated."""

from __future__ import annotations

import dataclasses
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
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.load import to_yaml
from nsa.train.runs import evaluation as report
from nsa.train.runs import inspection
from nsa.train.trainer import Trainer
from nsa.train.watch import out_of_memory
from nsa.train.watch.out_of_memory import (
    check_fits,
    free_memory,
    is_out_of_memory,
    memory_use,
    remedies,
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
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of micro-batches of six windows."""
    monkeypatch.chdir(tmp_path)
    changes = {"steps": 6, "micro_batch": 6, "accumulation": 2, "checkpoint_every": 2}
    path = tmp_path / "tiny.yaml"
    path.write_text(to_yaml(tiny_config(tmp_path, **changes)), encoding="utf-8")
    return path


def fails_at(step: int, fail: Callable[[], NoReturn], monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = Trainer.train_step

    def failing(self: Trainer, *args: Any) -> Any:
        if self.state.progress.step == step:
            fail()
        return train_step(self, *args)

    monkeypatch.setattr(Trainer, "train_step", failing)


def test_a_run_that_does_not_begin(config, nsa, refusal, monkeypatch):
    """At the set-up of the model and in the first step; nothing is left of it."""
    help = "Give --micro-batch 3 --accumulation 4 or --checkpointing.policy full (slower)"
    expected = f"nsa: {START}{help}; `nsa plan` says what a run needs."
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "to", no_memory)
        assert refusal(TRAIN) == expected
    with monkeypatch.context() as patch:
        fails_at(0, no_memory, patch)
        assert refusal(TRAIN) == expected
    assert not Path("run").exists()
    nsa(TRAIN + help.removeprefix("Give").partition(" or ")[0])


def test_a_later_step_names_the_checkpoint_and_how_to_go_on(config, nsa, refusal, monkeypatch):
    with monkeypatch.context() as patch:
        fails_at(3, no_memory, patch)
        line = refusal(TRAIN)
    said, _, command = line.partition(" Go on with: nsa ")
    assert said == f"nsa: {START}The last checkpoint is run/checkpoints/step-00000002."
    first, _, second = command.partition(" or ")
    assert second == "--checkpointing.policy full (slower)"
    assert "ended by UserError: the run must fit" in Path("run/log.txt").read_text()
    nsa(first)
    assert Path("run/checkpoints/step-00000006").exists()


def test_the_capture_of_a_graph_ends_in_another_error(config, refusal, monkeypatch):
    def capture() -> NoReturn:
        try:
            no_memory()
        finally:
            raise RuntimeError("CUDA error: operation failed due to an error during capture")

    fails_at(0, capture, monkeypatch)
    assert refusal(TRAIN).startswith(f"nsa: {START}Give --micro-batch 3")


def test_evaluation_and_generation(config, nsa, refusal, monkeypatch):
    nsa(f"{TRAIN} --steps 2")
    end = "must fit into memory, got out of memory; 2.50 GiB more were asked for."
    with monkeypatch.context() as patch:
        patch.setattr(report, "measure", no_memory)
        start = f"nsa: the evaluation {end} Give"
        assert refusal("eval run") == f"{start} --micro-batch 3 or --device cpu."
        assert refusal("eval run --micro-batch 1") == f"{start} --device cpu."
    both = [nsa("eval run").splitlines(), nsa("eval run --micro-batch 1").splitlines()]
    first, second = ([line for line in said if "loss" in line] for said in both)
    assert first == second != []
    assert "--micro-batch must be positive" in refusal("eval run --micro-batch 0")
    monkeypatch.setattr(Decoder, "prefill", no_memory)
    hint = "Give a smaller --batch-size, fewer --max-new-tokens or --device cpu."
    assert refusal("generate run --prompt a") == f"nsa: the text {end} {hint}"
    monkeypatch.setattr(inspection, "inspect_text", no_memory)
    hint = "Give fewer --tokens or --device cpu."
    assert refusal("inspect run") == f"nsa: the text {end} {hint}"


BENCH = "bench train --config tiny.yaml --provider nsa --device"


@pytest.mark.parametrize("where", ["measure_steps", "measure_forward"])
def test_bench_train(config, nsa, monkeypatch, where):
    """A row that says so; what was measured before stays, and other models go on."""
    monkeypatch.setattr(train, where, no_memory)
    nsa(f"{BENCH} cpu --steps 2 --warmup 1 --out rows.jsonl")
    step, forward = read_rows([Path("rows.jsonl")])
    why = "not run: out of memory; 2.50 GiB more were asked for. Give --micro-batch 3"
    assert (forward.ms_p50, forward.note) == (None, why)
    assert step.note == (why if where == "measure_steps" else None)


# -------------------------------------------------------------------------- what is said


def test_settings_that_help():
    seed = TrainConfig()
    half = "--micro-batch 1 --accumulation 4"
    assert remedies(seed, resumed=False) == f"{half} or --checkpointing.policy full (slower)"
    large = dataclasses.replace(seed, micro_batch=15, global_batch=30)
    large = dataclasses.replace(large, model=LMConfig(vocab_size=50_304))
    words = "--micro-batch 5 --accumulation 6 or --checkpointing.policy full (slower)"
    assert remedies(large, resumed=True) == words
    chunk = "--loss-chunk 1024 (logits of a large vocabulary)"
    assert remedies(large, resumed=False) == f"{words} or {chunk}"
    least = dataclasses.replace(seed, micro_batch=1, accumulation=4)
    least = dataclasses.replace(least, checkpointing=CheckpointingConfig("full"))
    assert remedies(least, resumed=False) == ""


def test_what_was_in_use(monkeypatch):
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib // 2, 24 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 20 * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 22 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    gpu = "out of memory on NVIDIA Test with 24.0 GiB"
    use = "22.0 GiB held by PyTorch, at most 20.0 GiB in tensors, 0.5 GiB free"
    assert memory_use(torch.OutOfMemoryError("no")) == f"{gpu}: {use}"
    said = memory_use(torch.OutOfMemoryError(WORDS))
    assert said == f"{gpu}: {use}; 2.50 GiB more were asked for"


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


# --------------------------------------------------------------------------------------------------
# before anything begins


def test_what_cannot_fit_is_refused_before_a_folder_is_made(config, nsa, refusal, monkeypatch):
    nsa(TRAIN)
    count = LanguageModel(MODEL).num_parameters()["total"]
    profile = "profile tiny.yaml --wait 1 --warmup 1 --active 1 --run-dir new"
    for line, needed in (
        ("train tiny.yaml --run-dir new", 16),
        (profile, 16),
        (f"{BENCH} cpu", 16),
        ("eval run", 4),
        ("generate run --prompt a", 4),
    ):
        most = count * needed - 1
        monkeypatch.setattr(out_of_memory, "free_memory", lambda device, most=most: most)
        why = "the model must fit into the memory of the cpu device, got 0.00B parameters"
        assert why in refusal(line)
    assert not Path("new").exists()
    monkeypatch.setattr(out_of_memory, "free_memory", lambda device: 4 * count)
    nsa("eval run")
    monkeypatch.setattr(out_of_memory, "free_memory", lambda device: 8 * count)
    check_fits("train", MODEL, torch.device("cpu"), shares=2)


def test_free_memory_of_a_machine_and_of_a_container(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    machine = free_memory(cpu)
    assert 2**20 < machine < math.inf
    monkeypatch.setattr(out_of_memory, "_CGROUP", tmp_path)
    assert free_memory(cpu) == pytest.approx(machine, rel=0.2)
    for name, text in (("max", "5000\n"), ("current", "3000\n"), ("stat", "anon 2500\nfile 400\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory(cpu) == 2400
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(cpu) > 2**20


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
