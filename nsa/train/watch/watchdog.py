"""The watchdog of a training process: heartbeats, and stacks on demand."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch._dynamo.callback import callback_handler

from nsa.train.run_folder import RunFolder
from nsa.train.watch import watchdog_process
from nsa.train.watch.watchdog_process import Beat

logger = logging.getLogger(__name__)

# A first step compiles, reads data for the first time and sets up communication.
STARTING_LIMIT_S = 1800.0
CHECKPOINT_LIMIT_S, SLOW_DISK = 600.0, 10e6  # bytes per second
SLOWER = 10  # times as long as the last step, or the last one of its phase, anything may take


def checkpoint_limit_s(parameters: int) -> float:
    """Longest time for a checkpoint of so many parameters, each with two moments."""
    return CHECKPOINT_LIMIT_S + 12 * parameters / SLOW_DISK


class Watchdog:
    """Context manager: a second process reports and ends this one if it is silent for too long.

    SIGUSR1 makes this process write the stacks of all its threads to ``stacks/rank-<rank>.txt`` in
    the run folder, see :func:`stacks_on_demand`.

    Args:
        folder: run folder.
        rank: rank of this process.
        stall_s: longest silence in a step, seconds; 0 starts no second process.
    """

    def __init__(self, folder: RunFolder, rank: int, stall_s: float) -> None:
        self._folder, self._rank, self._stall_s = folder, rank, stall_s
        self._process: subprocess.Popen[bytes] | None = None
        self._last = self._interrupted = Beat(0, 0, "start", STARTING_LIMIT_S)
        self._began = time.monotonic()
        self._took: dict[str, float] = {}  # seconds of the last of each phase
        self._on_exit = ExitStack()

    def __enter__(self) -> Watchdog:
        self._folder.stacks.mkdir(exist_ok=True)
        stacks = self._folder.stacks / f"rank-{self._rank}.txt"
        self._on_exit.enter_context(stacks_on_demand(stacks))
        # It would end a run that does not handle it yet.
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._on_exit.callback(signal.signal, signal.SIGUSR2, before)
        if self._stall_s > 0:
            self._beats = os.pipe()
            # A watchdog that has been stopped loses heartbeats and does not stop the run.
            os.set_blocking(self._beats[1], False)
            self._process = self._start()
            self.beat("start", 0, STARTING_LIMIT_S)
            callback_handler.register_start_callback(self._compilation_begins)
            callback_handler.register_end_callback(self._compilation_ends)
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            with suppress(ValueError):  # torch._dynamo.reset has removed them
                callback_handler.remove_start_callback(self._compilation_begins)
                callback_handler.remove_end_callback(self._compilation_ends)
            self._process.kill()
            self._process.wait()
            for descriptor in self._beats:
                os.close(descriptor)
        self._on_exit.close()

    def _start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-I", "-S", watchdog_process.__file__, str(os.getpid())]
        words += [str(self._rank), str(self._folder.path)]
        return subprocess.Popen(words, stdin=self._beats[0])

    def beat(self, phase: str, step: int, limit_s: float) -> None:
        """Send a heartbeat, and replace a watchdog that was killed.

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
        self._last = Beat(self._last.number + 1, step, phase, limit_s)
        if self._process is None:
            return
        if self._process.poll() is not None:
            text = "the watchdog process has ended, another one is started"
            logger.warning(text, extra={"event": "warning", "step": step})
            self._process = self._start()
        with suppress(BlockingIOError):
            os.write(self._beats[1], f"{json.dumps(self._last)}\n".encode())

    def _compilation_begins(self, _: object) -> None:
        """``torch.compile`` may compile in any step, when a shape is new to it."""
        self._interrupted = self._last
        self.beat("compile", self._last.step, STARTING_LIMIT_S)

    def _compilation_ends(self, _: object) -> None:
        self.beat(self._interrupted.phase, self._interrupted.step, self._interrupted.limit_s)


@contextmanager
def stacks_on_demand(path: Path) -> Iterator[None]:
    """Context manager in which SIGUSR1 appends the stacks of all threads to a file.

    The handler runs in Python, between two instructions of the main thread: a handler in C that
    reads the stacks of running threads, such as that of :mod:`faulthandler`, crashes the process
    once in some hundred times. That one answers SIGVTALRM, for a process whose main thread does
    not return from C code.
    """
    with path.open("ab", buffering=0) as file:

        def write(number: int, frame: FrameType | None) -> None:
            with suppress(OSError):  # a full disk
                file.write(time.strftime("--- %Y-%m-%d %H:%M:%S\n").encode())
            faulthandler.dump_traceback(file)

        before = signal.signal(signal.SIGUSR1, write)
        signal.siginterrupt(signal.SIGUSR1, False)
        faulthandler.register(signal.SIGVTALRM, file)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGVTALRM)
            signal.signal(signal.SIGUSR1, before)
