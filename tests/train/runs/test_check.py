"""The checker accepts what a run wrote, resumed or not, and finds each kind of disagreement."""

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
from tests.train.cases import make_trainer, tiny_config
from tests.train.runs.cases import stop_after_step_6


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was stopped, resumed and finished, with rows taken back in between."""
    folder = tmp_path_factory.mktemp("sound")
    config = tiny_config(folder, steps=12, log_every=2, eval_every=5, checkpoint_every=100)

    first = make_trainer(config, folder / "run", on_row=stop_after_step_6)
    first.run()
    (checkpoint,) = (folder / "run" / "checkpoints").iterdir()
    kept = shutil.copytree(checkpoint, folder / checkpoint.name)
    # from step 6 twice: the rows after it are written, set aside and written again
    for _ in range(2):
        shutil.rmtree(folder / "run" / "checkpoints")
        (folder / "run" / "checkpoints").mkdir()
        shutil.copytree(kept, folder / "run" / "checkpoints" / kept.name)
        make_trainer(config, folder / "run", resume=True).run()
    return RunFolder.open(folder / "run")


def test_sound_run_agrees(sound: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (summary,), found = check_run(sound)
    assert found == []
    assert summary.startswith("7 rows, steps 2 to 12, 3,072 tokens, ")
    assert "tokens/s in steps" in summary
    assert "tokens/s by the clock" in summary
    assert cli.main(["check", str(sound.path)]) == 0
    assert "everything agrees" in capsys.readouterr().out
    assert read_scalars(sound).keys() == {2, 4, 5, 6, 8, 10, 12}


def test_a_run_on_synthetic_data_agrees(tmp_path: Path) -> None:
    """Its rows hold a truth value, which the CSV spells as JSON does."""
    config = tiny_config(tmp_path, steps=2, data=DataConfig(source="copy"))
    make_trainer(config, tmp_path / "run").run()
    folder = RunFolder.open(tmp_path / "run")
    assert "true" in folder.metrics_csv.read_text()
    assert check_run(folder)[1] == []


def test_resumptions_within_one_second(tmp_path: Path, sound: RunFolder) -> None:
    """The names of their event files differ in the writer's number alone."""
    folder = RunFolder(shutil.copytree(sound.path, tmp_path / "run"))
    files = event_files(folder)
    assert len(files) == 3
    for number, path in enumerate(files, start=9):
        path.rename(path.with_name(f"events.out.tfevents.1700000000.host.1.{number}"))
    assert check_run(folder)[1] == []


def change_row(where: int, **values: object) -> Callable[[RunFolder], None]:
    def change(folder: RunFolder) -> None:
        rows = [json.loads(line) for line in folder.metrics_jsonl.read_text().splitlines()]
        rows = [{**row, **values} if row["step"] == where else row for row in rows]
        folder.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return change


def drop_line(name: str, number: int) -> Callable[[RunFolder], None]:
    def change(folder: RunFolder) -> None:
        path = folder.path / name
        lines = path.read_text().splitlines(keepends=True)
        del lines[number]
        path.write_text("".join(lines))

    return change


def change_csv(folder: RunFolder) -> None:
    text = folder.metrics_csv.read_text()
    folder.metrics_csv.write_text(text.replace(",1024,", ",1025,"))


def tear(folder: RunFolder) -> None:
    with folder.metrics_jsonl.open("a") as file:
        file.write('{"step": 14, "lo')


def event_files(folder: RunFolder) -> list[Path]:
    """In the order in which this process wrote them."""
    return sorted(folder.tensorboard.iterdir(), key=lambda path: int(path.name.split(".")[-1]))


def drop_events(folder: RunFolder) -> None:
    event_files(folder)[-1].unlink()


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (
            change_row(6, tokens=1537),
            "step 6: 1537 tokens recorded, 1536 = step * global_batch * seq_len",
        ),
        (change_row(8, tokens_per_s=1e9), "step 8: 1,000,000,000.0 tokens/s recorded, "),
        (change_row(8, step_time_ms=1e6), "s by the clock since the row before"),
        (change_row(8, step_time_ms=1e-3), "lies outside step_time_ms"),
        (change_row(8, loss_nats=1.25), "step 8: loss_nats is "),
        (drop_line("metrics.jsonl", 1), "metrics.jsonl: no row for step 4"),
        (drop_line("metrics.jsonl", -1), "metrics.jsonl: no row for step 12"),
        (change_row(8, step=7), "metrics.jsonl: a row for step 7, where none is due"),
        (change_row(8, step=5), "metrics.jsonl: step 5 follows step 6"),
        (drop_line("metrics.csv", 2), "metrics.csv: 6 rows, metrics.jsonl has 7"),
        (lambda folder: folder.metrics_csv.unlink(), "metrics.csv: missing"),
        (change_csv, "step 4: tokens is 1025 in metrics.csv, 1024 in metrics.jsonl"),
        (drop_events, "in TensorBoard, "),
        (lambda folder: shutil.rmtree(folder.tensorboard), "TensorBoard: no rows"),
        (tear, "metrics.jsonl:8: the last line is no row"),
        (
            change_row(8, learning_rate=0.5),
            "its 7 rows up to step 12 are not the 7 that were there at step-00000012",
        ),
        (change_row(12, step=10**12), "a row for step 1000000000000, where none is due"),
    ],
)
def test_disagreement_is_found(
    tmp_path: Path,
    sound: RunFolder,
    change: Callable[[RunFolder], None],
    answer: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RunFolder(shutil.copytree(sound.path, tmp_path / "run"))
    change(folder)
    _, found = check_run(folder)
    assert any(answer in line for line in found), found
    assert cli.main(["check", str(folder.path)]) == 1
    assert "disagree" in capsys.readouterr().out


def test_run_without_rows(tmp_path: Path) -> None:
    make_trainer(tiny_config(tmp_path), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    assert check_run(folder) == ([], ["metrics.jsonl: no rows"])
    folder.metrics_jsonl.unlink()  # as of a run that ended while it prepared its data
    assert check_run(folder) == ([], ["metrics.jsonl: no rows"])
    assert "no rows" in report_page([folder])
