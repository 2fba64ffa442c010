"""SIGTERM and SIGINT: the first asks the run to checkpoint and leave, the second ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, turns the first signal into ``received`` and lets the second end the process.

    The second one leaves with exit code 128 + its number and saves nothing. Earlier handlers come back on leaving.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.received is not None

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            self._say(f"{name} again: leaving at once, without a checkpoint")
            os._exit(128 + number)
        self.received = signal.Signals(number)
        self._say(f"{name} received: finishing this step, then a checkpoint; send it again to leave at once")

    @staticmethod
    def _say(line: str) -> None:
        os.write(2, f"{line}\n".encode())  # printing through Python's buffers inside a handler may raise
