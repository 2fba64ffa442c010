"""Metrics of a run, and their rows in JSONL, CSV and TensorBoard.

``docs/metrics.md`` gives the unit and the meaning of each metric.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from nsa.errors import OUTPUT_ERRORS, check
from nsa.files import AppendedFile, read_lines, replace_text
from nsa.train.run_folder import RunFolder

logger = logging.getLogger(__name__)

Value = float | int | bool
Row = dict[str, Value]
_LARGEST = 2**53  # integers of a row are below it, and are exact as floats

# Metrics of every row, in addition to its step.
ALWAYS = (
    "time_unix_s",
    "tokens",
    "loss_nats",
    "step_time_ms",
    "data_time_ms",
    "tokens_per_s",
    "tokens_per_s_total",
)

METRICS = (
    "step",
    "time_unix_s",
    "tokens",
    "sequence_tokens",
    "loss_nats",
    "bits_per_byte",
    "learning_rate",
    "grad_norm",
    "grad_norm_max",
    "nonfinite_steps",
    "step_time_ms",
    "step_time_max_ms",
    "data_time_ms",
    "tokens_per_s",
    "tokens_per_s_total",
    "eta_s",
    "compilations",
    "kernel_compilations",
    "first_step_s",
    "host_time_ms",
    "mfu",
    "memory_allocated_mib",
    "memory_reserved_mib",
    "gpu_step_time_ms",
    "gpu_utilisation_percent",
    "data_synthetic",
    "val_loss_nats",
    "val_bits_per_byte",
    "gate_cmp_mean",
    "gate_slc_mean",
    "gate_win_mean",
    "gate_entropy",
    "gate_collapsed",
    "selected_tokens",
    "selected_min_tokens",
    "selected_max_tokens",
    "selected_distance_tokens",
    "selected_overlap",
    "selected_recall",
    "selected_tiled_calls",
    "selected_gathered_calls",
    "selected_reference_calls",
    "index_loss_nats",
)

# Metrics of a layer; means over the layers have no suffix.
PER_LAYER = re.compile(r"((?:gate|selected|index)_\w+)_layer_\d+")
# Metrics of a process; those of the main one, which writes, are also there without a suffix.
RANK_METRICS = (
    "step_time_ms",
    "data_time_ms",
    "gpu_step_time_ms",
    "gpu_utilisation_percent",
    "memory_allocated_mib",
    "memory_reserved_mib",
)
PER_RANK = re.compile(rf"({'|'.join(RANK_METRICS)})_rank_\d+")
# Groups of TensorBoard's tags by prefixes of names.
_GROUPS = {
    "val_": "val",
    "gate_": "gates",
    "selected_": "selection",
    "index_": "index",
    "memory_": "memory",
}
_TRAIN = re.compile("loss|bits_per_byte|learning_rate|grad_norm|nonfinite_|tokens$|data_synthetic")


def tensorboard_tag(name: str) -> str:
    """Tag of a metric in TensorBoard: its group and name, for example ``train/loss``."""
    name = name.replace("loss_nats", "loss")
    for prefix, group in _GROUPS.items():
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}"
    return f"{'train' if _TRAIN.match(name) else 'time'}/{name}"


def metric_of_tag(tag: str) -> str:
    """Metric of a tag in TensorBoard; tags without a group, of older runs, are names."""
    group, slash, name = tag.partition("/")
    prefix = next((prefix for prefix, one in _GROUPS.items() if one == group), "")
    return f"{prefix}{'loss_nats' if name == 'loss' else name}" if slash else tag


class MetricsWriter:
    """Writes each row to ``metrics.jsonl``, ``metrics.csv`` and TensorBoard.

    ``metrics.jsonl`` is the record: each row is one appended line, which the operating system has
    when :meth:`write` returns. ``metrics.csv`` contains the same rows. A new metric becomes its
    last column: the file is rewritten from the record with empty cells above, and columns never
    move. A missing metric has no key and an empty cell, never 0. Values that are not finite are
    written as ``nan``, ``inf`` or ``-inf``, in quotes in the JSONL. TensorBoard's tags are those
    of :func:`tensorboard_tag`.

    While the disk is full, rows stay in memory, a warning is logged, and each later row tries to
    write them all.

    Args:
        folder: run folder. Its rows stay; an unfinished last line is set aside as in
            :meth:`rewind`.

    Raises:
        UserError: the record cannot be read.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._jsonl = AppendedFile(folder.metrics_jsonl)
        self._csv = AppendedFile(folder.metrics_csv)
        self._tensorboard: SummaryWriter | None = None
        self._last_step = self._begun_after = -1
        # The writers, each with the rows that it still has to write. The record comes first, since
        # the CSV is made from it.
        self._outputs: list[tuple[Callable[[Sequence[Row]], None], list[Row]]] = [
            (write, []) for write in (self._write_jsonl, self._write_csv, self._write_tensorboard)
        ]
        folder.metrics_jsonl.touch()
        self._start_after(math.inf)

    def rewind(self, step: int) -> None:
        """Continue after ``step``: later rows move to ``metrics.set-aside-<n>.jsonl``.

        Args:
            step: last step whose row stays. Call it before the first :meth:`write`.
        """
        assert self._tensorboard is None, "rewind after write"
        self._start_after(step)

    def write(self, row: Mapping[str, Value]) -> None:
        """Write one row, to which ``time_unix_s`` is added.

        Args:
            row: names of :data:`METRICS` to numbers; ``step`` must be above the step of the row
                before.

        Raises:
            UserError: a name is not in :data:`METRICS`, or the step does not rise.
        """
        _check_row(row, self._last_step)
        row = {"step": row["step"], "time_unix_s": round(time.time(), 3), **row}
        self._last_step = int(row["step"])
        for _, rows in self._outputs:
            rows.append(row)
        self._write_waiting()

    def close(self) -> None:
        """Try a last time to write rows that a full disk keeps waiting."""
        self._write_waiting()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write_waiting(self) -> None:
        try:
            for write, rows in self._outputs:
                if rows:
                    write(rows)
                    rows.clear()
        except OSError as error:
            number = max(len(rows) for _, rows in self._outputs)
            what = "%d rows of metrics could not be written and wait in memory (%s)"
            logger.warning(what, number, error)

    def _start_after(self, step: float) -> None:
        _set_aside_after(self._jsonl.path, step)
        rows = read_metrics(self._jsonl.path)
        self._last_step = self._begun_after = int(rows[-1]["step"]) if rows else -1
        self._rewrite_csv(names(rows))

    def _write_jsonl(self, rows: Sequence[Row]) -> None:
        self._jsonl.append(b"".join(map(_to_line, rows)))

    def _write_csv(self, rows: Sequence[Row]) -> None:
        columns = list(dict.fromkeys([*self._columns, *names(rows)]))
        if columns == self._columns and self._csv.path.exists():
            self._csv.append(csv_text(columns, rows).encode())
        else:
            self._rewrite_csv(columns)

    def _rewrite_csv(self, columns: list[str]) -> None:
        head = ",".join(columns) + "\r\n" if columns else ""
        text = csv_text(columns, read_metrics(self._jsonl.path))
        replace_text(self._csv.path, head + text)
        self._columns = columns

    def _write_tensorboard(self, rows: Sequence[Row]) -> None:
        try:
            if self._tensorboard is not None and not self._folder.tensorboard.is_dir():
                self._tensorboard.close()  # its thread would fail
                self._tensorboard, self._begun_after = None, int(rows[0]["step"]) - 1
            if self._tensorboard is None:
                # From this step on TensorBoard hides rows of earlier files, which were set aside.
                first = self._begun_after + 1
                self._tensorboard = SummaryWriter(self._folder.tensorboard, purge_step=first)
            for row in rows:
                for name, value in numbers(row, "step", "time_unix_s").items():
                    tag = tensorboard_tag(name)
                    self._tensorboard.add_scalar(tag, value, row["step"], row["time_unix_s"])
            self._tensorboard.flush()
        except OSError:  # the writer cannot continue after it
            self._tensorboard, self._begun_after = None, int(rows[0]["step"]) - 1
            raise
        except OUTPUT_ERRORS as error:  # for example a path that is not UTF-8
            self._outputs.pop()
            logger.warning("tensorboard: left out from here on (%s)", error)


def numbers(row: Row, *without: str) -> dict[str, float]:
    """Values of a row as floats, except the metrics ``without``."""
    return {name: float(value) for name, value in row.items() if name not in without}


def csv_text(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows of the CSV without its header; booleans are spelled as in JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    for row in rows:
        writer.writerow({x: str(y).lower() if isinstance(y, bool) else y for x, y in row.items()})
    return text.getvalue()


def names(rows: Sequence[Row]) -> list[str]:
    """Names of all metrics in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _check_row(row: Mapping[str, Value], last_step: int) -> None:
    rule = "be in nsa.train.telemetry.metrics.METRICS"
    for name in row:
        part = PER_LAYER.fullmatch(name) or PER_RANK.fullmatch(name)
        is_known = (part[1] if part else name) in METRICS
        check(is_known, "names", rule, name, "Add it there and in docs/metrics.md.")
    step = row.get("step")
    rises = isinstance(step, int) and step > last_step
    check(rises, "step", f"be an integer above {last_step}", step)


def _to_line(row: Row) -> bytes:
    finite = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return f"{json.dumps(finite, allow_nan=False)}\n".encode()


def read_metrics(path: str | Path, *needed: str) -> list[Row]:
    """Read the rows of a ``metrics.jsonl``, oldest first; none without a file.

    An unfinished last line is left out.

    Args:
        path: the file.
        needed: metrics that each row must have, in addition to its step.

    Raises:
        UserError: a line before the last one is not a row.
    """
    return [row for _, row in lines_and_rows(Path(path), *needed) if row is not None]


def lines_and_rows(path: Path, *needed: str) -> list[tuple[bytes, Row | None]]:
    """Each line with its row, see :func:`nsa.train.run_folder.read_lines`."""
    what = f"a row of metrics{', '.join(needed) and ' with '}{', '.join(needed)}"

    def as_row(values: Any) -> Row | None:
        row = _as_row(values)
        return row if row is not None and row.keys() >= {*needed} else None

    return read_lines(path, what, as_row)


def _as_row(values: Any) -> Row | None:
    """Metrics by name; None if a value has the wrong type or size."""
    if not isinstance(values, dict):
        return None
    row = {x: float(y) if y in ("nan", "inf", "-inf") else y for x, y in values.items()}
    fits = all(name.isascii() and isinstance(x, int | float) for name, x in row.items())
    fits = fits and all(abs(x) < _LARGEST for x in row.values() if isinstance(x, int))
    counts = (row.get("step"), row.get("tokens", 0))
    return row if fits and all(type(count) is int for count in counts) else None


def _set_aside_after(path: Path, step: float) -> None:
    """Move rows after ``step`` and an unfinished last line to another file."""
    kept, others = list[bytes](), list[bytes]()
    for line, row in lines_and_rows(path):
        (kept if row is not None and row["step"] <= step else others).append(line)
    if not others:
        return
    number = 1
    while (target := path.with_name(f"{path.stem}.set-aside-{number}{path.suffix}")).exists():
        number += 1
    # The copy is complete before the record shrinks: a crash between the two duplicates rows and
    # loses none.
    replace_text(target, b"".join(others))
    replace_text(path, b"".join(kept))
