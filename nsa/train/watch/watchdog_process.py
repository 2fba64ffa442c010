"""The program that reports a hanging training process with its stacks, and ends it.

It is a process of its own because a thread cannot run while the main thread is stuck in C code that
holds the interpreter, or while the whole process is stopped. It is run as a file and imports only
the standard library, so that it starts in milliseconds. :class:`nsa.train.watch.watchdog.Watchdog`
starts it and writes heartbeats to its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

POLL_S = 0.5
STACKS_WAIT_S = 2.5
# The end of this process breaks the connections of the other ranks and ends them: they get this
# long to report their stacks.
GRACE_S = 6.0


class Beat(NamedTuple):
    """A heartbeat, one line of JSON.

    Attributes:
        number: heartbeats so far.
        step: optimizer steps done.
        phase: work that has begun.
        limit_s: how long it may take, seconds; 0 means without limit.
    """

    number: int
    step: int
    phase: str
    limit_s: float


class Process:
    """The watched process, the parent of this one.

    Args:
        pid: its process ID.
        rank: its rank.
        folder: run folder.
    """

    def __init__(self, pid: int, rank: int, folder: Path) -> None:
        self.pid, self.rank, self.folder = pid, rank, folder
        self.stacks = folder / "stacks" / f"rank-{rank}.txt"
        # Grows when a rank hangs: all others then report their stacks, whatever their limits.
        self.alarm = folder / "stacks" / "alarm"

    def is_alive(self) -> bool:
        """Whether the process still exists; otherwise its number may belong to another one."""
        return os.getppid() == self.pid

    def read_stacks(self) -> str:
        """Stacks of all threads; empty if the process cannot write them."""
        before = size_of(self.stacks)
        # The second signal is handled even while C code blocks the interpreter.
        for number in (signal.SIGUSR1, signal.SIGVTALRM):
            deadline = time.monotonic() + STACKS_WAIT_S
            if self.is_alive():
                os.kill(self.pid, number)
            while size_of(self.stacks) == before and time.monotonic() < deadline:
                time.sleep(0.1)
        time.sleep(0.3)  # for the remaining stacks
        return self.stacks.read_bytes()[before:].decode(errors="replace")

    def describe(self, beat: Beat, silent_s: float) -> str:
        """Report on a process that hangs, or that is asked because another rank hangs."""
        what = "data starvation" if beat.phase == "data" else "stall, zero throughput"
        if not 0 < beat.limit_s < silent_s:
            what = "another rank hangs"
        state = "unknown"
        with suppress(OSError):  # without /proc
            status = Path(f"/proc/{self.pid}/status").read_text()
            state = status.partition("State:\t")[2].partition("\n")[0]
        # A stopped process does not answer.
        stacks = "" if state.startswith("T") else self.read_stacks()
        where = f"(also in {self.stacks}):\n{stacks}" if stacks else "none, the process cannot run"
        silence = f"no sign of life for {silent_s:.0f} s (limit {beat.limit_s:.0f} s)"
        last = f"number {beat.number}, step {beat.step}, phase {beat.phase}"
        return (
            f"watchdog: rank {self.rank} (process {self.pid}): {what}: {silence}\n"
            f"  last heartbeat: {last}; state: {state}\n  stacks: {where}"
        )

    def say(self, kind: str, beat: Beat, text: str) -> None:
        """Write to the log and the events of the run and to standard error, where possible."""
        event = {"time_unix_s": round(time.time(), 3), "kind": kind, "step": beat.step}
        event_line = json.dumps({**event, "message": text})
        with suppress(OSError):  # a full disk
            append(self.folder / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {text}\n")
            append(self.folder / "events.jsonl", f"{event_line}\n")
        with suppress(OSError):  # a closed terminal
            os.write(2, f"{text}\n".encode())


def size_of(path: Path) -> int:
    """Bytes of a file, 0 without one."""
    return path.stat().st_size if path.exists() else 0


def append(path: Path, text: str) -> None:
    """Append to a file."""
    with path.open("ab", buffering=0) as file:
        file.write(text.encode())


def newest_beat(descriptor: int, last: Beat) -> Beat:
    """The last heartbeat that has arrived; ``last`` if there is no new one."""
    with suppress(BlockingIOError):
        for line in os.read(descriptor, 2**20).splitlines()[-1:]:
            return Beat(*json.loads(line))
    return last


def watch(process: Process, beats: int) -> None:
    """Watch a process until it has ended, or until it hangs and has been ended.

    Args:
        process: the process.
        beats: file descriptor of its heartbeats, not blocking.
    """
    last = Beat(0, 0, "start", 0.0)
    silent_s, heard, described = 0.0, size_of(process.alarm), None
    while process.is_alive():
        time.sleep(POLL_S)
        beat = newest_beat(beats, last)
        # Counted in polls and not by the clock: a pause in which this program was stopped as well
        # is no hang.
        silent_s = silent_s + POLL_S if beat == last else 0.0
        last = beat
        hangs, size = 0 < beat.limit_s < silent_s, size_of(process.alarm)
        if hangs:
            with suppress(OSError):
                append(process.alarm, f"{process.rank}\n")
        if (hangs or size > heard) and beat != described:
            process.say("hang", beat, process.describe(beat, silent_s))
            described = beat
        if hangs:
            time.sleep(GRACE_S)
            if newest_beat(beats, beat) == beat and process.is_alive():
                name = f"rank {process.rank} (process {process.pid})"
                process.say("end", beat, f"watchdog: ending {name} with SIGKILL")
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                return
            process.say("recovery", beat, f"watchdog: rank {process.rank} continues")
            silent_s, size = 0.0, size_of(process.alarm)
        heard = size


def main() -> None:
    """Watch the process of the command line: its ID, its rank, the run folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # They are meant for the training process; when it ends, this program ends.
        signal.signal(number, signal.SIG_IGN)
    pid, rank, folder = sys.argv[1:]
    os.set_blocking(0, False)
    watch(Process(int(pid), int(rank), Path(folder)), 0)


if __name__ == "__main__":
    main()
