"""What a run says while it goes: a progress bar on a terminal, plain lines elsewhere, everything in ``log.txt``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from nsa.train.metrics import Value

_LOGGER = logging.getLogger("nsa")


class RunReport:
    """Context in which everything that the package logs, and each row of metrics, reaches the user and ``log.txt``.

    Args:
        log: file that gets every line, with its time; appended to.
        steps: optimizer steps of the run.
        stream: where the user looks; None means standard output. On a terminal a bar shows the newest row and lines are
            printed above it; elsewhere each row is a line.
    """

    def __init__(self, log: str | Path, steps: int, stream: TextIO | None = None) -> None:
        self._log, self._steps = Path(log), steps
        self._stream = stream or sys.stdout
        self._handlers: list[logging.Handler] = []
        self._level = logging.NOTSET

    def __enter__(self) -> RunReport:
        to_file = logging.FileHandler(self._log, encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        console = Console(file=self._stream)
        to_user = _BarHandler(console, self._steps) if console.is_terminal else logging.StreamHandler(self._stream)
        self._handlers = [to_file, to_user]
        for handler in self._handlers:
            _LOGGER.addHandler(handler)
        self._level = _LOGGER.level
        _LOGGER.setLevel(logging.INFO)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None and error is not None:  # the user sees it anyway; who reads the log later has nothing else
            how = ("ended by %s", (kind.__name__,), (kind, error, traceback))
            self._handlers[0].handle(_LOGGER.makeRecord(_LOGGER.name, logging.ERROR, __file__, 0, *how))
        _LOGGER.setLevel(self._level)
        for handler in self._handlers:
            _LOGGER.removeHandler(handler)
            handler.close()

    def row(self, row: Mapping[str, Value]) -> None:
        """Report a row of metrics."""
        _LOGGER.info("%s", describe_row(row, self._steps), extra={"row": row})

    def line(self, text: str) -> None:
        """Say something else."""
        _LOGGER.info("%s", text)


def describe_row(row: Mapping[str, Value], steps: int) -> str:
    """A row of metrics as one line, with units; metrics that the row does not have are left out."""
    parts = [f"step {row['step']}/{steps}"]
    parts += [form.format(row[name]) for name, form in _FORMS.items() if name in row]
    if "eta_s" in row:
        parts.append(f"ETA {_duration(row['eta_s'])}")
    return " | ".join(parts)


_FORMS = {
    "data_synthetic": "SYNTHETIC DATA",
    "loss_nats": "loss {:.4f} nats/token",
    "bits_per_byte": "{:.3f} bits/byte",
    "val_bits_per_byte": "held out {:.4f} bits/byte",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "grad norm {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_time_ms": "step {:.0f} ms",
    "mfu": "MFU {:.1%}",
    "memory_reserved_mib": "GPU {:,.0f} MiB",
}


def _duration(seconds: Value) -> str:
    return str(timedelta(seconds=round(float(seconds))))


class _BarHandler(logging.Handler):
    """A bar at the bottom of the terminal; other lines, and rows with an evaluation, are printed above it."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            refresh_per_second=2,  # drawing takes time from a run on few cores
        )
        self._task: TaskID | None = None  # the bar appears with the first row
        self._steps = steps

    def emit(self, record: logging.LogRecord) -> None:
        row = getattr(record, "row", None)
        if row is None or "val_bits_per_byte" in row:
            self._progress.console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)
        if row is None:
            return
        if self._task is None:
            self._task = self._progress.add_task("", total=self._steps)
            self._progress.start()
        shown = {name: row[name] for name in ("step", "data_synthetic", "loss_nats", "tokens_per_s", "eta_s") if name in row}
        self._progress.update(
            self._task, completed=int(row["step"]), description=describe_row(shown, self._steps).partition(" | ")[2]
        )

    def close(self) -> None:
        self._progress.stop()
        super().close()
