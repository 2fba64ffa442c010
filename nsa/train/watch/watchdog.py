"""The watchdog as a training process sees it: signs of life, and stacks on demand."""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from torch._dynamo.callback import callback_handler

from nsa.train.run_folder import RunFolder
from nsa.train.watch import watchdog_process
from nsa.train.watch.watchdog_process import BEAT_SIZE, Beat, Watched

logger = logging.getLogger(__name__)

# A first step compiles, reads data for the first time and sets up communication.
STARTING_LIMIT_S = 1800.0
CHECKPOINT_LIMIT_S, SLOW_DISK = 600.0, 10e6  # bytes a second
SLOWER = 10  # times as long as the last step, or the last of its phase, anything may take


def checkpoint_limit_s(parameters: int) -> float:
    """Longest time that a checkpoint of so many parameters, each with two moments, may take."""
    return CHECKPOINT_LIMIT_S + 12 * parameters / SLOW_DISK


class Watchdog:
    """While entered, a second process reports and ends this one when it is silent for too long.

    SIGUSR1 makes this process write the stacks of all its threads to ``stacks/rank-<rank>.txt`` in
    the run folder, see :func:`stacks_on_demand`.

    Args:
        folder: run folder.
        rank: of this process.
        stall_s: longest silence inside a step, seconds; 0 starts no second process.
    """

    def __init__(self, folder: RunFolder, rank: int, stall_s: float) -> None:
        self._folder, self._rank, self._stall_s = folder, rank, stall_s
        self._path = folder.stacks / f"rank-{rank}.txt"
        self._memory: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._last = Beat(0, 0, "start", STARTING_LIMIT_S, 0.0)
        self._interrupted = self._last  # by a compilation
        self._began = time.monotonic()
        self._took: dict[str, float] = {}  # seconds, the last of each phase
        self._on_exit = ExitStack()

    def __enter__(self) -> Watchdog:
        self._folder.stacks.mkdir(exist_ok=True)
        self._on_exit.enter_context(stacks_on_demand(self._path))
        # It would end a run that is not yet ready for it.
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._on_exit.callback(signal.signal, signal.SIGUSR2, before)
        if self._stall_s > 0:
            self._beats = self._on_exit.enter_context(tempfile.TemporaryFile())
            # Its page exists from now on, whatever happens to the disk.
            self._beats.write(b"\0" * BEAT_SIZE)
            self._beats.flush()
            self._memory = mmap.mmap(self._beats.fileno(), BEAT_SIZE)
            self.beat("start", 0, STARTING_LIMIT_S)
            self._process = self._start()
            callback_handler.register_start_callback(self._compilation_begins)
            callback_handler.register_end_callback(self._compilation_ends)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            with suppress(ValueError):  # torch._dynamo.reset has removed them
                callback_handler.remove_start_callback(self._compilation_begins)
                callback_handler.remove_end_callback(self._compilation_ends)
            self._process.kill()
            self._process.wait()
        self._memory = None
        self._on_exit.close()

    def _start(self) -> subprocess.Popen[bytes]:
        beats, folder = self._beats.fileno(), self._folder
        files = (self._path, folder.log, folder.events, folder.stacks / "alarm")
        watched = Watched(os.getpid(), self._rank, beats, *map(str, files))
        words = [sys.executable, "-I", "-S", watchdog_process.__file__, json.dumps(watched)]
        return subprocess.Popen(words, pass_fds=[beats], stdin=subprocess.DEVNULL)

    def beat(self, phase: str, step: int, limit_s: float) -> None:
        """Give a sign of life, and replace a watchdog that was killed.

        Args:
            phase: what begins now, a word.
            step: optimizer steps done.
            limit_s: how long it may take, at least; 0 means without limit. Ten times the last step,
                or the last time in this phase, is allowed too.
        """
        began, self._began = self._began, time.monotonic()
        self._took[self._last.phase] = self._began - began
        if limit_s > 0:
            last_s = max(self._took.get(name, 0.0) for name in ("step", phase))
            limit_s = max(limit_s, SLOWER * last_s)
        self._last = Beat(self._last.number + 1, step, phase, limit_s, time.time())
        if self._memory is not None:
            self._memory[:] = self._last.to_bytes()
            if self._process is not None and self._process.poll() is not None:
                text = "the watchdog process has ended, another one is started"
                logger.warning(text, extra={"event": "warning", "step": step})
                self._process = self._start()

    def _compilation_begins(self, _: object) -> None:
        """``torch.compile`` may have to work in any step: when a shape is new to it."""
        self._interrupted = self._last
        self.beat("compile", self._last.step, STARTING_LIMIT_S)

    def _compilation_ends(self, _: object) -> None:
        self.beat(self._interrupted.phase, self._interrupted.step, self._interrupted.limit_s)


@contextmanager
def stacks_on_demand(path: Path) -> Iterator[None]:
    """Context manager in which SIGUSR1 appends the stacks of all threads to a file.

    A thread writes them, told by the C part of Python's signal handling, so they come while the
    main thread is in C code. The thread holds the interpreter: a signal handler that reads stacks
    of running threads, as that of :mod:`faulthandler`, ends the process with a segmentation fault
    once in some hundred times. That handler answers SIGVTALRM, for the watchdog of a process in
    which C code keeps the interpreter.
    """
    file = path.open("ab", buffering=0)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    threading.Thread(target=_write_stacks, args=(reads, file), name="stacks", daemon=True).start()
    # Without a handler of Python's the thread is not told.
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.siginterrupt(signal.SIGUSR1, False)
    descriptor = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGVTALRM, file)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGVTALRM)
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGUSR1, handler)
        os.close(writes)  # which ends the thread; it closes the file


def _write_stacks(reads: int, file: BinaryIO) -> None:
    """Write the stacks for every SIGUSR1 among the signals whose numbers arrive."""
    with file:
        while numbers := os.read(reads, 512):
            if signal.SIGUSR1 in numbers:
                with suppress(OSError):  # of a full disk
                    file.write(time.strftime("--- %Y-%m-%d %H:%M:%S\n").encode())
                faulthandler.dump_traceback(file)
    os.close(reads)
