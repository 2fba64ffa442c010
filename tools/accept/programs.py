"""Programs in processes of their own, with a limit on their time and their output in a file."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 20.0  # from the request to end until it is enforced
POLL_S = 0.2
LINE_S = 15.0  # from one line about a program that runs to the next

# What make hands on to the programs that it starts; a make among them would take it for its own
# command line.
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        code: exit status, negative for a signal; None where it overran its limit.
        seconds: from its start to its end.
        limit_s: its limit.
    """

    code: int | None
    seconds: float
    limit_s: float

    @property
    def fault(self) -> str:
        """Why that is not a success; empty for one."""
        if self.code is None:
            return f"overran its limit of {self.limit_s:.0f} s"
        return f"exit code {self.code}" if self.code else ""


class Program:
    """A running program, with standard output and errors in a file; it ends with its context.

    Args:
        words: the command line.
        log: file that the output is appended to, after the command.
        env: environment variables beside those of this process.
    """

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
        self._begin = time.monotonic()
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(words)}\n")
            file.flush()
            # A session of its own, so that all that it starts can be ended with it.
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**inherited, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # torchrun gives its processes sessions of their own; they are found while it lives.
        started = descendants(self._process.pid)
        self._signal_all(signal.SIGKILL)
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    @property
    def code(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._begin

    def pause(self, seconds: float) -> None:
        """Wait a moment, or until it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL, to the program alone: what it has started finds out by itself."""
        self._process.kill()
        self._process.wait()

    def wait(self, limit_s: float, say: Say) -> Ended:
        """Wait for its end, which comes at the limit at the latest.

        Args:
            limit_s: seconds since its start.
            say: told every quarter of a minute how long it has run, with its newest line.
        """
        said = self.seconds
        while self.code is None and self.seconds < limit_s:
            time.sleep(POLL_S)
            if self.seconds - said >= LINE_S:
                said = self.seconds
                say(f"    {said:4.0f} s  {(last_lines(self.log, 1) or [''])[0][:100]}")
        code = self.code
        if code is None:
            self._signal_all(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        return Ended(code, self.seconds, limit_s)

    def _signal_all(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


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


def run_program(
    words: Sequence[str],
    log: Path,
    limit_s: float,
    *,
    env: Mapping[str, str],
    say: Say = lambda line: None,
) -> Ended:
    """Run a program to its end or its limit; see :class:`Program`."""
    with Program(words, log, env) as program:
        return program.wait(limit_s, say)


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log that are not empty."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
