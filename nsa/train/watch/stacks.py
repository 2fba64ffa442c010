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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from nsa.train.watch.watchdog_process import STACKS_AT_ANY_PRICE


@contextmanager
def stacks_on_demand(path: Path) -> Iterator[None]:
    """Within, SIGUSR1 appends the stacks of all threads to a file.

    A thread writes them, told by the C part of Python's signal handling, so they come while the
    main thread is in C code. Reading them in a signal handler, as :mod:`faulthandler` does, ends a
    process whose threads run with a segmentation fault once in some hundred times. It is left for a
    process that does not answer because C code keeps the interpreter: ``STACKS_AT_ANY_PRICE``, for
    the watchdog.
    """
    file = path.open("ab", buffering=0)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    threading.Thread(target=_answer, args=(reads, file), name="stacks", daemon=True).start()
    # Without a handler of Python's the thread is not told.
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.siginterrupt(signal.SIGUSR1, False)
    descriptor = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    faulthandler.register(STACKS_AT_ANY_PRICE, file, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(STACKS_AT_ANY_PRICE)
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGUSR1, handler)
        os.close(writes)  # which ends the thread; it closes the file


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
    parts = [time.strftime("--- %Y-%m-%d %H:%M:%S\n")]
    for thread in threading.enumerate():
        if thread.ident is not None and thread is not threading.current_thread():
            stack = traceback.StackSummary.extract(iter(_frames_of(thread.ident)))
            parts += [f"Thread {thread.name} (most recent call last):\n", *reversed(stack.format())]
    return "".join(parts)


def _frames_of(ident: int) -> list[tuple[FrameType, int]]:
    """Frames of a thread and their lines, innermost first.

    The thread may run on while they are read. A generator that yields then has no caller any more,
    and the stack would end there: it is read again.
    """
    frames: list[tuple[FrameType, int]] = []
    for _ in range(100):
        frame = sys._current_frames().get(ident)
        frames = [] if frame is None else list(traceback.walk_stack(frame))
        if not frames or not frames[-1][0].f_code.co_flags & inspect.CO_GENERATOR:
            break
    return frames
