"""``nsa check`` accepts the records of a run, and finds each kind of disagreement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa import cli
from nsa.train.config import DataConfig
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run, read_scalars
from nsa.train.runs.report import report_page
from tests.train.cases import new_trainer, tiny_config
from tests.train.runs.cases import resumed_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run that was stopped and resumed twice from step 6, so that rows were set aside."""
    folder = tmp_path_factory.mktemp("sound")
    config = tiny_config(folder, steps=12, log_every=2, eval_every=5, checkpoint_every=100)
    return resumed_run(folder / "run", config, times=2)


def test_sound_run_agrees(sound, capsys):
    (summary,), found = check_run(sound)
    assert found == []
    assert summary.startswith("7 rows, steps 2 to 12, 3,072 tokens, ")
    assert summary.endswith("tokens/s by the clock")
    assert cli.main(["check", str(sound.path)]) == 0
    assert "everything agrees" in capsys.readouterr().out
    assert read_scalars(sound).keys() == {2, 4, 5, 6, 8, 10, 12}


def event_files(folder: RunFolder) -> list[Path]:
    """Event files in the order in which this process wrote them."""
    return sorted(folder.tensorboard.iterdir(), key=lambda path: int(path.name.split(".")[-1]))


def test_resumptions_within_one_second(tmp_path, sound):
    """The names of their event files differ in the writer's number alone."""
    folder = RunFolder(shutil.copytree(sound.path, tmp_path / "run"))
    for number, path in enumerate(event_files(folder), start=9):
        path.rename(path.with_name(f"events.out.tfevents.1700000000.host.1.{number}"))
    assert number == 11
    assert check_run(folder)[1] == []


def edited(name: str, change: Callable[[list[str]], object]) -> Callable[[RunFolder], None]:
    """Change the lines of a file."""

    def edit(folder: RunFolder) -> None:
        lines = (folder.path / name).read_text().splitlines(keepends=True)
        change(lines)
        (folder.path / name).write_text("".join(lines))

    return edit


def row(where: int, /, **values: object) -> Callable[[RunFolder], None]:
    """Change metrics of the row of a step."""

    def change(lines: list[str]) -> None:
        rows = [json.loads(line) for line in lines]
        rows = [{**row, **values} if row["step"] == where else row for row in rows]
        lines[:] = [json.dumps(row) + "\n" for row in rows]

    return edited("metrics.jsonl", change)


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (row(6, tokens=1537), "step 6: 1537 tokens, must be 1536 = step * global_batch * seq_len"),
        (row(8, tokens_per_s=1e9), "step 8: 1,000,000,000.0 tokens/s, must be "),
        (row(8, step_time_ms=1e6), "s by the clock since the row before"),
        (row(8, step_time_ms=1e-3), "is not between 0 and step_time_ms"),
        (row(8, loss_nats=1.25), "step 8: loss_nats is "),
        (edited("metrics.jsonl", lambda lines: lines.pop(1)), "metrics.jsonl: no row for step 4"),
        (edited("metrics.jsonl", lambda lines: lines.pop()), "metrics.jsonl: no row for step 12"),
        (row(8, step=7), "metrics.jsonl: a row for step 7, where none is due"),
        (row(8, step=5), "metrics.jsonl: step 5 follows step 6"),
        (row(12, step=10**12), "a row for step 1000000000000, where none is due"),
        (edited("metrics.csv", lambda lines: lines.pop(2)), "metrics.csv:3: 5,"),
        (lambda folder: folder.metrics_csv.unlink(), "metrics.csv: missing"),
        (lambda folder: event_files(folder)[-1].unlink(), "in TensorBoard, must be "),
        (lambda folder: shutil.rmtree(folder.tensorboard), "TensorBoard: no rows"),
        (
            edited("metrics.jsonl", lambda lines: lines.append('{"step": 14, "lo')),
            "metrics.jsonl:8: the last line is no row",
        ),
    ],
)
def test_disagreement_is_found(tmp_path, sound, change, answer):
    folder = RunFolder(shutil.copytree(sound.path, tmp_path / "run"))
    change(folder)
    assert any(answer in line for line in check_run(folder)[1])
    assert cli.main(["check", str(folder.path)]) == 1


def test_runs_on_synthetic_data_and_without_rows(tmp_path):
    trainer = new_trainer(tmp_path, "synthetic", steps=2, data=DataConfig(source="copy"))
    trainer.run()
    assert "true" in trainer.run_folder.metrics_csv.read_text()  # spelled as in JSON
    assert check_run(trainer.run_folder)[1] == []
    folder = new_trainer(tmp_path).run_folder
    assert check_run(folder) == ([], ["metrics.jsonl: no rows"])
    folder.metrics_jsonl.unlink()  # a run that ended while it prepared its data
    assert "no rows" in report_page([folder])
