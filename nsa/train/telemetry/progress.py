"""What a run says while it goes: a progress bar on a terminal, plain lines elsewhere, everything in ``log.txt``."""

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
from nsa.train.run_folder import AppendedFile
from nsa.train.telemetry.metrics import Value

_LOGGER = logging.getLogger("nsa")


class RunReport:
    """Context in which everything that the package logs, and each row of metrics, reaches the user and ``log.txt``.

    Records that tell the history of the run, warnings among them, go to ``events.jsonl`` too. A
    full disk costs lines of these files and nothing else.

    Args:
        log: file that gets every line, with its time; appended to. Beside it lies ``events.jsonl``.
            None in processes that leave reporting to the main one: errors alone are reported then.
        steps: optimizer steps of the run.
        stream: where the user looks; None means standard output. On a terminal a bar shows the
            newest row and lines are printed above it; elsewhere each row is a line.
        held: whether the files get nothing before :meth:`begin`, and nothing ever of a run that was
            refused or interrupted before it: the history of a run knows of no command that never
            became part of it.
    """

    def __init__(
        self, log: Path | None, steps: int, stream: TextIO | None = None, *, held: bool = False
    ) -> None:
        self._log, self._steps, self._held = log, steps, held
        self._stream = cast(TextIO, _UntilNobodyReads(stream or sys.stdout))
        self._handlers: list[logging.Handler] = []
        self._files: list[_LineFile] = []
        self._bar: _BarHandler | None = None
        self._level = logging.NOTSET

    def __enter__(self) -> RunReport:
        self._level = _LOGGER.level
        if self._log is None:
            _LOGGER.setLevel(logging.ERROR)
            return self
        console = Console(file=self._stream)
        self._bar = _BarHandler(console, self._steps) if console.is_terminal else None
        to_user = self._bar or logging.StreamHandler(self._stream)
        self._files = [_LogHandler(self._log), _EventHandler(self._log.with_name("events.jsonl"))]
        self._handlers = [*self._files, to_user]
        if not self._held:
            self.begin()
        for handler in self._handlers:
            _LOGGER.addHandler(handler)
        _LOGGER.setLevel(logging.INFO)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (
            kind is not None and error is not None and self._handlers
        ):  # the user sees it anyway; who reads the log later has nothing else
            how = ("ended by %s: %s", (kind.__name__, error), (kind, error, traceback))
            # a bug: whatever came before it is worth reading
            if not issubclass(kind, (UserError, KeyboardInterrupt)):
                self.begin()
            for file in self._files:
                file.handle(_LOGGER.makeRecord(_LOGGER.name, logging.ERROR, __file__, 0, *how))
        _LOGGER.setLevel(self._level)
        for handler in self._handlers:
            _LOGGER.removeHandler(handler)
            handler.close()

    def begin(self) -> None:
        """Write what was held back: from now on all that is said belongs to the run."""
        for file in self._files:
            file.write_held()

    def row(self, row: Mapping[str, Value]) -> None:
        """Report a row of metrics."""
        _LOGGER.info("%s", describe_row(row, self._steps), extra={"row": row})

    def step(self, step: int) -> None:
        """Move the bar to the optimizer step that was just done; elsewhere than on a terminal nothing is said."""
        if self._bar is not None:
            self._bar.move(step)

    def line(self, text: str, *, event: str | None = None) -> None:
        """Say something else; with ``event``, the kind of it, it belongs to the history of the run."""
        _LOGGER.info("%s", text, extra={} if event is None else {"event": event})


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


class _UntilNobodyReads:
    """A stream of text whose terminal or pipe may go away: from then on it leads nowhere, and the run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._if_it_fails():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._if_it_fails():
            self._stream.flush()

    @contextmanager
    def _if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # and not a full disk, where there may be room again
            if error.errno in (errno.EPIPE, errno.EIO):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                # or what waits in buffers would fail at the end of the process
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


class _LineFile(logging.Handler):
    """A file that gets lines, once they are released, as long as there is room."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file, self._complained = AppendedFile(path), False
        self._held: list[bytes] | None = []

    def write_held(self) -> None:
        """Write the lines that were held back, and each later one as it comes."""
        held, self._held = self._held, None
        if held is not None:
            self._append(b"".join(held))

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="replace")
        if self._held is None:
            self._append(line)
        else:
            self._held.append(line)

    def _append(self, content: bytes) -> None:
        try:
            self._file.append(content)
        except OSError as error:
            if not self._complained:
                with suppress(OSError):  # of a terminal that has gone
                    print(
                        f"nsa: {self._file.path} could not be written ({error}); lines are lost",
                        file=sys.stderr,
                    )
            self._complained = True


class _LogHandler(_LineFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))


class _EventHandler(_LineFile):
    """Records of a kind, and everything from warnings upwards, as JSON: time, kind, step where there is one, message."""

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
        self._task: TaskID | None = None  # the bar appears with the first step
        self._steps = steps

    def emit(self, record: logging.LogRecord) -> None:
        row = getattr(record, "row", None)
        if row is None or "val_bits_per_byte" in row:
            self._progress.console.print(
                self.format(record), markup=False, highlight=False, soft_wrap=True
            )
        if row is None:
            return
        shown = {
            name: row[name]
            for name in ("step", "data_synthetic", "loss_nats", "tokens_per_s", "eta_s")
            if name in row
        }
        self.move(
            int(row["step"]), description=describe_row(shown, self._steps).partition(" | ")[2]
        )

    def move(self, step: int, **more: str) -> None:
        """Show ``step`` as done, and what the newest row says."""
        if self._task is None:
            self._task = self._progress.add_task("", total=self._steps)
            self._progress.start()
        self._progress.update(self._task, completed=step, **more)  # type: ignore[arg-type]

    def close(self) -> None:
        self._progress.stop()
        super().close()
