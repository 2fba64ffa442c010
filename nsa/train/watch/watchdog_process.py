"""The program that notices when a training process hangs, reports where it is, and ends it.

A process of its own, because a thread cannot run while the main thread is stuck in C code that
holds the interpreter, or while the whole process is stopped. It needs the standard library alone
and is run as a file, so that it starts in milliseconds and takes little memory;
:class:`nsa.train.watch.watchdog.Watchdog` starts it.
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
# The end of this process breaks the connections of the other ranks, which end by that: they get
# this long to report first where they are.
GRACE_S = 6.0
BEAT_SIZE = 256


class Beat(NamedTuple):
    """A sign of life.

    Attributes:
        number: beats so far.
        step: optimizer steps done.
        phase: what the process began then.
        limit_s: how long that may take, seconds; 0 means without limit.
        time_unix_s: when.
    """

    number: int
    step: int
    phase: str
    limit_s: float
    time_unix_s: float

    def to_bytes(self) -> bytes:
        """As in shared memory, ``BEAT_SIZE`` bytes."""
        return json.dumps(self).encode().ljust(BEAT_SIZE)

    @classmethod
    def from_bytes(cls, content: bytes) -> Beat:
        """Inverse of :meth:`to_bytes`."""
        return cls(*json.loads(content))


class Watched(NamedTuple):
    """The command line of the program, as JSON.

    Attributes:
        pid: the training process.
        rank: its rank.
        beats: file descriptor of the memory with its last beat.
        stacks: file to which SIGUSR1, and SIGVTALRM at any price, makes it write its stacks.
        log: ``log.txt`` of the run.
        events: ``events.jsonl`` of the run.
        alarm: file of the run that grows when a rank hangs: all others then report where they are,
            whatever their limits.
    """

    pid: int
    rank: int
    beats: int
    stacks: str
    log: str
    events: str
    alarm: str

    def is_alive(self) -> bool:
        """Whether the process, which has started this program, still exists.

        To be asked before each signal: later its number may belong to a stranger.
        """
        return os.getppid() == self.pid


def read_beat(descriptor: int) -> Beat:
    """The last beat; read until two readings agree, since it may be written meanwhile."""
    content = os.pread(descriptor, BEAT_SIZE, 0)
    while (again := os.pread(descriptor, BEAT_SIZE, 0)) != content:
        content = again
    return Beat.from_bytes(content)


def proc_state(pid: int) -> dict[str, str]:
    """State, number of threads and wait channel of a process; empty where there is no ``/proc``."""
    folder = Path("/proc") / str(pid)
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in (folder / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("State", "Threads"):
                found[name.lower()] = value.strip()
        found["wait channel"] = (folder / "wchan").read_text().strip() or "none"
    return found


def size_of(path: str) -> int:
    """Bytes of a file, 0 if there is none."""
    return os.stat(path).st_size if os.path.exists(path) else 0


def stacks_of(watched: Watched) -> str:
    """Stacks of all threads of the process; empty if it cannot write them."""
    before = size_of(watched.stacks)
    for number in (signal.SIGUSR1, signal.SIGVTALRM):
        deadline = time.monotonic() + STACKS_WAIT_S
        if watched.is_alive():
            os.kill(watched.pid, number)
        while size_of(watched.stacks) == before and time.monotonic() < deadline:
            time.sleep(0.1)
        if size_of(watched.stacks) > before:
            time.sleep(0.3)  # for the rest of them
            break
    with open(watched.stacks, "rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def describe(watched: Watched, beat: Beat, silent_s: float) -> str:
    """What is known about a process that hangs, or is asked because another rank does."""
    what = "data starvation" if beat.phase == "data" else "stall, zero throughput"
    if not 0 < beat.limit_s < silent_s:
        what = "another rank hangs"
    limit = f"limit {beat.limit_s:.0f} s" if beat.limit_s > 0 else "no limit"
    clock = time.strftime("%H:%M:%S", time.gmtime(beat.time_unix_s))
    found = proc_state(watched.pid)
    state = ", ".join(f"{name} {value}" for name, value in found.items())
    # A stopped process does not answer.
    stacks = "" if found.get("state", "").startswith("T") else stacks_of(watched)
    where = f" (also in {watched.stacks}):" if stacks else ": none, the process cannot run"
    lines = [
        f"watchdog: rank {watched.rank} (process {watched.pid}): {what}: "
        f"no sign of life for {silent_s:.0f} s ({limit})",
        f"  last heartbeat: number {beat.number}, step {beat.step}, phase {beat.phase}, "
        f"at {clock} UTC",
        f"  state: {state or 'unknown, no /proc here'}",
        f"  stacks{where}",
        *(f"    {line}" for line in stacks.splitlines()),
    ]
    return "\n".join(lines) + "\n"


def say(watched: Watched, kind: str, beat: Beat, text: str) -> None:
    """Write to the user, the log and the events of the run, as far as these can be written."""
    event = {
        "time_unix_s": round(time.time(), 3),
        "kind": kind,
        "step": beat.step,
        "message": text.rstrip(),
    }
    for path, content in (
        (watched.log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {text}"),
        (watched.events, json.dumps(event) + "\n"),
    ):
        with suppress(OSError):
            _append(path, content)
    with suppress(OSError):  # of a terminal that has gone
        os.write(2, text.encode())


def _append(path: str, text: str) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(text.encode())


def watch(watched: Watched) -> None:
    """Until the process has ended, or until it hangs and has been ended."""
    last, silent_s = read_beat(watched.beats), 0.0
    heard, described = size_of(watched.alarm), None
    name = f"rank {watched.rank}"
    while watched.is_alive():
        time.sleep(POLL_S)
        beat = read_beat(watched.beats)
        # Counted in polls and not by the clock: a pause in which this program was stopped as well
        # is no stall.
        silent_s = silent_s + POLL_S if beat == last else 0.0
        last = beat
        hangs, size = 0 < beat.limit_s < silent_s, size_of(watched.alarm)
        if hangs:
            with suppress(OSError):
                _append(watched.alarm, f"{watched.rank}\n")
        if (hangs or size > heard) and beat != described:
            say(watched, "hang", beat, describe(watched, beat, silent_s))
            described = beat
        if hangs:
            time.sleep(GRACE_S)
            if read_beat(watched.beats) == beat and watched.is_alive():
                ending = f"watchdog: ending {name} (process {watched.pid}) with SIGKILL\n"
                say(watched, "end", beat, ending)
                if watched.is_alive():
                    os.kill(watched.pid, signal.SIGKILL)
                return
            say(watched, "recovery", beat, f"watchdog: {name} goes on\n")
            silent_s, size = 0.0, size_of(watched.alarm)
        heard = size


def main() -> None:
    """Watch the process that the only word of the command line describes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # They are meant for the training process; its end is the end of this program.
        signal.signal(number, signal.SIG_IGN)
    watch(Watched(*json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
