"""Reports of a run: a bar on a terminal, lines elsewhere, everything in the log."""

from __future__ import annotations

import io
import logging
import os
import pty
import re

import pytest

from nsa.errors import UserError, fail
from nsa.train.telemetry.metrics import Row
from nsa.train.telemetry.progress import RunReport, describe_row

ROW: Row = {
    "step": 20,
    "loss_nats": 2.5,
    "bits_per_byte": 3.5,
    "learning_rate": 3e-4,
    "grad_norm": 0.75,
    "tokens_per_s": 12345.6,
    "step_time_ms": 83.4,
    "mfu": 0.421,
    "eta_s": 3723.4,
    "memory_reserved_mib": 2048.0,
}
LINE = (
    "step 20/500 | loss 2.5000 nats/token | 3.500 bits/byte | lr 3.00e-04 | grad norm 0.75"
    " | 12,346 tokens/s | step 83 ms | MFU 42.1% | GPU 2,048 MiB | ETA 1:02:03"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


def test_a_row_as_a_line_has_units_and_leaves_out_missing_metrics():
    assert describe_row(ROW, 500) == LINE
    row: Row = {"step": 1, "val_bits_per_byte": 2.0, "loss_nats": float("nan")}
    assert describe_row(row, 5) == "step 1/5 | loss nan nats/token | val 2.0000 bits/byte"


def test_plain_lines_without_a_terminal(tmp_path):
    stream = io.StringIO()
    with RunReport(tmp_path / "log.txt", 500, stream) as report:
        report.line("[bold]run folder[/bold] /x/y")
        report.step(1)
        report.row(ROW)
        logging.getLogger("nsa.train.trainer").warning("update left out")
    expected = ["[bold]run folder[/bold] /x/y", LINE, "update left out"]
    assert stream.getvalue().splitlines() == expected
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) "
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [re.sub(time, "", line) for line in lines] == expected


def test_the_log_is_continued_and_contains_the_error_that_ends_the_run(tmp_path):
    before = list(logging.getLogger("nsa").handlers)
    for text in ("first", "second"):
        with RunReport(tmp_path / "log.txt", 5, io.StringIO()) as report:
            report.line(text)
    with pytest.raises(ZeroDivisionError), RunReport(tmp_path / "log.txt", 5, io.StringIO()):
        _ = 1 // 0
    first, second, ending, *traceback = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split()[-1] for line in (first, second)] == ["first", "second"]
    assert ending.endswith("ERROR ended by ZeroDivisionError: integer division or modulo by zero")
    assert (traceback[0][:9], traceback[-1][:9]) == ("Traceback", "ZeroDivis")
    assert logging.getLogger("nsa").handlers == before


def test_a_quiet_run_prints_warnings_and_the_result_even_on_a_terminal(tmp_path):
    stream = Terminal()
    with RunReport(tmp_path / "log.txt", 500, stream, quiet=True) as report:
        report.line("run folder: x", event="start")
        report.step(1)
        report.row(ROW)
        logging.getLogger("nsa.train.trainer").warning("update left out")
        report.line("finished", event="finish")
    assert stream.getvalue() == "update left out\nfinished\n"
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 4


def test_a_bar_on_a_terminal_with_lines_above_it(tmp_path):
    stream = Terminal()
    with RunReport(tmp_path / "log.txt", 500, stream) as report:
        report.line("[bold]model[/bold] \x1b]0;title\x07")
        report.step(1)
        report.row(ROW)
        report.row({**ROW, "step": 40, "val_bits_per_byte": 2.25})
        report.step(57)
    assert r"[bold]model[/bold] \x1b]0;title\x07" in stream.text
    assert "40/500" in stream.text
    assert LINE not in stream.text  # a row without an evaluation only moves the bar
    assert "val 2.2500 bits/byte" in stream.text
    assert LINE in (tmp_path / "log.txt").read_text()
    last = stream.text.rstrip().splitlines()[-1]
    assert "57/500" in last, "the bar moves with every step"
    assert "loss 2.5000 nats/token | 12,346 tokens/s | ETA 1:02:03" in last, "of the newest row"


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_a_run_continues_when_its_terminal_or_pipe_is_closed(tmp_path, is_terminal):
    """The rows reach the log, and no error is raised."""
    reads, writes = pty.openpty() if is_terminal else os.pipe()
    with (
        open(writes, "w", encoding="utf-8") as stream,
        RunReport(tmp_path / "log.txt", 500, stream) as report,
    ):
        assert stream.isatty() == is_terminal
        report.row(ROW)
        os.close(reads)
        for step in (40, 60):
            report.line(f"line {step}")
            report.row({**ROW, "step": step, "val_bits_per_byte": 2.25})
    assert (tmp_path / "log.txt").read_text().count("nats/token") == 3


def test_buffered_lines_reach_the_files_in_order_or_never(tmp_path):
    log = tmp_path / "log.txt"
    with RunReport(log, 5, io.StringIO(), buffered=True) as report:
        report.line("never written", event="start")
    with pytest.raises(UserError), RunReport(log, 5, io.StringIO(), buffered=True):
        fail("x", "be y", "z")
    assert list(tmp_path.iterdir()) == []
    with RunReport(log, 5, stream := io.StringIO(), buffered=True) as report:
        report.line("first", event="start")
        assert stream.getvalue() == "first\n"
        assert not log.exists()
        report.begin()
        report.line("second")
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["first", "second"]
    assert (tmp_path / "events.jsonl").read_text().count("first") == 1
