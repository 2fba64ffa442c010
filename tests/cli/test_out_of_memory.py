"""Where GPU memory is not enough, each command ends in one line that says what helps; simulated."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from nsa import cli
from nsa.bench import train
from nsa.bench.rows import read_rows
from nsa.eval import generation, report
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.load import to_yaml
from nsa.train.out_of_memory import is_out_of_memory, memory_use, remedies
from nsa.train.trainer import Trainer
from tests.train.cases import tiny_config

WORDS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 9 GiB."
START = "the run must fit into GPU memory, got out of memory; 2.50 GiB more were asked for. "


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


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("nsa: ")


def fails_at(step: int, fail: Callable[[], NoReturn], monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = Trainer.train_step

    def failing(self: Trainer, *args: Any) -> Any:
        if self.state.progress.step == step:
            fail()
        return train_step(self, *args)

    monkeypatch.setattr(Trainer, "train_step", failing)


def test_a_run_that_does_not_begin(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the set-up of the model and in the first step; nothing is left of it."""
    help = "Give --micro-batch 3 --accumulation 4 or --checkpointing.policy full (slower)"
    expected = f"train: {START}{help}; `nsa plan` says what a run needs."
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "to", no_memory)
        assert refusal(capsys, "train", config, "--run-dir", "run") == expected
    with monkeypatch.context() as patch:
        fails_at(0, no_memory, patch)
        assert refusal(capsys, "train", config, "--run-dir", "run") == expected
    assert not Path("run").exists()
    given = shlex.split(help.partition(" or ")[0])[1:]
    assert cli.main(["train", str(config), "--run-dir", "run", *given]) == 0


def test_a_later_step_names_the_checkpoint_and_how_to_go_on(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        fails_at(3, no_memory, patch)
        line = refusal(capsys, "train", config, "--run-dir", "run")
    said, _, command = line.partition(" Go on with: nsa ")
    assert said == f"train: {START}The last checkpoint is run/checkpoints/step-00000002."
    first, _, second = command.partition(" or ")
    assert second == "--checkpointing.policy full (slower)"
    assert "ended by UserError: train: the run must fit" in Path("run/log.txt").read_text()
    assert cli.main(shlex.split(first)) == 0
    assert (Path("run/checkpoints/step-00000006")).exists()


def test_the_capture_of_a_graph_ends_in_another_error(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capture() -> NoReturn:
        try:
            no_memory()
        finally:
            raise RuntimeError("CUDA error: operation failed due to an error during capture")

    with monkeypatch.context() as patch:
        fails_at(0, capture, patch)
        line = refusal(capsys, "train", config, "--run-dir", "run")
    assert line.startswith(f"train: {START}Give --micro-batch 3")


def test_another_error_is_a_bug(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> NoReturn:
        raise RuntimeError("operation failed")

    fails_at(1, bug, monkeypatch)
    with pytest.raises(RuntimeError, match="operation failed"):
        cli.main(["train", str(config), "--run-dir", "run"])


def test_evaluation_and_generation(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cli.main(["train", str(config), "--run-dir", "run", "--steps", "2"]) == 0
    end = "must fit into GPU memory, got out of memory; 2.50 GiB more were asked for."
    with monkeypatch.context() as patch:
        patch.setattr(report, "evaluate", no_memory)
        line = refusal(capsys, "eval", "run")
        assert line == f"eval: the evaluation {end} Give --micro-batch 3 or --device cpu."
        line = refusal(capsys, "eval", "run", "--micro-batch", "1")
        assert line == f"eval: the evaluation {end} Give --device cpu."
    figures = []
    for words in ((), ("--micro-batch", "1")):
        assert cli.main(["eval", "run", *words]) == 0
        figures.append([line for line in capsys.readouterr().out.splitlines() if "loss" in line])
    assert figures[0] == figures[1] != []
    assert "--micro-batch must be positive" in refusal(capsys, "eval", "run", "--micro-batch", "0")
    monkeypatch.setattr(generation, "_next_logits", no_memory)
    line = refusal(capsys, "generate", "run", "--prompt", "a")
    hint = "Give fewer prompts, fewer --max-new-tokens or --device cpu."
    assert line == f"generate: the text {end} {hint}"


def test_profile(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails_at(2, no_memory, monkeypatch)
    words = ["--steps", "99", "--run-dir", "run", "--checkpoint-every", "0"]
    line = refusal(capsys, "profile", config, *words)
    assert line.startswith(f"nsa profile: {START}Give --micro-batch 3 --accumulation 4 or")


@pytest.mark.parametrize("where", ["measure_steps", "measure_forward"])
def test_bench_train(config: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A row that says so; what was measured before stays, and other models go on."""
    monkeypatch.setattr(train, where, no_memory)
    words = ["--config", str(config), "--provider", "nsa", "--steps", "2", "--warmup", "1"]
    assert cli.main(["bench", "train", *words, "--out", "rows.jsonl"]) == 0
    step, forward = read_rows([Path("rows.jsonl")])
    why = "not run: out of memory; 2.50 GiB more were asked for. Give --micro-batch 3"
    assert (forward.ms_p50, forward.note) == (None, why)
    assert step.note == (why if where == "measure_steps" else None)


# -------------------------------------------------------------------------- what is said


def test_settings_that_help() -> None:
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


def test_what_was_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_counts(error: BaseException | None, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    around = RuntimeError("compiling failed")
    around.__cause__ = error
    assert is_out_of_memory(around) == expected
