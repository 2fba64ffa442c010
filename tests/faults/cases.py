"""Runs in processes of their own that can be killed, stopped and compared."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsa.train.checkpoint import list_checkpoints, read_meta
from nsa.train.config import TrainConfig
from nsa.train.load import to_yaml
from tests.faults import plant
from tests.train.cases import reproducible_rows, tiny_config

ROOT = Path(__file__).resolve().parents[2]
_CLOCKED = ("seconds", "window")
TWO_RANKS = ("--world-size", "2", "--accumulation", "1")
FORKS: Any = multiprocessing.get_context("forkserver")


def write_config(folder: Path, **changes: Any) -> Path:
    """A tiny run in a file: 30 steps of some 15 ms, a checkpoint every second one."""
    settings: dict[str, Any] = {
        "steps": 30,
        "log_every": 3,
        "eval_every": 6,
        "eval_windows": 2,
        "checkpoint_every": 2,
    }
    path = folder / "tiny.yaml"
    path.write_text(to_yaml(tiny_config(folder, **{**settings, **changes})), encoding="utf-8")
    return path


def config_of(path: Path) -> TrainConfig:
    from nsa.train.load import load_config

    return load_config(path)


class Nsa:
    """The command ``nsa`` in a process of its own, which does not outlive the test."""

    def __init__(
        self,
        *words: str | Path,
        said: Path,
        env: dict[str, str] | None = None,
        fault: tuple[str, ...] = (),
    ) -> None:
        self.said = said
        arguments = ([str(word) for word in words], str(said), env or {}, fault)
        self.process = FORKS.Process(target=_main, args=arguments)
        self.process.start()

    def __enter__(self) -> Nsa:
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
        self,
        condition: Callable[[], bool],
        limit_s: float = 120,
        poll_s: float = 0.005,
    ) -> bool:
        """Whether the condition came true before the process ended."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"nothing in {limit_s} s:\n{self.text}"
            if not self.process.is_alive():
                return condition()
            time.sleep(poll_s)
        return True


def complete(*words: str | Path, folder: Path) -> None:
    """Run ``nsa`` to its end, without an error."""
    with Nsa(*words, said=folder / "said") as nsa:
        assert nsa.end() == 0, nsa.text


def _main(words: list[str], said: str, env: dict[str, str], fault: tuple[str, ...]) -> None:
    """In the new process."""
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    outputs = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
    sys.stdout, sys.stderr = outputs
    os.environ.update(env)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    torch.set_num_threads(1)
    plant.fault(*fault)
    from nsa.cli import main

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


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


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
        fault: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {
            "WORLD_SIZE": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **(env or {}),
        }
        self.ranks = [
            Nsa(
                *words,
                said=folder / f"said-rank-{rank}",
                fault=fault,
                env={"RANK": str(rank), "LOCAL_RANK": str(rank), **common},
            )
            for rank in range(number)
        ]

    def __enter__(self) -> Ranks:
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


ONE_NODE = ("--standalone", "--nproc-per-node", "2")


def torchrun(
    *words: str | Path,
    fault: tuple[str, ...] = (),
    restarts: int = 0,
    place: tuple[str, ...] = ONE_NODE,
) -> subprocess.Popen[str]:
    """An agent of torchrun, by default with two processes, with a fault planted in each process."""
    command = [sys.executable, "-m", "torch.distributed.run", *place]
    command += [
        "--max-restarts",
        str(restarts),
        str(ROOT / "tests" / "faults" / "plant.py"),
        *(fault or ("none",)),
        "--",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, words)],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
