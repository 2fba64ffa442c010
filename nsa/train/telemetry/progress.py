"""Reports of a run: a progress bar on a terminal, lines elsewhere, and ``log.txt``."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from nsa.errors import UserError
from nsa.files import AppendedFile
from nsa.terminal import Terminal, visible
from nsa.train.telemetry.metrics import Value

_LOGGER = logging.getLogger("nsa")


class RunReport:
    """Context manager that sends the package's log, including metrics, to the user and to files.

    Events and warnings are also written to ``events.jsonl``. A full disk loses lines of these files
    and nothing else.

    Args:
        log: file to which every line is appended with its time. ``events.jsonl`` is in the same
            folder. None in processes other than the main one, which report only errors.
        steps: optimizer steps of the run.
        stream: output for the user; None means standard output. On a terminal a bar shows the
            newest row and lines are printed above it; elsewhere each row is a line.
        buffered: whether nothing is written to the files before :meth:`begin`. A command that is
            refused or interrupted before it leaves no lines in the files.
        quiet: whether the user gets only warnings, errors and the result; the files get every line.
    """

    def __init__(
        self,
        log: Path | None,
        steps: int,
        stream: TextIO | None = None,
        *,
        buffered: bool = False,
        quiet: bool = False,
    ) -> None:
        self._steps, self._level, self._buffered = steps, logging.NOTSET, buffered
        self._bar: _BarHandler | None = None
        self._files: list[_LineFile] = []
        self._handlers: list[logging.Handler] = []
        if log is not None:
            stream = stream or sys.stdout
            raw = stream.raw if isinstance(stream, Terminal) else stream  # the bar moves the cursor
            console = Console(file=cast(TextIO, _LossyStream(raw)))
            has_bar = console.is_terminal and not quiet
            self._bar = _BarHandler(console, steps) if has_bar else None
            lines = logging.StreamHandler(cast(TextIO, _LossyStream(stream)))
            if quiet:
                lines.addFilter(_is_result)
            self._files = [_LineFile(log), _EventFile(log.with_name("events.jsonl"))]
            self._handlers = [*self._files, self._bar or lines]

    def __enter__(self) -> RunReport:
        self._level = _LOGGER.level
        _LOGGER.setLevel(logging.INFO if self._handlers else logging.ERROR)
        if not self._buffered:
            self.begin()
        for handler in self._handlers:
            _LOGGER.addHandler(handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and error is not None:
            if not issubclass(kind, (UserError, KeyboardInterrupt)):
                self.begin()  # a bug: earlier lines may explain it
            # The user sees the error anyway; a reader of the log does not.
            how = ("ended by %s: %s", (kind.__name__, error), (kind, error, traceback))
            for file in self._files:
                file.handle(_LOGGER.makeRecord(_LOGGER.name, logging.ERROR, __file__, 0, *how))
        _LOGGER.setLevel(self._level)
        for handler in self._handlers:
            _LOGGER.removeHandler(handler)
            handler.close()

    def begin(self) -> None:
        """Write the buffered lines, and every later line immediately."""
        for file in self._files:
            file.begin()

    def row(self, row: Mapping[str, Value]) -> None:
        """Report a row of metrics."""
        _LOGGER.info("%s", describe_row(row, self._steps), extra={"row": row})

    def step(self, step: int) -> None:
        """Move the bar, if there is one, to the optimizer step that was just done."""
        if self._bar is not None:
            self._bar.move(step)

    def line(self, text: str, *, event: str | None = None) -> None:
        """Report another line; ``event`` is its kind in ``events.jsonl``."""
        _LOGGER.info("%s", text, extra={} if event is None else {"event": event})


def describe_row(row: Mapping[str, Value], steps: int) -> str:
    """A row of metrics as one line, with units; missing metrics are left out."""
    parts = [form.format(row[name], steps) for name, form in _FORMS.items() if name in row]
    if "eta_s" in row:
        parts.append(f"ETA {timedelta(seconds=round(float(row['eta_s'])))}")
    return " | ".join(parts)


_FORMS = {
    "step": "step {}/{}",
    "data_synthetic": "SYNTHETIC DATA",
    "loss_nats": "loss {:.4f} nats/token",
    "bits_per_byte": "{:.3f} bits/byte",
    "val_bits_per_byte": "val {:.4f} bits/byte",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "grad norm {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_time_ms": "step {:.0f} ms",
    "mfu": "MFU {:.1%}",
    "memory_reserved_mib": "GPU {:,.0f} MiB",
}


def _is_result(record: logging.LogRecord) -> bool:
    """Whether a quiet run prints the record."""
    return record.levelno >= logging.WARNING or getattr(record, "event", "") in _RESULTS


_RESULTS = ("best", "finish", "stop")


class _LossyStream:
    """A text stream that loses text without an error when its terminal or pipe is closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._losing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._losing():
            self._stream.flush()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # A full disk may have room again; a closed terminal or pipe stays closed.
            if error.errno in (errno.EPIPE, errno.EIO):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                # Otherwise flushing the buffers would fail at the end of the process.
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


class _LineFile(logging.Handler):
    """Log file that buffers its lines until :meth:`begin`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._file, self._has_complained, self._begun = AppendedFile(path), False, False
        self._lines: list[bytes] = []

    def begin(self) -> None:
        """Write the buffered lines, and every later line immediately."""
        self._begun = True
        try:
            if self._lines:
                self._file.append(b"".join(self._lines))
        except OSError as error:
            with suppress(OSError):  # a closed terminal
                if not self._has_complained:
                    why = f"{self._file.path} could not be written ({error})"
                    print(f"nsa: {why}; lines are lost", file=sys.stderr)
            self._has_complained = True
        self._lines.clear()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{self.format(record)}\n".encode(errors="replace"))
        if self._begun:
            self.begin()


class _EventFile(_LineFile):
    """A file of events and warnings as JSON: time, kind, step, message."""

    def filter(self, record: logging.LogRecord) -> bool:
        return hasattr(record, "event") or record.levelno >= logging.WARNING

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time_unix_s": round(record.created, 3),
            "kind": getattr(record, "event", record.levelname.lower()),
            "step": getattr(record, "step", None),
            "message": record.getMessage(),
        }
        return json.dumps(event)


class _BarHandler(logging.Handler):
    """A progress bar; other lines, and rows with an evaluation, are printed above it."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            refresh_per_second=2,  # drawing slows down a run on few cores
        )
        self._task: TaskID | None = None  # the bar appears with the first step
        self._steps = steps

    def emit(self, record: logging.LogRecord) -> None:
        row = getattr(record, "row", {})
        if not row or "val_bits_per_byte" in row:
            line = visible(self.format(record))
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if row:
            shown = ("data_synthetic", "loss_nats", "tokens_per_s", "eta_s")
            newest = {name: row[name] for name in shown if name in row}
            self.move(int(row["step"]), description=describe_row(newest, self._steps))

    def move(self, step: int, **more: str) -> None:
        """Show ``step`` as done, with the text of the newest row."""
        if self._task is None:
            self._task = self._progress.add_task("", total=self._steps)
            self._progress.start()
        self._progress.update(self._task, completed=step, **more)  # type: ignore[arg-type]

    def close(self) -> None:
        self._progress.stop()
        super().close()
