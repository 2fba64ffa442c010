"""The training process's side of the watchdog: signs of life, and stacks on demand."""

from __future__ import annotations

import dataclasses
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO, Any

from torch._dynamo.callback import callback_handler

from nsa.train.run_folder import RunFolder
from nsa.train.watch import watchdog_process
from nsa.train.watch.stacks import StacksOnDemand
from nsa.train.watch.watchdog_process import BEAT_SIZE, Beat, Watched

logger = logging.getLogger(__name__)

# A first step compiles, reads data for the first time and sets up communication.
STARTING_LIMIT_S = 1800.0
CHECKPOINT_LIMIT_S = 600.0


class Watchdog:
    """While entered, a second process ends this one when it gives no sign of life for too long; it first says what it sees.

    SIGUSR1 makes this process write the stacks of all its threads to ``stacks/rank-<rank>.txt`` in
    the run folder, see :class:`StacksOnDemand`.

    Args:
        folder: run folder.
        rank: of this process.
        stall_s: longest silence inside a step, seconds; 0 starts no second process.
    """

    def __init__(self, folder: RunFolder, rank: int, stall_s: float) -> None:
        self._folder, self._rank, self._stall_s = folder, rank, stall_s
        self._path = folder.stacks / f"rank-{rank}.txt"
        self._count = 0
        self._memory: mmap.mmap | None = None
        self._beats: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stacks = StacksOnDemand(self._path)
        self._before: Any = None
        self._last: tuple[str, int, float] = ("start", 0, STARTING_LIMIT_S)
        self._compiling: tuple[str, int, float] | None = None

    def __enter__(self) -> Watchdog:
        self._folder.stacks.mkdir(exist_ok=True)
        self._stacks.__enter__()
        # it would end a run that is not yet ready for it
        self._before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if self._stall_s > 0:
            self._beats = tempfile.TemporaryFile()
            # its page exists from now on, whatever happens to the disk
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
            for callbacks in (callback_handler.start_callbacks, callback_handler.end_callbacks):
                callbacks[:] = [
                    one for one in callbacks if getattr(one, "__self__", None) is not self
                ]
            self._process.kill()
            self._process.wait()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._beats is not None:
            self._beats.close()
        signal.signal(signal.SIGUSR2, self._before)
        self._stacks.__exit__(kind, error, traceback)

    def _start(self) -> subprocess.Popen[bytes]:
        assert self._beats is not None, "not entered"
        beats, folder = self._beats.fileno(), self._folder
        files = (self._path, folder.log, folder.events, folder.stacks / "alarm")
        watched = Watched(os.getpid(), self._rank, beats, *map(str, files))
        words = [
            sys.executable,
            "-I",
            "-S",
            watchdog_process.__file__,
            json.dumps(dataclasses.asdict(watched)),
        ]
        return subprocess.Popen(words, pass_fds=[beats], stdin=subprocess.DEVNULL)

    def beat(self, phase: str, step: int, limit_s: float) -> None:
        """Give a sign of life, and see to it that somebody notices when there is none: a watchdog that was killed is replaced.

        Args:
            phase: what begins now, a word.
            step: optimizer steps done.
            limit_s: how long it may take; 0 means without limit.
        """
        self._last = (phase, step, limit_s)
        if self._memory is not None:
            self._count += 1
            self._memory[:] = Beat(self._count, step, phase, limit_s, time.time()).to_bytes()
            if self._process is not None and self._process.poll() is not None:
                logger.warning(
                    "the watchdog process has ended, another one is started",
                    extra={"event": "warning", "step": step},
                )
                self._process = self._start()

    def _compilation_begins(self, _: object) -> None:
        """``torch.compile`` may have to work in any step: when a shape is new to it."""
        self._compiling = self._last
        self.beat("compile", self._last[1], STARTING_LIMIT_S)

    def _compilation_ends(self, _: object) -> None:
        if self._compiling is not None:
            self.beat(*self._compiling)
