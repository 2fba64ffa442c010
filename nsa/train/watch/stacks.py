"""Stacks of all threads of this process, written when a signal asks for them."""

from __future__ import annotations

import faulthandler
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO

from nsa.train.watch.watchdog_process import STACKS_AT_ANY_PRICE


class StacksOnDemand:
    """While entered, SIGUSR1 writes the stacks of all threads to a file.

    A thread writes them, told by the C part of Python's signal handling: so they come while the
    main thread is in C code. Reading them in a signal handler, as :mod:`faulthandler` does, ends a
    process whose threads run with a segmentation fault once in some hundred times. It is left for a
    process that does not answer because C code keeps the interpreter: ``STACKS_AT_ANY_PRICE``, for
    the watchdog.

    Args:
        path: the file, to which is appended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: tuple[Any, int] = (None, -1)
        self._file: BinaryIO | None = None
        self._writes = -1

    def __enter__(self) -> StacksOnDemand:
        self._file = self._path.open("ab", buffering=0)
        reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        threading.Thread(
            target=_answer, args=(reads, self._file), name="stacks", daemon=True
        ).start()
        # one of Python's has to be there, or the thread is not told
        handler = signal.signal(signal.SIGUSR1, _nothing)
        signal.siginterrupt(signal.SIGUSR1, False)
        self._before = handler, signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        faulthandler.register(STACKS_AT_ANY_PRICE, self._file, all_threads=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        faulthandler.unregister(STACKS_AT_ANY_PRICE)
        handler, descriptor = self._before
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGUSR1, handler)
        os.close(self._writes)  # which ends the thread; it closes the file


def _nothing(number: int, frame: FrameType | None) -> None:
    """The thread answers."""


def _answer(reads: int, file: BinaryIO) -> None:
    """Write the stacks for every SIGUSR1 among the signals whose numbers arrive."""
    with file:
        while numbers := os.read(reads, 512):
            if signal.SIGUSR1 in numbers:
                with suppress(OSError):  # of a full disk
                    file.write(all_stacks().encode())
    os.close(reads)


def all_stacks() -> str:
    """Stacks of all threads but the calling one, each with its innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [time.strftime("--- %Y-%m-%d %H:%M:%S\n")]
    for ident in sys._current_frames():
        if ident != threading.get_ident():
            stack = traceback.StackSummary.extract(iter(_frames_of(ident)))
            parts += [
                f"Thread {names.get(ident, ident)} (most recent call last):\n",
                *reversed(stack.format()),
            ]
    return "".join(parts)


def _frames_of(ident: int) -> list[tuple[FrameType, int]]:
    """Frames of a thread and their lines, innermost first.

    The thread may run on while they are read. A generator that yields then has no caller any more,
    and the stack would end there: it is read again.
    """
    frames: list[tuple[FrameType, int]] = []
    for _ in range(100):
        frames = (
            list(traceback.walk_stack(frame)) if (frame := sys._current_frames().get(ident)) else []
        )
        if not frames or not frames[-1][0].f_code.co_flags & inspect.CO_GENERATOR:
            break
    return frames
