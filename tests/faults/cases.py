"""Runs in their own processes that can be killed, stopped and compared."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nsa.train.checkpoint import list_checkpoints, read_meta, step_of
from nsa.train.load import to_yaml
from tests.faults import plant
from tests.train.cases import reproducible_rows, tiny_config

ROOT = Path(__file__).resolve().parents[2]
_CLOCKED = ("seconds", "window")
TWO_RANKS = ("--world-size", "2", "--micro-batch", "2")
FORKS: Any = multiprocessing.get_context("forkserver")

Fault = tuple[str, ...]
Words = tuple[str | Path, ...]


def write_config(folder: Path, **changes: Any) -> Path:
    """A tiny run in a file: 30 steps of some 10 ms, a checkpoint every second one."""
    settings: dict[str, Any] = {"steps": 30, "log_every": 3, "eval_every": 6, "eval_windows": 2}
    settings |= {"checkpoint_every": 2, "micro_batch": 4, "accumulation": 1, **changes}
    path = folder / "tiny.yaml"
    path.write_text(to_yaml(tiny_config(folder, **settings)), encoding="utf-8")
    return path


class Nsa:
    """The command ``nsa`` in its own process, which does not outlive the test."""

    def __init__(
        self,
        *words: str | Path,
        said: Path,
        env: Mapping[str, str] | None = None,
        fault: Fault = (),
    ) -> None:
        self.said = said
        arguments = ([str(word) for word in words], str(said), dict(env or {}), fault)
        self.process = FORKS.Process(target=_main, args=arguments)
        self.process.start()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def end(self, limit_s: float = 120) -> int:
        """Exit code, negative for a signal."""
        self.process.join(limit_s)
        assert self.process.exitcode is not None, f"still running after {limit_s} s:\n{self.text}"
        return self.process.exitcode

    @property
    def text(self) -> str:
        return self.said.read_text(encoding="utf-8", errors="replace") if self.said.exists() else ""

    def wait_until(
        self, condition: Callable[[], bool], limit_s: float = 120, poll_s: float = 0.005
    ) -> bool:
        """Whether the condition came true before the process ended."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"nothing in {limit_s} s:\n{self.text}"
            if not self.process.is_alive():
                return condition()
            time.sleep(poll_s)
        return True


class Run(Nsa):
    """``nsa train`` of a tiny run in ``folder/run``, given by a file or by settings."""

    def __init__(
        self,
        folder: Path,
        *words: str | Path,
        config: Path | None = None,
        fault: Fault = (),
        **changes: Any,
    ) -> None:
        self.path = folder / "run"
        given = ("train", config or write_config(folder, **changes), "--run-dir", self.path)
        super().__init__(*given, *words, said=folder / "said", fault=fault)

    def wait_for_rows(self, number: int) -> None:
        assert self.wait_until(lambda: rows_of(self.path) >= number), self.text

    def wait_for_text(self, text: str) -> None:
        assert self.wait_until(lambda: text in self.text), self.text

    def goes_on(self) -> None:
        self.wait_for_rows(rows_of(self.path) + 3)

    def stop(self, how: str = "SIGTERM") -> None:
        """Ask for the end of the run, by a signal or the halt file, and wait for it."""
        if how == "halt":
            (self.path / "halt").touch()
        else:
            self.kill(signal.Signals[how])
        assert self.end() == (0 if how == "halt" else 128 + signal.Signals[how]), self.text


def complete(*words: str | Path, folder: Path) -> None:
    """Run ``nsa`` to its end, without an error."""
    with Nsa(*words, said=folder / "said") as nsa:
        assert nsa.end() == 0, nsa.text


def undisturbed(folder: Path, **changes: Any) -> Path:
    """A whole run in ``folder/whole``, with its configuration ``tiny.yaml`` in the same folder."""
    complete("train", write_config(folder, **changes), "--run-dir", folder / "whole", folder=folder)
    return folder / "whole"


def check_resumed(path: Path, whole: Path) -> None:
    """Resume a run and compare it with the undisturbed one, bit for bit."""
    complete("train", "--resume", path, folder=path.parent)
    assert outcome(path) == outcome(whole)


def _main(words: list[str], said: str, env: dict[str, str], fault: Fault) -> None:
    """In the new process."""
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    outputs = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
    sys.stdout, sys.stderr = outputs
    os.environ.update(env)
    tempfile.tempdir = None  # which the first process may have looked up
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    torch.set_num_threads(1)
    plant.fault(*fault)
    from nsa.cli import main, train

    train._plot = lambda *_: None  # a third of the time of such a run
    sys.exit(main(words))


def outcome(path: Path) -> tuple[Any, ...]:
    """What two equal runs have in common: rows, weights, moments, generators, counters and place in
    the data.
    """
    newest = list_checkpoints(path / "checkpoints")[-1]
    meta = read_meta(newest)
    progress = {name: value for name, value in meta["progress"].items() if name not in _CLOCKED}
    files = sorted(newest.glob("*.safetensors"))
    tensors = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return newest.name, tensors, progress, meta["sampler"], meta["rng"], reproducible_rows(path)


def steps_of(path: Path) -> list[int]:
    """Steps of the checkpoints of a run."""
    return [step_of(checkpoint) for checkpoint in list_checkpoints(path / "checkpoints")]


def events(path: Path, kind: str = "") -> list[dict[str, Any]]:
    """Events of a run, of one kind or all."""
    found = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return [event for event in found if kind in ("", event["kind"])]


def rows_of(path: Path) -> int:
    """Rows of metrics so far."""
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


class Ranks:
    """The processes of one run, started by hand instead of by torchrun, which takes seconds."""

    def __init__(
        self,
        *words: str | Path,
        folder: Path,
        number: int = 2,
        fault: Fault = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        place = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        place |= env or {}
        self.ranks = [
            Nsa(
                *words,
                said=folder / f"said-rank-{rank}",
                fault=fault,
                env={"RANK": str(rank), "LOCAL_RANK": str(rank), **place},
            )
            for rank in range(number)
        ]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.ranks:
            rank.__exit__(*error)

    def end(self, limit_s: float = 120) -> list[int]:
        """Exit codes."""
        return [rank.end(limit_s) for rank in self.ranks]

    @property
    def text(self) -> str:
        return "\n".join(rank.text for rank in self.ranks)


class TwoRanks(Ranks):
    """``nsa train`` of a tiny run in ``folder/run`` by two processes."""

    def __init__(self, folder: Path, *words: str | Path, fault: Fault = (), **changes: Any) -> None:
        self.path = folder / "run"
        given = ("train", write_config(folder, **changes), "--run-dir", self.path, *TWO_RANKS)
        super().__init__(*given, *words, folder=folder, fault=fault)

    def wait_for_rows(self, number: int) -> None:
        assert self.ranks[0].wait_until(lambda: rows_of(self.path) >= number), self.text

    def kill(self, number: int) -> None:
        """Signal both, as torchrun does."""
        for rank in self.ranks:
            rank.kill(number)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def torchrun(
    *words: str | Path,
    fault: Fault = (),
    place: Fault = ("--standalone", "--nproc-per-node", "2"),
) -> Iterator[subprocess.Popen[str]]:
    """An agent of torchrun, by default with two processes, with a fault planted in each process."""
    program = ROOT / "tests" / "faults" / "plant.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *place,
        program,
        *fault,
        "nsa",
        *words,
    ]
    agent = subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield agent
    finally:
        agent.kill()
