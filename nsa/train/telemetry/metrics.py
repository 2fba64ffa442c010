"""Metrics of a run: which there are, in what unit, and how their rows reach JSONL, CSV and TensorBoard.

``docs/metrics.md`` explains the same list to readers of a run; a test keeps the two equal.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from nsa.errors import check, fail
from nsa.train.run_folder import AppendedFile, RunFolder, replace_text

logger = logging.getLogger(__name__)

Value = float | int | bool | str
Row = dict[str, Value]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: name in every output.
        unit: unit of the value, ``1`` for a plain number.
        meaning: what it says, a phrase.
    """

    name: str
    unit: str
    meaning: str


METRICS = (
    Metric("step", "steps", "optimizer steps done since the beginning of the run; each stands once"),
    Metric("time_unix_s", "s", "wall clock when the row was written, counted from 1970-01-01 UTC"),
    Metric("tokens", "tokens", "tokens trained on since the beginning of the run"),
    Metric("loss_nats", "nats/token", "training cross-entropy, mean over the targets since the row before"),
    Metric("bits_per_byte", "bits/byte", "the same loss over the bytes of text that these targets spell"),
    Metric("learning_rate", "1", "learning rate of AdamW in the last step"),
    Metric("grad_norm", "1", "Euclidean norm of the gradient before clipping, mean over the finite steps since the row before"),
    Metric("grad_norm_max", "1", "the largest of these norms"),
    Metric("nonfinite_steps", "steps", "steps whose loss or gradient was not finite, since the beginning of the run"),
    Metric("step_time_ms", "ms", "time of an optimizer step, mean since the row before"),
    Metric("step_time_max_ms", "ms", "longest step by the device's clock; absent in the first 5 steps of a process"),
    Metric("data_time_ms", "ms", "the part of it spent waiting for the batches"),
    Metric("tokens_per_s", "tokens/s", "training speed since the row before, without evaluations and checkpoints"),
    Metric("tokens_per_s_total", "tokens/s", "training speed since the beginning of the run, everything included"),
    Metric("eta_s", "s", "expected time to the last step at the speed of the whole run"),
    Metric("compilations", "1", "graphs compiled and CUDA graphs captured since the process began"),
    Metric("kernel_compilations", "1", "Triton kernels compiled or loaded; absent on the CPU"),
    Metric("first_step_s", "s", "set-up of the trainer and first step; in a process's first row"),
    Metric("host_time_ms", "ms", "the host's time to issue a step, mean; absent on the CPU"),
    Metric("mfu", "1", "model FLOPs utilisation, a share of the device's peak; absent where that peak is not known"),
    Metric("memory_allocated_mib", "MiB", "largest GPU memory in tensors since the process began; absent on the CPU"),
    Metric("memory_reserved_mib", "MiB", "largest GPU memory held by the allocator since then; absent on the CPU"),
    Metric("gpu_step_time_ms", "ms", "time from a step's first kernel on the GPU to its last, mean; absent on the CPU"),
    Metric("gpu_utilisation_percent", "%", "recent share of time with a kernel on the GPU; absent where it cannot be asked"),
    Metric("data_synthetic", "1", "true where the run trains on random numbers and not on text; absent otherwise"),
    Metric("val_loss_nats", "nats/token", "cross-entropy on the validation windows, mean over their targets"),
    Metric("val_bits_per_byte", "bits/byte", "the same over the bytes of validation text that these targets spell"),
    Metric("gate_cmp_mean", "1", "gate of the compressed branch in the step, mean over tokens and heads"),
    Metric("gate_slc_mean", "1", "gate of the selected branch, the same"),
    Metric("gate_win_mean", "1", "gate of the window, the same"),
    Metric("gate_entropy", "1", "entropy of the gates as shares of their sum, mean; 1 means that all branches weigh alike"),
    Metric("gate_collapsed", "1", "share of the layers in which a branch is dead or all gates weigh alike; of a layer 0 or 1"),
    Metric("selected_tokens", "tokens", "keys in the selected blocks that a query sees, mean over queries and KV heads"),
    Metric("selected_min_tokens", "tokens", "the fewest, of queries with tokens of n blocks before them; absent without any"),
    Metric("selected_max_tokens", "tokens", "the most, of these queries"),
    Metric("selected_distance_tokens", "tokens", "how far before their query these keys are, mean over the keys"),
    Metric("selected_overlap", "1", "share of a query's blocks that the query before it selected as well"),
    Metric("selected_tiled_calls", "calls", "forward passes of layers in which the tiled algorithm ran"),
    Metric("selected_gathered_calls", "calls", "those in which the gathered algorithm ran"),
    Metric("selected_reference_calls", "calls", "those in which eager PyTorch ran"),
)  # fmt: skip

_NAMES = frozenset(metric.name for metric in METRICS)
# the means over the layers stand under the name alone
PER_LAYER = re.compile(r"((?:gate|selected)_\w+)_layer_\d+")
# Of a run of several processes; those of the main one, which writes, stand under the name alone as
# well.
RANK_METRICS = (
    "step_time_ms", "data_time_ms", "gpu_step_time_ms", "gpu_utilisation_percent",
    "memory_allocated_mib", "memory_reserved_mib",
)  # fmt: skip
PER_RANK = re.compile(rf"({'|'.join(RANK_METRICS)})_rank_\d+")


class MetricsWriter:
    """Writes each row to ``metrics.jsonl``, ``metrics.csv`` and TensorBoard.

    ``metrics.jsonl`` is the record: a row is one appended line, with the operating system when
    :meth:`write` returns. ``metrics.csv`` holds the same rows. A metric that appears for the first
    time becomes its last column, for which the file is written anew from the record with earlier
    cells empty, so columns never change place. A metric that a row does not have is absent (no key,
    an empty cell), never 0. A value that is not finite stands as ``nan``, ``inf`` or ``-inf``, in
    quotes in the JSONL.

    While the disk is full, rows wait in memory, a warning says so, and every later row tries again
    to write them all.

    Args:
        folder: run folder. Rows that are there stay; a last line that a crash tore is set aside as
            in :meth:`rewind`.

    Raises:
        UserError: the record cannot be read.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._jsonl, self._csv = (
            AppendedFile(folder.metrics_jsonl),
            AppendedFile(folder.metrics_csv),
        )
        self._events = folder.tensorboard
        self._tensorboard: AppendedFile | None = None
        self._last_step = self._begun_after = -1
        self._columns: list[str] = []
        # How rows reach each output, and which rows still have to; the record comes first, since
        # the CSV is made from it.
        self._outputs: list[tuple[Callable[[Sequence[Row]], None], list[Row]]] = [
            (write, []) for write in (self._write_jsonl, self._write_csv, self._write_events)
        ]
        folder.metrics_jsonl.touch()
        self._start_after(None)

    def rewind(self, step: int) -> None:
        """Continue after ``step``: rows beyond it move to ``metrics.set-aside-<n>.jsonl``, so that each step stands once.

        Args:
            step: last step whose row stays; to be called before the first :meth:`write`.
        """
        assert self._tensorboard is None, "rewind after write"
        self._start_after(step)

    def write(self, row: Mapping[str, Value]) -> None:
        """Write one row, to which ``time_unix_s`` is added.

        Args:
            row: names of :data:`METRICS` to numbers or text; ``step`` must be there and above that
                of the row before.

        Raises:
            UserError: for a name that is not in :data:`METRICS`, or a step that does not rise.
            TypeError: for a value that is no plain number or text, a tensor for example.
        """
        _check_row(row, self._last_step)
        row = {"step": row["step"], "time_unix_s": round(time.time(), 3), **row}
        self._last_step = int(row["step"])
        for _, rows in self._outputs:
            rows.append(row)
        self._write_waiting()

    def close(self) -> None:
        """Try a last time to write what a full disk has kept waiting."""
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            for write, rows in self._outputs:
                if rows:
                    write(rows)
                    rows.clear()
        except OSError as error:
            waiting = max(len(rows) for _, rows in self._outputs)
            logger.warning(
                "%d rows of metrics could not be written and wait in memory (%s)", waiting, error
            )

    def _start_after(self, step: int | None) -> None:
        _set_aside_after(self._jsonl.path, step)
        rows = read_metrics(self._jsonl.path)
        self._last_step = self._begun_after = int(rows[-1]["step"]) if rows else -1
        self._rewrite_csv(_names(rows))

    def _write_jsonl(self, rows: Sequence[Row]) -> None:
        self._jsonl.append("".join(_to_line(row) for row in rows).encode())

    def _write_csv(self, rows: Sequence[Row]) -> None:
        columns = list(dict.fromkeys([*self._columns, *_names(rows)]))
        if columns != self._columns:
            self._rewrite_csv(columns)
            return
        text = io.StringIO()
        csv.DictWriter(text, columns).writerows(map(_cells, rows))
        self._csv.append(text.getvalue().encode())

    def _rewrite_csv(self, columns: list[str]) -> None:
        text = io.StringIO()
        if columns:
            writer = csv.DictWriter(text, columns)
            writer.writeheader()
            writer.writerows(map(_cells, read_metrics(self._jsonl.path)))
        replace_text(self._csv.path, text.getvalue())
        self._columns = columns

    def _write_events(self, rows: Sequence[Row]) -> None:
        content = io.BytesIO()
        records = RecordWriter(content)
        file = self._tensorboard
        if file is None:
            self._events.mkdir(exist_ok=True)
            file = AppendedFile(self._events / _event_file_name())
            wall_time = float(rows[0]["time_unix_s"])
            records.write(
                Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString()
            )
            # TensorBoard hides what earlier processes wrote from this step on: the rows that were
            # set aside.
            log = SessionLog(status=SessionLog.START)
            records.write(
                Event(
                    wall_time=wall_time, step=self._begun_after + 1, session_log=log
                ).SerializeToString()
            )
        for row in rows:
            scalars = {
                name: float(value)
                for name, value in row.items()
                if not isinstance(value, str) and name not in ("step", "time_unix_s")
            }
            summary = Summary(
                value=[
                    Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()
                ]
            )
            event = Event(
                wall_time=float(row["time_unix_s"]), step=int(row["step"]), summary=summary
            )
            records.write(event.SerializeToString())
        file.append(content.getvalue())
        self._tensorboard = file


def _event_file_name() -> str:
    """TensorBoard reads event files in the order of their names: by time."""
    now = time.time_ns()
    return f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{os.getpid()}"


def _names(rows: Sequence[Row]) -> list[str]:
    """Names of all metrics in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _check_row(row: Mapping[str, Value], last_step: int) -> None:
    for name, value in row.items():
        hint = "Add it there and in docs/metrics.md."
        part = PER_LAYER.fullmatch(name) or PER_RANK.fullmatch(name)
        check(
            (part[1] if part else name) in _NAMES,
            "MetricsWriter.write",
            "names",
            "be in nsa.train.telemetry.metrics.METRICS",
            name,
            hint,
        )
        if type(value) not in (int, float, bool, str):
            raise TypeError(
                f"MetricsWriter.write: {name} must be an int, float, bool or str, got {type(value).__name__}"
            )
    step = row.get("step")
    rises = isinstance(step, int) and step > last_step
    check(rises, "MetricsWriter.write", "step", f"be an integer above {last_step}", step)


def _cells(row: Mapping[str, Value]) -> Row:
    """A row for the CSV, in which truth is spelled as in JSON."""
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in row.items()
    }


def _to_line(row: Mapping[str, Value]) -> str:
    finite = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: str | Path) -> list[Row]:
    """Rows of a ``metrics.jsonl``, oldest first, with values that are not finite as floats again.

    A line that a crash tore at the end of the file is left out.

    Raises:
        UserError: for a line before the end that is no row.
    """
    return [row for _, row in _lines_and_rows(Path(path)) if row is not None]


def _lines_and_rows(path: Path) -> list[tuple[str, Row | None]]:
    """Each line with its row; the row is None for a torn last line."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    found: list[tuple[str, Row | None]] = []
    for number, line in enumerate(lines, start=1):
        row = _parse_line(line)
        if row is None and number < len(lines):
            fail(f"{path}:{number}", "line", "be a row of metrics in JSON", repr(line[:80]))
        found.append((line, row))
    return found


def _parse_line(line: str) -> Row | None:
    if not line.endswith("\n"):
        return None
    try:
        values: Any = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        return None
    return {
        name: float(value) if value in ("nan", "inf", "-inf") else value
        for name, value in values.items()
    }


def _set_aside_after(path: Path, step: int | None) -> None:
    """Move rows after ``step`` (None: no row) and a torn last line to a file of their own."""
    kept, aside = list[str](), list[str]()
    for line, row in _lines_and_rows(path):
        (kept if row is not None and (step is None or int(row["step"]) <= step) else aside).append(
            line
        )
    if not aside:
        return
    number = 1
    while (target := path.with_name(f"{path.stem}.set-aside-{number}{path.suffix}")).exists():
        number += 1
    # The copy is complete before the record shrinks: a crash between the two leaves rows twice,
    # never none.
    replace_text(target, "".join(aside))
    replace_text(path, "".join(kept))
