"""Programs in processes of their own, with a time limit and their output in a file."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 20.0  # from SIGTERM to SIGKILL
LINE_S = 15.0  # between two lines about a program that is running

# Programs that run, and whether all of them are to end: cases run in threads of their own.
_running: set[subprocess.Popen[bytes]] = set()
_ending = threading.Event()

# Variables that make passes on; another make would read them as its own command line.
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")


def say(line: str) -> None:
    """Tell the user what happens."""
    print(line, flush=True)


@contextmanager
def start(
    words: Sequence[str],
    log: Path,
    env: Mapping[str, str],
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and end it with all that it has started when the context ends.

    Args:
        words: the command line.
        log: file that the command and its output are appended to.
        env: environment variables in addition to those of this process.

    Raises:
        InterruptedError: this thread is one of :func:`threads`, which were interrupted.
    """
    _go_on()
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        print("$", shlex.join(words), file=file, flush=True)
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**inherited, **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its whole group can be signalled
        )
    _running.add(process)
    try:
        _go_on()  # it may have been interrupted meanwhile
        yield process
    finally:
        _running.discard(process)
        # torchrun gives its processes sessions of their own; they are found while it lives.
        started = descendants(process.pid)
        _signal_group(process, signal.SIGKILL)
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _go_on() -> None:
    if _ending.is_set():
        raise InterruptedError("interrupted")


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """So many threads; an interrupt of this one ends the programs of all of them."""
    try:
        with ThreadPoolExecutor(max_workers=count) as pool:
            try:
                yield pool
            except KeyboardInterrupt:
                _ending.set()
                for process in [*_running]:
                    _signal_group(process, signal.SIGKILL)
                raise
    finally:
        _ending.clear()


def wait(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> str:
    """Wait for a program's end, or end it at its limit; its newest line is shown now and then.

    Returns:
        What went wrong; empty for exit code 0.
    """
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < limit_s:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(min(LINE_S, limit_s - passed))
            return f"exit code {code}" if code else ""
        newest = last_lines(log, 1) or [""]
        say(f"    {time.monotonic() - begin:4.0f} s  {log.parent.name}: {newest[0][:100]}")
    _signal_group(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    return f"overran its limit of {limit_s:.0f} s"


def run(words: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str]) -> str:
    """Run a program to its end or its limit; see :func:`start` and :func:`wait`."""
    with start(words, log, env) as process:
        return wait(process, log, limit_s)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and theirs, as Linux lists them."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # The name in brackets may hold anything; state and parent follow it.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log that are not empty."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
