"""The program beside a training process that notices when it no longer gets anywhere, says where it stands, and ends it.

A process of its own, because a thread cannot run while the main thread is stuck in C code that
holds the interpreter, or while the whole process is stopped. It needs the standard library alone
and is run as a file, so that it starts in milliseconds and takes little memory;
:class:`nsa.train.watch.watchdog.Watchdog` starts it.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.5
STACKS_WAIT_S = 2.5
# Has the stacks written by a handler in C, which may crash a process whose threads run: for one
# that answers nothing else. Windows has no such signal and no watchdog, but this module is imported
# there.
STACKS_AT_ANY_PRICE = signal.SIGTERM if sys.platform == "win32" else signal.SIGVTALRM
# Its end breaks the connections of the other ranks, which end by that: they get this long to say
# first where they stand.
GRACE_S = 6.0
_LAYOUT = struct.Struct("<qq24sdd")
BEAT_SIZE = _LAYOUT.size


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        count: beats so far.
        step: optimizer steps done.
        phase: what the process began then.
        limit_s: how long that may take, seconds; 0 means without limit.
        time_unix_s: when.
    """

    count: int
    step: int
    phase: str
    limit_s: float
    time_unix_s: float

    def to_bytes(self) -> bytes:
        """As it lies in shared memory, ``BEAT_SIZE`` bytes."""
        return _LAYOUT.pack(
            self.count, self.step, self.phase.encode(), self.limit_s, self.time_unix_s
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> Beat:
        """Inverse of :meth:`to_bytes`."""
        count, step, phase, limit_s, time_unix_s = _LAYOUT.unpack(content)
        return cls(count, step, phase.rstrip(b"\0").decode(errors="replace"), limit_s, time_unix_s)


@dataclass(frozen=True)
class Watched:
    """What the program is told on its command line, as JSON.

    Attributes:
        pid: the training process.
        rank: its rank.
        beats: file descriptor of the memory with its last beat.
        stacks: file to which SIGUSR1 makes it write its stacks.
        log: ``log.txt`` of the run.
        events: ``events.jsonl`` of the run.
        alarm: file of the run that grows when a rank hangs: all others then say where they stand,
            whatever their limits.
    """

    pid: int
    rank: int
    beats: int
    stacks: str
    log: str
    events: str
    alarm: str


def read_beat(descriptor: int) -> Beat:
    """The last beat; read until two readings agree, since it may be written meanwhile."""
    content = os.pread(descriptor, BEAT_SIZE, 0)
    while (again := os.pread(descriptor, BEAT_SIZE, 0)) != content:
        content = again
    return Beat.from_bytes(content)


def proc_state(pid: int) -> dict[str, str]:
    """State, wait channel and number of threads of a process from ``/proc``; empty where there is no such folder."""
    found: dict[str, str] = {}
    folder = Path("/proc") / str(pid)
    try:
        for line in (folder / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("State", "Threads"):
                found[name.lower()] = value.strip()
        found["wait channel"] = (folder / "wchan").read_text().strip() or "none"
    except OSError:
        pass
    return found


def size_of(path: str) -> int:
    """Bytes of a file, 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def stacks_of(watched: Watched, wait_s: float = STACKS_WAIT_S) -> str:
    """Stacks of all threads of the process; empty if it cannot write them."""
    before = size = size_of(watched.stacks)
    for number in (signal.SIGUSR1, STACKS_AT_ANY_PRICE):
        if size > before:
            break
        os.kill(watched.pid, number)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(0.2)
            now = size_of(watched.stacks)
            if now > before and now == size:  # it has stopped growing
                break
            size = now
    with open(watched.stacks, "rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def describe(watched: Watched, beat: Beat, silent_s: float) -> str:
    """What is known about a process that hangs, or is asked because another rank does."""
    if silent_s <= beat.limit_s or beat.limit_s <= 0:
        what = "another rank hangs"
    else:
        what = "data starvation" if beat.phase == "data" else "stall, zero throughput"
    limit = f"limit {beat.limit_s:.0f} s" if beat.limit_s > 0 else "no limit"
    clock = time.strftime("%H:%M:%S", time.gmtime(beat.time_unix_s))
    found = proc_state(watched.pid)
    state = (
        ", ".join(f"{name} {value}" for name, value in found.items()) or "unknown, no /proc here"
    )
    lines = [
        f"watchdog: rank {watched.rank} (process {watched.pid}): {what}: no sign of life for {silent_s:.0f} s ({limit})",
        f"  last heartbeat: number {beat.count}, step {beat.step}, phase {beat.phase}, at {clock} UTC",
        f"  state: {state}",
    ]
    # a stopped process answers nothing
    stacks = "" if found.get("state", "").startswith("T") else stacks_of(watched)
    if stacks:
        lines += [
            f"  stacks (also in {watched.stacks}):",
            *(f"    {line}" for line in stacks.splitlines()),
        ]
    else:
        lines.append("  stacks: none, the process cannot run")
    return "\n".join(lines) + "\n"


def say(watched: Watched, kind: str, beat: Beat, text: str) -> None:
    """Write to the user, the log and the events of the run; what cannot be written is left out, for the end must come."""
    event = {
        "time_unix_s": round(time.time(), 3),
        "kind": kind,
        "step": beat.step,
        "message": text.rstrip(),
    }
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    for path, content in (
        (watched.log, f"{stamp} ERROR {text}"),
        (watched.events, json.dumps(event) + "\n"),
    ):
        with suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(content.encode())
    with suppress(OSError):  # of a terminal that has gone
        os.write(2, text.encode())


def watch(watched: Watched) -> None:
    """Until the process has ended, or until it hangs and has been ended."""
    parent, last, silent_s = os.getppid(), read_beat(watched.beats), 0.0
    heard, described = size_of(watched.alarm), None
    while os.getppid() == parent:
        time.sleep(POLL_S)
        beat = read_beat(watched.beats)
        # Counted in polls and not by the clock: time in which this program was stopped as well is
        # nobody's stall.
        silent_s = silent_s + POLL_S if beat == last else 0.0
        last = beat
        hangs, size = 0 < beat.limit_s < silent_s, size_of(watched.alarm)
        if hangs:
            with suppress(OSError), open(watched.alarm, "ab", buffering=0) as file:
                file.write(b"%d\n" % watched.rank)
        if (hangs or size > heard) and beat != described:
            say(watched, "hang", beat, describe(watched, beat, silent_s))
            described = beat
        if hangs:
            time.sleep(GRACE_S)
            if read_beat(watched.beats) == beat and os.getppid() == parent:
                say(
                    watched,
                    "end",
                    beat,
                    f"watchdog: ending rank {watched.rank} (process {watched.pid}) with SIGKILL\n",
                )
                os.kill(watched.pid, signal.SIGKILL)
                return
            say(watched, "recovery", beat, f"watchdog: rank {watched.rank} goes on\n")
            silent_s, size = 0.0, size_of(watched.alarm)
        heard = size


def main(words: list[str]) -> int:
    """Watch the process that the only word describes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # they are meant for the training process, whose end is this program's end
        signal.signal(number, signal.SIG_IGN)
    arguments: dict[str, Any] = json.loads(words[0])
    watch(Watched(**arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
