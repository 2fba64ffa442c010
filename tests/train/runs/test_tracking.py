"""Rows reach a tracker once each, during the run or after it; a stub replaces both trackers."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import types
from contextlib import ExitStack
from typing import Any

import pytest

from nsa import cli
from nsa.train.runs import tracking
from nsa.train.telemetry.metrics import read_metrics
from tests.train.cases import make_trainer, tiny_config
from tests.train.runs.cases import stop_after_step_6


class Tracker:
    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, *, config: dict[str, Any], **given: str) -> Tracker:
        self.inits.append(given)
        assert config["seq_len"] == 64
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def tracker(monkeypatch):
    made, module = Tracker(), types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    module.init = made.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_rows_are_sent_once(tmp_path, tracker, capsys):
    config, path = tiny_config(tmp_path), tmp_path / "run"
    make_trainer(config, path, on_row=stop_after_step_6).run()
    words = ["track", str(path), "--to", "wandb", "--project", "p"]
    for _ in range(2):
        assert cli.main(words) == 0
        assert [step for step, _ in tracker.logged] == [2, 4, 5, 6]
    make_trainer(config, path, resume=True).run()
    assert cli.main([*words, "--follow"]) == 0  # ends, since all steps are done
    rows = read_metrics(path / "metrics.jsonl")
    assert tracker.logged == [(row.pop("step"), row) for row in rows]
    first = tracker.inits[0]
    assert tracker.inits == [first] * 3
    assert (first["project"], first["resume"]) == ("p", "allow")
    assert first["name"].startswith("run-")
    assert tracker.finished == 3
    assert "3 rows to step 12" in capsys.readouterr().out


def test_following_ends_with_the_run(tmp_path, tracker, monkeypatch):
    """A run that was stopped before its last step: what it wrote last is sent."""
    config, path, waits = tiny_config(tmp_path, steps=100_000), tmp_path / "run", 0
    folder = make_trainer(config, path).run_folder
    make_trainer(dataclasses.replace(config, steps=12), tmp_path / "other").run()
    with ExitStack() as run:
        run.enter_context(folder.in_use())

        def sleep(seconds):
            nonlocal waits
            waits += 1
            assert waits < 20, "it continues without a run"
            assert folder.is_in_use() == (waits <= 5)
            if waits == 5:
                shutil.copy(tmp_path / "other" / "metrics.jsonl", path)
                run.close()

        monkeypatch.setattr(tracking, "time", types.SimpleNamespace(sleep=sleep))
        assert cli.main(["track", str(path), "--to", "wandb", "--follow"]) == 0
    assert [step for step, _ in tracker.logged] == [2, 4, 5, 6, 8, 10, 12]
    assert (waits, tracker.finished) == (7, 1)


def test_unknown_or_missing_tracker(
    tmp_path,
    capsys,
    monkeypatch,
):
    make_trainer(tiny_config(tmp_path), tmp_path / "run")
    assert cli.main(["track", str(tmp_path / "run"), "--to", "mlflow"]) == 2
    assert "--to must be one of trackio, wandb, got mlflow" in capsys.readouterr().err
    monkeypatch.setattr(tracking, "SERVICES", ("no_such_package",))
    assert cli.main(["track", str(tmp_path / "run"), "--to", "no_such_package"]) == 2
    assert "Install it: pip install no_such_package" in capsys.readouterr().err
