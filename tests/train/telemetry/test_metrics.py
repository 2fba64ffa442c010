"""Metrics: every output holds the same rows, each step once, under names that are documented."""

from __future__ import annotations

import errno
import math
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nsa.errors import UserError
from nsa.files import AppendedFile
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
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", TrainConfig())


def write(folder: RunFolder, *rows: Row, after: int = 0) -> None:
    writer = MetricsWriter(folder)
    writer.rewind(after)
    for row in rows:
        writer.write(row)
    writer.close()


def losses(*values: float, first: int = 1) -> list[Row]:
    return [{"step": step, "loss_nats": loss} for step, loss in enumerate(values, start=first)]


def read(folder: RunFolder, name: str = "metrics.jsonl") -> list[Row]:
    rows = read_metrics(folder.path / name)
    for row in rows:
        del row["time_unix_s"]
    return rows


def shown(folder: RunFolder) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


ROWS: list[Row] = [
    {"step": 1, "loss_nats": 5.5},
    {"step": 2, "val_loss_nats": 6.0, "loss_nats": 4.25, "data_synthetic": True},
    {"step": 3, "loss_nats": math.inf, "mfu": math.nan, "grad_norm": -math.inf},
]
JSONL = """\
{"step": 1, "time_unix_s": 9.5, "loss_nats": 5.5}
{"step": 2, "time_unix_s": 9.5, "val_loss_nats": 6.0, "loss_nats": 4.25, "data_synthetic": true}
{"step": 3, "time_unix_s": 9.5, "loss_nats": "inf", "mfu": "nan", "grad_norm": "-inf"}
"""
CSV = """\
step,time_unix_s,loss_nats,val_loss_nats,data_synthetic,mfu,grad_norm
1,9.5,5.5,,,,
2,9.5,4.25,6.0,true,,
3,9.5,inf,,,nan,-inf
"""


def test_each_output_has_a_row_as_soon_as_it_is_written(folder, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 9.5)
    writer = MetricsWriter(folder)
    for number, row in enumerate(ROWS, start=1):
        writer.write(row)
        assert folder.metrics_jsonl.read_text().splitlines() == JSONL.splitlines()[:number]
        assert shown(folder)[number - 1 :] == [(number, row["loss_nats"])]
        assert len(folder.metrics_csv.read_text().splitlines()) == number + 1
    assert folder.metrics_csv.read_text() == CSV
    assert repr(read(folder)) == repr(ROWS)
    writer.close()


def test_rows_that_are_wrong_are_refused_before_anything_is_written(folder):
    writer = MetricsWriter(folder)
    writer.write({"step": 5, "loss_nats": 1.0})
    rows: list[tuple[Row, str]] = [
        ({"step": 5}, "step must be an integer above 5"),
        ({"loss_nats": 1.0}, "step must be"),
        ({"step": 6, "loss": 1.0}, r"names must be in .*, got loss"),
    ]
    for row, message in rows:
        with pytest.raises(UserError, match=message):
            writer.write(row)
    writer.close()
    assert read(folder) == losses(1.0, first=5)
    assert folder.metrics_csv.read_text().count("\n") == 2


def test_a_resumed_run_has_each_step_once_and_loses_nothing(folder):
    write(folder, *losses(1.0, 2.0, 3.0, 4.0))
    time.sleep(1.1 - time.time() % 1)  # TensorBoard orders its files by the second
    write(folder, {"step": 3, "loss_nats": 30.0, "mfu": 0.5}, after=2)
    time.sleep(1.1 - time.time() % 1)
    write(folder, *losses(300.0, 400.0, first=3), after=2)
    expected = losses(1.0, 2.0, 300.0, 400.0)
    assert read(folder) == expected
    assert shown(folder) == [tuple(row.values()) for row in expected]
    assert read(folder, "metrics.set-aside-1.jsonl") == losses(3.0, 4.0, first=3)
    assert read(folder, "metrics.set-aside-2.jsonl")[0]["mfu"] == 0.5
    head, *lines = folder.metrics_csv.read_text().splitlines()
    assert (head, len(lines)) == ("step,time_unix_s,loss_nats", 4)
    write(folder, {"step": 5, "val_loss_nats": 9.0}, after=4)  # nothing to set aside
    assert folder.metrics_csv.read_text().endswith(",,9.0\n")
    assert len(list(folder.path.glob("*set-aside*"))) == 2


def test_tags_are_grouped_and_name_their_metric():
    tags = {
        "loss_nats": "train/loss",
        "val_loss_nats": "val/loss",
        "gate_cmp_mean_layer_3": "gates/cmp_mean_layer_3",
        "selected_overlap": "selection/overlap",
        "tokens": "train/tokens",
        "step_time_ms_rank_1": "time/step_time_ms_rank_1",
        "memory_reserved_mib": "memory/reserved_mib",
    }
    assert {name: tensorboard_tag(name) for name in tags} == tags
    assert [metric_of_tag(tensorboard_tag(name)) for name in METRICS] == [*METRICS]
    assert [metric_of_tag(name) for name in METRICS] == [*METRICS]  # older runs


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3}', '{"step": 3, "loss_nats": 1.0', '{"st\n', "\x00\x00"]
)
def test_a_line_that_a_crash_left_unfinished_is_set_aside(folder, torn):
    write(folder, *losses(1.0, 2.0))
    with folder.metrics_jsonl.open("a") as file:
        file.write(torn)
    assert read(folder) == losses(1.0, 2.0)
    write(folder, *losses(3.0, first=3), after=2)
    assert read(folder) == losses(1.0, 2.0, 3.0)
    assert (folder.path / "metrics.set-aside-1.jsonl").read_text() == torn


def test_rows_are_set_aside_before_the_record_shrinks(folder, monkeypatch):
    """The process ends after the first of two files; one of the rows is out of order."""
    write(folder, *losses(1.0, 2.0, 3.0))
    first, *others = folder.metrics_jsonl.read_bytes().splitlines(keepends=True)
    folder.metrics_jsonl.write_bytes(b"".join([*others, first]))
    written = list[Path]()

    def write_once(path, text):
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


def test_rows_wait_while_the_disk_is_full(folder, monkeypatch, caplog):
    writer, expected = MetricsWriter(folder), losses(1.0, 2.0, 3.0)
    with monkeypatch.context() as patch:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patch.setattr(AppendedFile, "append", full)
        for row in expected[:2]:
            writer.write(row)
    assert read(folder) == []
    assert "2 rows of metrics could not be written and wait in memory" in caplog.text
    writer.write(expected[2])
    writer.close()
    assert read(folder) == expected
    assert folder.metrics_csv.read_text().count("\n") == 4
    assert shown(folder) == [tuple(row.values()) for row in expected]


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
def test_a_line_that_is_no_row_is_an_error_before_the_end(folder, line):
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


def test_the_document_lists_exactly_the_metrics_there_are_and_names_carry_their_unit():
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    table = [cells for line in lines if len(cells := line.strip("| ").split(" | ")) == 3]
    assert [name for name, _, _ in table] == [f"`{name}`" for name in METRICS]
    assert len(set(METRICS)) == len(METRICS)
    for name, unit, _ in table:
        assert name.strip("`").endswith(SUFFIXES[unit]), name
