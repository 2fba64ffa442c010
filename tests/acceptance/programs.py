"""Subprocesses with a time limit and their output in a file."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NSA = (sys.executable, "-m", "nsa")
GRACE_S = 20.0  # from SIGTERM to SIGKILL
PROGRESS_S = 15.0  # between progress lines


def say(line: str) -> None:
    """Print a line and flush."""
    print(line, flush=True)


@contextmanager
def start(
    words: Sequence[str], log: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager: start a program; stop it and all its children on exit.

    Args:
        words: command line.
        log: file to which the command line and the output are appended.
        env: environment variables in addition to those of this process.
    """
    # Drop the options of make, which a child make would read.
    inherited = {
        name: text for name, text in os.environ.items() if name[:4] not in ("MAKE", "MFLA")
    }
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
            start_new_session=True,  # allows signals to the whole group
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a program and its process group; torchrun stops its workers on SIGTERM."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> list[str]:
    """Wait until a program ends, and regularly print the last line of its log.

    Returns:
        Faults: a nonzero exit code, or the time limit if the program was stopped.
    """
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < limit_s:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(min(PROGRESS_S, limit_s - passed))
            return [f"exit code {code}"] if code else []
        newest = last_lines(log, 1) or [""]
        say(f"    {time.monotonic() - begin:4.0f} s  {newest[0][:100]}")
    stop(process)
    return [f"exceeded its limit of {limit_s:.0f} s"]


def last_lines(log: Path, count: int) -> list[str]:
    """Last lines of a log that are not empty; none if the log does not exist."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
