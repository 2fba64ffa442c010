"""A run folder that is renamed, emptied, removed or replaced during the run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from nsa import cli
from nsa.train.load import to_yaml
from nsa.train.trainer import Trainer
from tests.train.cases import rows_of, tiny_config


def rename(run: Path) -> None:
    run.rename(run.with_name("other"))


def replace(run: Path) -> None:
    rename(run)
    run.write_text("a file, so that no folder can be made")


def block(run: Path) -> None:
    (run / "config.yaml").unlink()
    (run / "config.yaml").mkdir()


def empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


@pytest.mark.parametrize(
    ("lose", "code", "said"),
    [
        (rename, 0, "config.yaml was missing and has been restored"),
        (empty, 0, "config.yaml was missing and has been restored"),
        (os.remove, 0, "config.yaml was missing and has been restored"),
        (replace, 1, "stopped: checkpoint of step 12 could not be written"),
        (block, 1, "config.yaml is gone and could not be restored; the last checkpoint is"),
    ],
)
def test_a_run_that_loses_its_folder_ends_with_one_that_can_be_used_or_with_an_error(
    tmp_path,
    monkeypatch,
    capsys,
    lose,
    code,
    said,
):
    run, real = tmp_path / "run", Trainer.train_step

    def train_step(trainer, *args):
        if trainer.state.progress.step == 6:
            lose(run / "config.yaml" if lose is os.remove else run)
        return real(trainer, *args)

    config = tmp_path / "tiny.yaml"
    config.write_text(to_yaml(tiny_config(tmp_path)))
    monkeypatch.setattr("nsa.cli.train._plot", lambda folder: None)  # most of the time
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        assert cli.main(["train", str(config), "--run-dir", str(run)]) == code
    assert said in capsys.readouterr().out
    if code:
        if lose is block:
            (run / "config.yaml").rmdir()
        path = run if lose is block else tmp_path / "other"
        assert cli.main(["train", "--resume", str(path)]) == 0
        return
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (restored,) = (n for n, event in enumerate(events) if said in event["message"])
    later = [event["step"] for event in events[restored:] if event["kind"] == "checkpoint"]
    assert (events[restored]["kind"], later[-1]) == ("warning", 12)
    assert cli.main(["train", "--resume", str(run), "--steps", "14"]) == 0
    assert [row["step"] for row in rows_of(tmp_path)][-3:] == [10, 12, 14]
    assert cli.main(["eval", str(run), "--windows", "1"]) == 0
