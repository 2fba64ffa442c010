"""Resuming: a run that was cut anywhere and continued is the run that was not."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa.train.checkpoint import list_checkpoints, read_meta
from nsa.train.data import spread
from nsa.train.runs.check import check_run
from nsa.train.state import Progress, TrainState, Window
from nsa.train.telemetry.metrics import Row
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
def rows_of_whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Rows of an undisturbed run with this optimizer."""

    @functools.cache
    def rows(name: str) -> Any:
        folder = tmp_path_factory.mktemp(name)
        new_trainer(folder, checkpoint_every=10, optim={"name": name}).run()
        return reproducible_rows(folder / "run")

    return rows


@contextmanager
def signal_in_evaluation(trainer: Trainer, step: int) -> Iterator[None]:
    """SIGTERM in the middle of the evaluation after a step."""
    validation = type(trainer.data.validation)
    real, third = validation.sequence, spread(4, trainer.data.validation.num_sequences(64))[2]

    def sequence(source: Any, seq_len: int, index: int) -> Any:
        is_third = source is trainer.data.validation and index == third
        if is_third and trainer.state.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(source, seq_len, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "sequence", sequence)
        yield


@contextmanager
def signal_in_step(
    trainer: Trainer, step: int, number: signal.Signals = signal.SIGTERM
) -> Iterator[None]:
    """A signal at the beginning of a step."""
    real = trainer.train_step

    def train_step(*args: Any) -> torch.Tensor:
        if trainer.state.progress.step == step - 1:
            os.kill(os.getpid(), number)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", train_step)
        yield


def stop(name: str, step: int, number: signal.Signals) -> Any:
    """By default the other optimizer and the other signal are tried at one step alone."""
    usual = step == 3 or (name, number) == ("adamw", signal.SIGTERM)
    marks = [] if usual else [pytest.mark.faults]
    return pytest.param(name, step, number, marks=marks, id=f"{name}-{step}-{number}")


# Between rows, with an evaluation, and with evaluation, row and checkpoint.
STOPS = [
    stop(name, step, number)
    for name in ("adamw", "muon")
    for step in (3, 5, 10)
    for number in (signal.SIGTERM, signal.SIGINT)
]


@pytest.mark.parametrize(("name", "step", "number"), STOPS)
def test_signal_finishes_the_step_and_resumes_exactly(
    tmp_path: Path,
    number: signal.Signals,
    step: int,
    name: str,
    rows_of_whole: Callable[[str], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = rows_of_whole(name)
    caplog.set_level("INFO", logger="nsa")
    config = tiny_config(tmp_path, checkpoint_every=10, optim={"name": name})
    trainer = make_trainer(config, tmp_path / "cut")
    handler = signal.getsignal(number)
    with signal_in_step(trainer, step, number):
        result = trainer.run()
    assert signal.getsignal(number) is handler
    assert (result.finished, result.signal, result.step) == (False, number.name, step)
    assert f"stopped by {number.name} after step {step} of 12" in caplog.text
    assert list_checkpoints(tmp_path / "cut" / "checkpoints")[-1].name == f"step-{step:08d}"
    assert make_trainer(config, tmp_path / "cut", resume=True).run().finished
    assert reproducible_rows(tmp_path / "cut") == whole


def test_signal_during_an_evaluation(tmp_path: Path) -> None:
    """The row waits for the resumed run, which evaluates in full."""
    new_trainer(tmp_path, "whole").run()
    trainer = new_trainer(tmp_path, "cut")
    with signal_in_evaluation(trainer, 5):
        assert trainer.run().step == 5
    assert [row["step"] for row in rows_of(tmp_path, "cut")] == [2, 4]
    resumed(tmp_path, "cut").run()
    assert reproducible_rows(tmp_path / "cut") == reproducible_rows(tmp_path / "whole")


@pytest.mark.parametrize("signal_in", [signal_in_step, signal_in_evaluation])
def test_a_signal_in_the_last_step_or_its_evaluation_leaves_a_whole_run(
    tmp_path: Path, signal_in: Callable[..., AbstractContextManager[None]]
) -> None:
    """It ends as finished: with its last row and evaluation, in the checkpoint too."""
    new_trainer(tmp_path, "whole").run()
    trainer = new_trainer(tmp_path, "cut")
    with signal_in(trainer, 12):
        result = trainer.run()
    assert (result.finished, result.signal, result.step) == (True, None, 12)
    assert reproducible_rows(tmp_path / "cut") == reproducible_rows(tmp_path / "whole")
    assert check_run(trainer.run_folder)[1] == []
    meta = read_meta(list_checkpoints(trainer.run_folder.checkpoints)[-1])
    assert meta["progress"]["reported_step"] == 12
    assert meta["val_bits_per_byte"] == rows_of(tmp_path, "cut")[-1]["val_bits_per_byte"]


# --- the state ------------------------------------------------------------------------------------


def test_the_state_lists_everything_that_resumes() -> None:
    """A new field of the state needs a place in the checkpoint; this list is what has one."""
    names = [field.name for field in dataclasses.fields(TrainState)]
    assert names == ["model", "optimizer", "sampler", "progress"]
    window = Window(steps=2, loss=1 / 3)
    progress = Progress(step=3, best_val_bits_per_byte=0.1 + 0.2, window=window)
    loaded = Progress.from_json(json.loads(json.dumps(dataclasses.asdict(progress))))
    assert loaded == progress


def test_checkpoint_restores_the_random_generators(tmp_path: Path) -> None:
    def draw() -> list[float]:
        """The generators of Gaussian numbers keep a second one back."""
        ours, numpy = (random.random(), random.gauss()), (np.random.rand(), np.random.randn())
        return [*ours, *map(float, numpy), torch.rand(()).item()]

    trainer = new_trainer(tmp_path, steps=2)
    draw()  # so that the checkpoint's state is not the one that every start seeds
    trainer.run()
    after = draw()
    resumed(tmp_path, steps=2)
    assert draw() == after


def test_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    seen: list[Row] = []
    config = tiny_config(tmp_path, steps=2)
    make_trainer(config, tmp_path / "run", on_row=seen.append).run()
    assert all(type(value) in (int, float) for row in seen for value in row.values())
    rows = rows_of(tmp_path)
    result = resumed(tmp_path, steps=2, log_every=1).run()
    assert (result.finished, result.step, result.row) == (True, 2, {})
    assert rows_of(tmp_path) == rows


def change_text(tmp_path: Path, trainer: Trainer) -> None:
    (tmp_path / "text" / "00.txt").write_text("another text of another length\n" * 20)


def from_a_gpu(tmp_path: Path, trainer: Trainer) -> None:
    (path,) = list_checkpoints(trainer.run_folder.checkpoints)
    meta = read_meta(path)
    meta["rng"]["device"] = "cuda"
    (path / "meta.json").write_text(json.dumps(meta))
    rewrite_hashes(path)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (None, {"steps": 1}, r"steps must be at least those done \(2\), got 1"),
        (
            None,
            {"optim": {"lr": 0.5}},
            r"optim\.lr must stay as in the checkpoint \(0\.01\), got 0",
        ),
        (change_text, {}, r"must stay as in the checkpoint .* The text has changed since\."),
        (from_a_gpu, {}, "device must be cuda as in the checkpoint, got cpu"),
    ],
)
def test_another_run_than_that_of_the_checkpoint_is_refused(
    tmp_path: Path, change: Callable[..., None] | None, settings: dict[str, Any], message: str
) -> None:
    trainer = new_trainer(tmp_path, steps=2)
    trainer.run()
    config = tiny_config(tmp_path, **{"steps": 2, **settings})
    if change is not None:
        change(tmp_path, trainer)
    with pytest.raises(ValueError, match=message):
        make_trainer(config, tmp_path / "run", resume=True)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    folder = new_trainer(tmp_path).run_folder
    folder.tokenizer.unlink()  # a run that ended while it prepared its data has none
    message = r"--resume must name a run with a checkpoint, got .*run\. It stopped before"
    with pytest.raises(ValueError, match=message):
        resumed(tmp_path)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda content: content, None),
        (lambda content: content.replace(b'"tokens": 1024', b'"tokens": 1025'), 2),
        (lambda content: content.splitlines(keepends=True)[0], 1),
    ],
)
def test_rows_that_were_lost_or_changed_are_noticed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[bytes], bytes],
    rows: int | None,
) -> None:
    trainer = new_trainer(tmp_path, steps=4, eval_every=0)
    trainer.run()
    record = trainer.run_folder.metrics_jsonl
    record.write_bytes(change(record.read_bytes()))
    resumed(tmp_path, steps=6, eval_every=0).run()
    said = [record.getMessage() for record in caplog.records if "rows up to" in record.getMessage()]
    found = f"metrics.jsonl: its {rows} rows up to step 4 are not the 2 that were there at step-"
    assert len(said) == (rows is not None)
    assert all(text.startswith(found) for text in said)
    assert [row["step"] for row in rows_of(tmp_path)][-1] == 6
