"""Requests to a running process: signals, the halt file, the end of torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

if sys.platform == "win32":  # where this module is imported and nothing trains
    STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
    CHECKPOINT_SIGNAL = signal.SIGTERM
else:
    # A closed terminal sends the last one.
    STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    CHECKPOINT_SIGNAL = signal.SIGUSR2
HALT = 255  # value of `stop` for the halt file; no signal has this number
_LOOK_EVERY_S = 1.0
_PASSED_ON_S = 5.0


class Requests:
    """Context manager that records requests to this process; the trainer reads them between steps.

    The first SIGTERM, SIGINT or SIGHUP, or the halt file, requests a checkpoint and the end of the
    run; a second SIGTERM or SIGINT ends the process at once, without a checkpoint and with exit
    code 128 + its number. SIGHUP stays ignored under ``nohup``. SIGUSR2 requests a checkpoint. The
    end of the torchrun agent, for example by SIGKILL, counts as SIGTERM. The exit restores earlier
    handlers, except in a launched process that was asked to stop.

    Args:
        halt_file: file that ends the run when it appears; None for processes that do not check it.
        launched: whether a launcher started this process. A cluster signals both, and the launcher
            passes its signal on: signals within seconds of the first one are the same request.
        agent: process ID of the torchrun agent that started this process; 0 without one.
        listens: whether signals are handled; otherwise they end the process at once.

    Attributes:
        stop: number of the signal, :data:`HALT` for the file, 0 without a request.
        checkpoint: whether a checkpoint was requested; the trainer sets it to False.
    """

    def __init__(
        self,
        halt_file: Path | None = None,
        *,
        launched: bool = False,
        agent: int = 0,
        listens: bool = True,
    ) -> None:
        self.stop = 0
        self.checkpoint = False
        self._listens = listens
        self._halt_file, self._looked = halt_file, -_LOOK_EVERY_S
        self._agent = agent
        self._same_s, self._stopped = _PASSED_ON_S if launched else 0.0, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def look(self) -> int:
        """Check the halt file and the agent, at most once a second: file systems may be slow.

        Returns:
            :attr:`stop`.
        """
        now = time.monotonic()
        if self.stop or now - self._looked < _LOOK_EVERY_S:
            return self.stop
        self._looked = now
        if self._halt_file is not None and self._halt_file.exists():
            self.stop = HALT
        elif self._agent and os.getppid() != self._agent:
            _say(f"torchrun (process {self._agent}) is gone")
            os.kill(os.getpid(), signal.SIGTERM)
        return self.stop

    def __enter__(self) -> Requests:
        for number in (*STOP_SIGNALS, CHECKPOINT_SIGNAL) if self._listens else ():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        # The launcher may still pass the signal on.
        is_leaving = self._same_s > 0 and self.stop not in (0, HALT)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if is_leaving else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == CHECKPOINT_SIGNAL:
            self.checkpoint = True
            _say(f"{name} received: a checkpoint after this step")
        elif self.stop in (0, HALT):
            self.stop, self._stopped = number, time.monotonic()
            then = "finishing this step, then a checkpoint; send it again to leave at once"
            _say(f"{name} received: {then}")
        # A closed terminal and its shell both send SIGHUP.
        elif number != signal.SIGHUP and time.monotonic() - self._stopped >= self._same_s:
            _say(f"{name} again: leaving at once, without a checkpoint")
            os._exit(128 + number)


def _say(line: str) -> None:
    with suppress(OSError):  # a closed terminal
        # Printing through Python's buffers in a handler may raise.
        os.write(2, f"{line}\n".encode())
