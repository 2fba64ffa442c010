"""Resuming: a run that was cut anywhere and continued is the run that was not."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch

from nsa.train.checkpoint import list_checkpoints, read_meta
from nsa.train.data import spread
from nsa.train.runs.check import check_run
from nsa.train.state import Progress, TrainState, Window
from nsa.train.trainer import Trainer
from tests.train.cases import (
    make_trainer,
    new_trainer,
    reproducible_rows,
    resumed,
    rewrite_hashes,
    rows_of,
    tiny_config,
)

# --- SIGTERM and SIGINT; SIGKILL is in tests/faults -----------------------------------------------


@pytest.fixture(scope="module")
def rows_of_whole(tmp_path_factory):
    """Rows of an undisturbed run with this optimizer."""

    @functools.cache
    def rows(name):
        folder = tmp_path_factory.mktemp(name)
        new_trainer(folder, checkpoint_every=10, optim={"name": name}).run()
        return reproducible_rows(folder / "run")

    return rows


def signal_in_evaluation(trainer: Any, step: int) -> None:
    """SIGTERM in the middle of the evaluation after a step."""
    source = trainer.data.validation
    real, third = source.sequence, spread(4, source.num_sequences(64))[2]

    def sequence(seq_len: int, index: int) -> Any:
        if index == third and trainer.state.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(seq_len, index)

    source.sequence = sequence


def signal_in_step(trainer: Any, step: int, number: signal.Signals = signal.SIGTERM) -> None:
    """A signal at the beginning of a step."""
    real = trainer.train_step

    def train_step(*args: Any) -> Any:
        if trainer.state.progress.step == step - 1:
            os.kill(os.getpid(), number)
        return real(*args)

    trainer.train_step = train_step


# Between rows, with an evaluation, and with evaluation, row and checkpoint.
@pytest.mark.parametrize(
    ("name", "step", "number"),
    [
        *(("adamw", step, signal.SIGTERM) for step in (3, 5, 10)),
        ("muon", 3, signal.SIGINT),
    ],
)
def test_signal_finishes_the_step_and_resumes_exactly(
    tmp_path, number, step, name, rows_of_whole, caplog
):
    whole = rows_of_whole(name)
    caplog.set_level("INFO", logger="nsa")
    changes: dict[str, Any] = {"checkpoint_every": 10, "optim": {"name": name}}
    trainer, handler = new_trainer(tmp_path, **changes), signal.getsignal(number)
    signal_in_step(trainer, step, number)
    result = trainer.run()
    assert signal.getsignal(number) is handler
    assert (result.finished, result.signal, result.step) == (False, number.name, step)
    assert f"stopped by {number.name} after step {step} of 12" in caplog.text
    assert list_checkpoints(tmp_path / "run/checkpoints")[-1].name == f"step-{step:08d}"
    assert resumed(tmp_path, **changes).run().finished
    assert reproducible_rows(tmp_path / "run") == whole


@pytest.fixture(scope="module")
def whole(rows_of_whole):
    return rows_of_whole("adamw")


def test_signal_during_an_evaluation(tmp_path, whole):
    """The row waits for the resumed run, which evaluates in full."""
    trainer = new_trainer(tmp_path)
    signal_in_evaluation(trainer, 5)
    assert trainer.run().step == 5
    assert [row["step"] for row in rows_of(tmp_path)] == [2, 4]
    resumed(tmp_path).run()
    assert reproducible_rows(tmp_path / "run") == whole


@pytest.mark.parametrize("signal_in", [signal_in_step, signal_in_evaluation])
def test_a_signal_in_the_last_step_or_its_evaluation_leaves_a_whole_run(tmp_path, signal_in, whole):
    """It ends as finished: with its last row and evaluation, in the checkpoint too."""
    trainer = new_trainer(tmp_path)
    signal_in(trainer, 12)
    result = trainer.run()
    assert (result.finished, result.signal, result.step) == (True, None, 12)
    assert reproducible_rows(tmp_path / "run") == whole
    assert check_run(trainer.run_folder)[1] == []
    meta = read_meta(list_checkpoints(trainer.run_folder.checkpoints)[-1])
    assert meta["progress"]["reported_step"] == 12
    assert meta["val_bits_per_byte"] == result.row["val_bits_per_byte"]


# --- the state ------------------------------------------------------------------------------------


def test_the_state_lists_everything_that_resumes():
    """A new field of the state needs a place in the checkpoint; this list is what has one."""
    names = [field.name for field in dataclasses.fields(TrainState)]
    assert names == ["model", "optimizer", "sampler", "progress"]
    window = Window(steps=2, loss=1 / 3)
    progress = Progress(step=3, best_val_bits_per_byte=0.1 + 0.2, window=window)
    loaded = Progress.from_json(json.loads(json.dumps(dataclasses.asdict(progress))))
    assert loaded == progress


def test_checkpoint_restores_the_random_generators(tmp_path):
    def draw():
        """The generators of Gaussian numbers keep a second one back."""
        ours, numpy = (random.random(), random.gauss()), (np.random.rand(), np.random.randn())
        return [*ours, *numpy, torch.rand(()).item()]

    trainer = new_trainer(tmp_path, steps=2)
    draw()  # so that the checkpoint's state is not the one that every start seeds
    trainer.run()
    after = draw()
    resumed(tmp_path, steps=2)
    assert draw() == after


def change_text(trainer: Trainer) -> None:
    (trainer.run_folder.path.parent / "text/00.txt").write_text("a text of another length\n" * 20)


def from_a_gpu(trainer: Trainer) -> None:
    (path,) = list_checkpoints(trainer.run_folder.checkpoints)
    meta = read_meta(path)
    meta["rng"]["device"] = "cuda"
    (path / "meta.json").write_text(json.dumps(meta))
    rewrite_hashes(path)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (id, {"steps": 1}, r"steps must be at least those done \(2\), got 1"),
        (id, {"optim": {"lr": 0.5}}, r"optim\.lr must stay as in the checkpoint \(0\.01\), got 0"),
        (change_text, {}, r"must stay as in the checkpoint .* The text has changed since\."),
        (from_a_gpu, {}, "device must be cuda as in the checkpoint, got cpu"),
    ],
)
def test_another_run_than_that_of_the_checkpoint_is_refused(tmp_path, change, settings, message):
    trainer = new_trainer(tmp_path, steps=2)
    trainer.run()
    config = tiny_config(tmp_path, **{"steps": 2, **settings})
    change(trainer)
    with pytest.raises(ValueError, match=message):
        make_trainer(config, tmp_path / "run", resume=True)


def test_nothing_to_resume_from(tmp_path):
    folder = new_trainer(tmp_path).run_folder
    folder.tokenizer.unlink()  # a run that ended while it prepared its data has none
    message = r"--resume must name a run with a checkpoint, got .*run\. It stopped before"
    with pytest.raises(ValueError, match=message):
        resumed(tmp_path)
