"""Metrics: every output holds the same rows, each step once, under names that are documented."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nsa.errors import UserError
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import METRICS, MetricsWriter, Row, read_metrics

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", TrainConfig())


def write(folder: RunFolder, *rows: Row, after: int | None = None) -> None:
    writer = MetricsWriter(folder)
    if after is not None:
        writer.rewind(after)
    for row in rows:
        writer.write(row)
    writer.close()


def csv_rows(folder: RunFolder) -> list[dict[str, str]]:
    with folder.metrics_csv.open(newline="") as file:
        return [
            {name: value for name, value in row.items() if name != "time_unix_s"}
            for row in csv.DictReader(file)
        ]


def jsonl_rows(folder: RunFolder) -> list[Row]:
    return [
        {name: value for name, value in row.items() if name != "time_unix_s"}
        for row in read_metrics(folder.metrics_jsonl)
    ]


def scalars(folder: RunFolder, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_the_three_outputs_hold_the_same_rows(folder: RunFolder) -> None:
    rows: list[Row] = [
        {"step": 1, "loss_nats": 5.5, "tokens": 10},
        {"step": 2, "loss_nats": 4.25, "tokens": 20},
    ]
    before = time.time()
    write(folder, *rows)
    assert jsonl_rows(folder) == rows
    assert csv_rows(folder) == [{name: str(value) for name, value in row.items()} for row in rows]
    assert scalars(folder, "loss_nats") == [(1, 5.5), (2, 4.25)]
    assert all(
        before - 1 <= float(row["time_unix_s"]) <= time.time() + 1
        for row in read_metrics(folder.metrics_jsonl)
    )


def test_a_row_can_be_read_as_soon_as_it_is_written(folder: RunFolder) -> None:
    writer = MetricsWriter(folder)
    for step in (1, 2, 3):
        writer.write({"step": step, "loss_nats": 1.0})
        assert [row["step"] for row in jsonl_rows(folder)] == list(range(1, step + 1))
        assert len(csv_rows(folder)) == step
    writer.close()


def test_a_new_metric_becomes_the_last_column_and_absent_is_empty(folder: RunFolder) -> None:
    write(
        folder,
        {"step": 1, "loss_nats": 5.0},
        {"step": 2, "val_loss_nats": 6.0, "loss_nats": 4.0},
        {"step": 3, "mfu": 0.5},
    )
    assert (
        folder.metrics_csv.read_text().splitlines()[0]
        == "step,time_unix_s,loss_nats,val_loss_nats,mfu"
    )
    assert [row["val_loss_nats"] for row in csv_rows(folder)] == ["", "6.0", ""]
    assert [row["mfu"] for row in csv_rows(folder)] == ["", "", "0.5"]
    assert "val_loss_nats" not in jsonl_rows(folder)[0]


def test_values_that_are_not_finite_survive_and_the_record_is_strict_json(
    folder: RunFolder,
) -> None:
    write(
        folder,
        {"step": 1, "loss_nats": math.nan, "grad_norm": math.inf, "bits_per_byte": -math.inf},
    )
    text = folder.metrics_jsonl.read_text()
    assert '"loss_nats": "nan"' in text
    assert '"grad_norm": "inf"' in text
    (row,) = jsonl_rows(folder)
    assert math.isnan(float(row["loss_nats"]))
    assert (row["grad_norm"], row["bits_per_byte"]) == (math.inf, -math.inf)
    assert csv_rows(folder)[0]["grad_norm"] == "inf"


def test_rows_that_are_wrong_are_refused_before_anything_is_written(folder: RunFolder) -> None:
    writer = MetricsWriter(folder)
    writer.write({"step": 5, "loss_nats": 1.0})
    for step in (5, 4):
        with pytest.raises(ValueError, match="step must be an integer above 5"):
            writer.write({"step": step})
    with pytest.raises(ValueError, match="step must be"):
        writer.write({"loss_nats": 1.0})
    with pytest.raises(ValueError, match=r"names must be in .*, got loss"):
        writer.write({"step": 6, "loss": 1.0})
    with pytest.raises(TypeError, match="loss_nats must be an int, float, bool or str, got Tensor"):
        writer.write({"step": 6, "loss_nats": torch.tensor(1.0)})  # type: ignore[dict-item]
    writer.close()
    assert [row["step"] for row in jsonl_rows(folder)] == [5]
    assert len(csv_rows(folder)) == 1


def test_a_resumed_run_has_each_step_once_and_loses_nothing(folder: RunFolder) -> None:
    first: list[Row] = [{"step": step, "loss_nats": float(step)} for step in (1, 2, 3, 4)]
    write(folder, *first)
    write(folder, {"step": 3, "loss_nats": 30.0, "mfu": 0.5}, after=2)
    write(folder, {"step": 3, "loss_nats": 300.0}, {"step": 4, "loss_nats": 400.0}, after=2)
    expected = [(1, 1.0), (2, 2.0), (3, 300.0), (4, 400.0)]
    assert [(row["step"], row["loss_nats"]) for row in jsonl_rows(folder)] == expected
    assert [(int(row["step"]), float(row["loss_nats"])) for row in csv_rows(folder)] == expected
    aside = [read_metrics(folder.path / f"metrics.set-aside-{number}.jsonl") for number in (1, 2)]
    assert [[(row["step"], row["loss_nats"]) for row in rows] for rows in aside] == [
        [(3, 3.0), (4, 4.0)],
        [(3, 30.0)],
    ]
    assert "mfu" not in folder.metrics_csv.read_text()


def test_tensorboard_hides_what_was_set_aside(folder: RunFolder) -> None:
    first: list[Row] = [{"step": step, "loss_nats": float(step)} for step in (1, 2, 3, 4)]
    write(folder, *first)
    write(folder, {"step": 3, "loss_nats": 30.0}, after=2)
    assert scalars(folder, "loss_nats") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_continuing_without_anything_to_set_aside_keeps_all_rows(folder: RunFolder) -> None:
    write(folder, {"step": 1, "loss_nats": 1.0}, {"step": 2, "loss_nats": 2.0})
    write(folder, {"step": 3, "loss_nats": 3.0, "val_loss_nats": 9.0}, after=2)
    assert [row["step"] for row in jsonl_rows(folder)] == [1, 2, 3]
    assert [row["val_loss_nats"] for row in csv_rows(folder)] == ["", "", "9.0"]
    assert not list(folder.path.glob("*set-aside*"))


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3}', '{"step": 3, "loss_nats": 1.0', '{"st\n', "\x00\x00"]
)
def test_a_line_torn_by_a_crash_is_set_aside(folder: RunFolder, torn: str) -> None:
    write(folder, {"step": 1, "loss_nats": 1.0}, {"step": 2, "loss_nats": 2.0})
    with folder.metrics_jsonl.open("a") as file:
        file.write(torn)
    assert [row["step"] for row in jsonl_rows(folder)] == [1, 2]
    write(folder, {"step": 3, "loss_nats": 3.0}, after=2)
    assert [row["step"] for row in jsonl_rows(folder)] == [1, 2, 3]
    assert (folder.path / "metrics.set-aside-1.jsonl").read_text() == torn


def test_a_damaged_line_in_the_middle_is_an_error(folder: RunFolder) -> None:
    write(folder, {"step": 1, "loss_nats": 1.0}, {"step": 2, "loss_nats": 2.0})
    folder.metrics_jsonl.write_text("{oops\n" + folder.metrics_jsonl.read_text())
    with pytest.raises(UserError, match=r"metrics.jsonl:1: line must be a row of metrics"):
        MetricsWriter(folder)


def test_the_document_lists_exactly_the_metrics_there_are() -> None:
    table = [
        line.strip("| ").split(" | ")
        for line in DOCUMENT.read_text().splitlines()
        if line.startswith("| `")
    ]
    documented = [cells for cells in table if len(cells) == 3]
    assert documented == [[f"`{metric.name}`", metric.unit, metric.meaning] for metric in METRICS]
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_names_carry_their_unit() -> None:
    suffixes: dict[str, str | tuple[str, ...]] = {
        "1": "", "s": "_s", "ms": "_ms", "MiB": "_mib", "%": "_percent", "steps": ("step", "_steps"), "tokens": "tokens",
        "tokens/s": ("tokens_per_s", "tokens_per_s_total"), "nats/token": "_nats", "bits/byte": "bits_per_byte",
        "calls": "_calls",
    }  # fmt: skip
    for metric in METRICS:
        assert metric.name.endswith(suffixes[metric.unit]), metric
