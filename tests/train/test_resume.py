"""Resuming: a run that was cut anywhere and continued is the run that was not."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa.train.checkpoint import find_checkpoint, list_checkpoints, load_tensors, read_meta
from nsa.train.load import to_yaml
from nsa.train.runs.inference import load_model
from nsa.train.state import Progress, TrainState, Window
from nsa.train.telemetry.metrics import Row, read_metrics
from nsa.train.trainer import Trainer
from tests.faults.cases import Nsa, rows_of
from tests.train.cases import make_trainer, reproducible_rows, rewrite_hashes, tiny_config


def rows_so_far(path: Path) -> list[Row]:
    return read_metrics(path / "metrics.jsonl") if rows_of(path) else []


def final_tensors(path: Path, trainer: Trainer) -> dict[str, torch.Tensor]:
    live = trainer.state.training_tensors()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    load_tensors(list_checkpoints(path / "checkpoints")[-1], tensors)
    return tensors


# --- SIGKILL --------------------------------------------------------------------------------------


def test_killed_at_a_random_step_the_curve_continues_bit_for_bit(tmp_path: Path) -> None:
    """Rows, weights and moments; the kill falls between checkpoints and inside a window of metrics
    more often than not.
    """
    config = tiny_config(tmp_path, steps=60, log_every=3, eval_every=7, checkpoint_every=4)
    whole = make_trainer(config, tmp_path / "whole")
    whole.run()
    (tmp_path / "tiny.yaml").write_text(to_yaml(config), encoding="utf-8")
    killed, step = tmp_path / "killed", random.Random(time.time_ns()).randint(6, 40)
    with Nsa("train", tmp_path / "tiny.yaml", "--run-dir", killed, said=tmp_path / "said") as nsa:
        assert nsa.wait_until(
            lambda: any(int(row["step"]) >= step for row in rows_so_far(killed)),
        )
        nsa.kill()
        assert nsa.end() == -signal.SIGKILL
    cut = len(reproducible_rows(tmp_path / "killed"))
    assert 0 < cut < len(reproducible_rows(tmp_path / "whole"))
    resumed = make_trainer(config, tmp_path / "killed", resume=True)
    assert 0 < resumed.state.progress.step < 60
    assert resumed.state.progress.step % 4 == 0
    assert resumed.run().finished
    assert reproducible_rows(tmp_path / "killed") == reproducible_rows(tmp_path / "whole")
    expected, found = (final_tensors(tmp_path / name, whole) for name in ("whole", "killed"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


# --- SIGTERM and SIGINT ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
# Between rows, with an evaluation, and with evaluation, row and checkpoint.
@pytest.mark.parametrize("step", [3, 5, 10])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_signal_finishes_the_step_and_resumes_exactly(
    tmp_path: Path,
    number: signal.Signals,
    step: int,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="nsa")
    config = tiny_config(
        tmp_path,
        log_every=2,
        eval_every=5,
        checkpoint_every=10,
        optim={"name": name},
    )
    make_trainer(config, tmp_path / "whole").run()
    trainer = make_trainer(config, tmp_path / "cut")
    real = trainer.train_step

    def step_with_signal(batches: object, num_targets: int | None = None) -> torch.Tensor:
        if trainer.state.progress.step == step - 1:
            os.kill(os.getpid(), number)
        return real(batches, num_targets)  # type: ignore[arg-type]

    trainer.train_step = step_with_signal  # type: ignore[method-assign]
    handler = signal.getsignal(number)
    result = trainer.run()
    assert signal.getsignal(number) is handler
    assert (result.finished, result.signal, result.step) == (False, number.name, step)
    assert f"stopped by {number.name} after step {step} of 12" in caplog.text
    assert list_checkpoints(tmp_path / "cut" / "checkpoints")[-1].name == f"step-{step:08d}"
    assert make_trainer(config, tmp_path / "cut", resume=True).run().finished
    assert reproducible_rows(tmp_path / "cut") == reproducible_rows(tmp_path / "whole")


def test_signal_during_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row waits for the resumed run, which evaluates in full."""
    config = tiny_config(tmp_path)
    make_trainer(config, tmp_path / "whole").run()
    trainer = make_trainer(config, tmp_path / "cut")
    validation = type(trainer.data.validation)
    real = validation.window

    def window(source: object, seq_len: int, index: int) -> object:
        if source is trainer.data.validation and index == 2 and trainer.state.progress.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(source, seq_len, index)  # type: ignore[arg-type]

    monkeypatch.setattr(validation, "window", window)
    assert trainer.run().step == 5
    assert [row["step"] for row in read_metrics(tmp_path / "cut" / "metrics.jsonl")] == [2, 4]
    monkeypatch.undo()
    make_trainer(config, tmp_path / "cut", resume=True).run()
    assert reproducible_rows(tmp_path / "cut") == reproducible_rows(tmp_path / "whole")


# --- the state ------------------------------------------------------------------------------------


def test_the_state_lists_everything_that_resumes() -> None:
    """A new field of the state needs a place in the checkpoint; this list is what has one."""
    assert [field.name for field in dataclasses.fields(TrainState)] == [
        "model",
        "optimizer",
        "sampler",
        "progress",
    ]
    progress = Progress(
        step=3,
        best_val_bits_per_byte=0.1 + 0.2,
        window=Window(steps=2, loss=1 / 3),
    )
    loaded = Progress.from_json(json.loads(json.dumps(dataclasses.asdict(progress))))
    assert str(loaded) == str(progress)  # as text, since a NaN is unlike itself


def test_checkpoint_restores_the_random_generators(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=2)

    def draw() -> list[float]:
        """The generators of Gaussian numbers keep a second one back."""
        ours, numpy = (random.random(), random.gauss()), (np.random.rand(), np.random.randn())
        return [*ours, *map(float, numpy), torch.rand(()).item()]

    trainer = make_trainer(config, tmp_path / "run")
    draw()  # so that the checkpoint's state is not the one that every start seeds
    trainer.run()
    after = draw()
    make_trainer(config, tmp_path / "run", resume=True)
    assert draw() == after


def test_another_kind_of_device_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=2)
    make_trainer(config, tmp_path / "run").run()
    (path,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    meta = read_meta(path)
    meta["rng"]["device"] = "cuda"
    (path / "meta.json").write_text(json.dumps(meta))
    rewrite_hashes(path)
    with pytest.raises(
        ValueError,
        match="train: device must be cuda as in the checkpoint, got cpu",
    ):
        make_trainer(config, tmp_path / "run", resume=True)


def test_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=2)
    make_trainer(config, tmp_path / "run").run()
    rows = reproducible_rows(tmp_path / "run")
    result = make_trainer(config, tmp_path / "run", resume=True).run()
    assert (result.finished, result.step, result.row) == (True, 2, {})
    assert reproducible_rows(tmp_path / "run") == rows


def test_settings_that_change_the_result_must_stay(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=2)
    make_trainer(config, tmp_path / "run").run()
    changed = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=0.5))
    with pytest.raises(
        ValueError,
        match=r"train: optim\.lr must stay as in the checkpoint \(0\.01\), got 0\.5",
    ):
        make_trainer(changed, tmp_path / "run", resume=True)
    make_trainer(dataclasses.replace(config, log_every=1), tmp_path / "run", resume=True)


def test_text_that_changed_is_noticed(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=2)
    make_trainer(config, tmp_path / "run").run()
    (tmp_path / "text" / "00.txt").write_text("another text of another length\n" * 20)
    with pytest.raises(
        ValueError,
        match=r"must stay as in the checkpoint .* The text has changed since\.",
    ):
        make_trainer(config, tmp_path / "run", resume=True)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    folder = make_trainer(config, tmp_path / "run").run_folder
    folder.tokenizer.unlink()  # as of a run that ended while it prepared its data
    with pytest.raises(
        ValueError,
        match=r"--resume must name a run with a checkpoint, got .*run\. It stopped before",
    ):
        make_trainer(config, tmp_path / "run", resume=True)


def test_model_of_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(tmp_path, steps=3), tmp_path / "run")
    trainer.run()
    model, step = load_model(
        trainer.config.model,
        find_checkpoint("test", trainer.run_folder.checkpoints, "last"),
        torch.device("cpu"),
    )
    assert step == 3
    assert not model.training
    tokens = torch.arange(50)
    assert torch.equal(model(tokens), trainer.model(tokens))


def test_row_type_is_plain(tmp_path: Path) -> None:
    seen: list[Row] = []
    make_trainer(tiny_config(tmp_path, steps=2), tmp_path / "run", on_row=seen.append).run()
    assert all(type(value) in (int, float, str) for row in seen for value in row.values())
