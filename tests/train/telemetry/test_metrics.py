"""Metrics: every output holds the same rows, each step once, under names that are documented."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nsa.errors import UserError
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import (
    METRICS,
    MetricsWriter,
    Row,
    _set_aside_after,
    metric_of_tag,
    read_metrics,
    tensorboard_tag,
)

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


def losses(*values: float, first: int = 1) -> list[Row]:
    return [{"step": step, "loss_nats": loss} for step, loss in enumerate(values, start=first)]


def csv_rows(folder: RunFolder) -> list[dict[str, str]]:
    with folder.metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["time_unix_s"]
    return rows


def jsonl_rows(folder: RunFolder) -> list[Row]:
    rows = read_metrics(folder.metrics_jsonl)
    for row in rows:
        assert abs(float(row.pop("time_unix_s")) - time.time()) < 60
    return rows


def shown(folder: RunFolder) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert "loss_nats" not in events.Tags()["scalars"]
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def test_a_row_can_be_read_from_each_output_as_soon_as_it_is_written(folder: RunFolder) -> None:
    writer, rows = MetricsWriter(folder), losses(5.5, 4.25, 3.0)
    for number, row in enumerate(rows, start=1):
        writer.write(row)
        assert jsonl_rows(folder) == rows[:number]
        texts = [{name: str(value) for name, value in row.items()} for row in rows[:number]]
        assert csv_rows(folder) == texts
        assert shown(folder) == [(1, 5.5), (2, 4.25), (3, 3.0)][:number]
    writer.close()


def test_a_new_metric_becomes_the_last_column_and_absent_is_empty(folder: RunFolder) -> None:
    second: Row = {"step": 2, "val_loss_nats": 6.0, "loss_nats": 4.0, "data_synthetic": True}
    write(folder, {"step": 1, "loss_nats": 5.0}, second, {"step": 3, "mfu": 0.5})
    names = "step,time_unix_s,loss_nats,val_loss_nats,data_synthetic,mfu"
    assert folder.metrics_csv.read_text().splitlines()[0] == names
    assert [row["val_loss_nats"] for row in csv_rows(folder)] == ["", "6.0", ""]
    assert [row["data_synthetic"] for row in csv_rows(folder)] == ["", "true", ""]
    assert [row["mfu"] for row in csv_rows(folder)] == ["", "", "0.5"]
    assert "val_loss_nats" not in jsonl_rows(folder)[0]


def test_values_that_are_not_finite_survive_and_the_record_is_strict_json(
    folder: RunFolder,
) -> None:
    values: Row = {"loss_nats": math.nan, "grad_norm": math.inf, "bits_per_byte": -math.inf}
    write(folder, {"step": 1, **values})
    assert '"loss_nats": "nan", "grad_norm": "inf"' in folder.metrics_jsonl.read_text()
    (row,) = jsonl_rows(folder)
    assert math.isnan(float(row["loss_nats"]))
    assert (row["grad_norm"], row["bits_per_byte"]) == (math.inf, -math.inf)
    assert csv_rows(folder)[0]["grad_norm"] == "inf"


def test_rows_that_are_wrong_are_refused_before_anything_is_written(folder: RunFolder) -> None:
    writer = MetricsWriter(folder)
    writer.write({"step": 5, "loss_nats": 1.0})
    rows: list[tuple[Row, str]] = [
        ({"step": 5}, "step must be an integer above 5"),
        ({"step": 4}, "step must be an integer above 5"),
        ({"loss_nats": 1.0}, "step must be"),
        ({"step": 6, "loss": 1.0}, r"names must be in .*, got loss"),
    ]
    for row, message in rows:
        with pytest.raises(UserError, match=message):
            writer.write(row)
    writer.close()
    assert jsonl_rows(folder) == losses(1.0, first=5)
    assert len(csv_rows(folder)) == 1


def test_a_resumed_run_has_each_step_once_and_loses_nothing(folder: RunFolder) -> None:
    write(folder, *losses(1.0, 2.0, 3.0, 4.0))
    time.sleep(1.1 - time.time() % 1)  # TensorBoard orders its files by the second
    write(folder, {"step": 3, "loss_nats": 30.0, "mfu": 0.5}, after=2)
    time.sleep(1.1 - time.time() % 1)
    write(folder, *losses(300.0, 400.0, first=3), after=2)
    expected = [(1, 1.0), (2, 2.0), (3, 300.0), (4, 400.0)]
    assert [tuple(row.values()) for row in jsonl_rows(folder)] == expected
    assert [(int(row["step"]), float(row["loss_nats"])) for row in csv_rows(folder)] == expected
    first, second = (read_metrics(folder.path / f"metrics.set-aside-{n}.jsonl") for n in (1, 2))
    assert [row["loss_nats"] for row in first] == [3.0, 4.0]
    assert [row["loss_nats"] for row in second] == [30.0]
    assert "mfu" not in folder.metrics_csv.read_text()
    assert shown(folder) == expected
    write(folder, {"step": 5, "val_loss_nats": 9.0}, after=4)  # nothing to set aside
    assert [row["val_loss_nats"] for row in csv_rows(folder)] == ["", "", "", "", "9.0"]
    assert len(list(folder.path.glob("*set-aside*"))) == 2


def test_tags_are_grouped_and_name_their_metric() -> None:
    tags = {
        "loss_nats": "train/loss",
        "val_loss_nats": "val/loss",
        "val_bits_per_byte": "val/bits_per_byte",
        "learning_rate": "train/learning_rate",
        "gate_cmp_mean_layer_3": "gates/cmp_mean_layer_3",
        "selected_overlap": "selection/overlap",
        "tokens": "train/tokens",
        "tokens_per_s": "time/tokens_per_s",
        "step_time_ms_rank_1": "time/step_time_ms_rank_1",
        "memory_reserved_mib": "memory/reserved_mib",
    }
    assert {name: tensorboard_tag(name) for name in tags} == tags
    assert [metric_of_tag(tensorboard_tag(name)) for name in METRICS] == [*METRICS]
    assert [metric_of_tag(name) for name in METRICS] == [*METRICS]  # older runs


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3}', '{"step": 3, "loss_nats": 1.0', '{"st\n', "\x00\x00"]
)
def test_a_line_that_a_crash_left_unfinished_is_set_aside(folder: RunFolder, torn: str) -> None:
    write(folder, *losses(1.0, 2.0))
    with folder.metrics_jsonl.open("a") as file:
        file.write(torn)
    assert jsonl_rows(folder) == losses(1.0, 2.0)
    write(folder, *losses(3.0, first=3), after=2)
    assert jsonl_rows(folder) == losses(1.0, 2.0, 3.0)
    assert (folder.path / "metrics.set-aside-1.jsonl").read_text() == torn


def test_rows_are_set_aside_before_the_record_shrinks(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends after the first of two files; one of the rows is out of order."""
    write(folder, *losses(1.0, 2.0, 3.0))
    first, *others = folder.metrics_jsonl.read_bytes().splitlines(keepends=True)
    folder.metrics_jsonl.write_bytes(b"".join([*others, first]))
    written = list[Path]()

    def write_once(path: Path, text: bytes) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        path.write_bytes(text)

    with monkeypatch.context() as patch:
        patch.setattr("nsa.train.telemetry.metrics.replace_text", write_once)
        with pytest.raises(KeyboardInterrupt):
            _set_aside_after(folder.metrics_jsonl, 1)
    files = [path.read_bytes() for path in folder.path.glob("metrics*.jsonl")]
    assert {*b"".join(files).splitlines(keepends=True)} == {first, *others}
    _set_aside_after(folder.metrics_jsonl, 1)
    assert folder.metrics_jsonl.read_bytes() == first
    assert written[0].read_bytes() == b"".join(others)


@pytest.mark.parametrize(
    "line",
    [
        b"{oops",
        b'{"step": 1, "loss_nats": 1',
        b"",
        b'{"loss_nats": 1.0}',
        b'{"step": 1.0}',
        b'{"step": 1, "tokens": 2.5}',
        b'{"step": 1, "loss_nats": "low"}',
        b'{"step": 1, "\\ud800": 1}',
        b'{"step": 1, "tokens": 1%s}' % (b"0" * 5000),
        b'{"step": 1, "loss_nats": \xff\x00}',
        b"[" * 100_000,
    ],
    ids=lambda line: repr(line[:30]),
)
def test_a_line_that_is_no_row_is_an_error_before_the_end(folder: RunFolder, line: bytes) -> None:
    write(folder, *losses(1.0, 2.0))
    first, second = folder.metrics_jsonl.read_bytes().splitlines(keepends=True)
    folder.metrics_jsonl.write_bytes(first + second + line + b"\n")
    assert len(read_metrics(folder.metrics_jsonl)) == 2
    folder.metrics_jsonl.write_bytes(first + line + b"\n" + second)
    with pytest.raises(UserError, match=r"metrics.jsonl:2: line must be a row of metrics in JSON"):
        MetricsWriter(folder)
    folder.metrics_jsonl.write_bytes(first + b'{"step": 2, "loss_nats": NaN}\n' + second)
    with pytest.raises(UserError, match=r"jsonl:1: line must be a row of metrics with tokens in"):
        read_metrics(folder.metrics_jsonl, "tokens")


SUFFIXES: dict[str, str | tuple[str, ...]] = {
    "1": "",
    "s": "_s",
    "ms": "_ms",
    "MiB": "_mib",
    "%": "_percent",
    "steps": ("step", "_steps"),
    "tokens": "tokens",
    "tokens/s": ("tokens_per_s", "tokens_per_s_total"),
    "nats/token": "_nats",
    "bits/byte": "bits_per_byte",
    "calls": "_calls",
}


def test_the_document_lists_exactly_the_metrics_there_are_and_names_carry_their_unit() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    table = [cells for line in lines if len(cells := line.strip("| ").split(" | ")) == 3]
    assert [name for name, _, _ in table] == [f"`{name}`" for name in METRICS]
    assert len(set(METRICS)) == len(METRICS)
    for name, unit, _ in table:
        assert name.strip("`").endswith(SUFFIXES[unit]), name
