"""Faults planted in a process before it trains; also a program: ``plant.py [FAULT [ARGUMENT ...]]
nsa WORDS OF NSA``.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def fault(name: str = "", *arguments: str) -> None:
    """Change this process so that the named fault will happen in it."""
    if name:
        FAULTS[name](*arguments)


def _before_steps(action: Callable[[Any], None]) -> None:
    """Do something at the beginning of every optimizer step."""
    from nsa.train.trainer import Trainer

    real = Trainer.train_step

    def train_step(self: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        action(self)
        return real(self, *args, **kwargs)

    Trainer.train_step = train_step  # type: ignore[method-assign]


def _at_step(step: str, rank: str, action: Callable[[Any], None]) -> None:
    """Do something at the beginning of one optimizer step of one rank."""

    def act(trainer: Any) -> None:
        if (trainer.state.progress.step, trainer.processes.rank) == (int(step), int(rank)):
            action(trainer)

    _before_steps(act)


def stuck_in_c(step: str) -> None:
    """The main thread calls C code that keeps the interpreter to itself and does not return."""
    library = ctypes.PyDLL(None)  # which does not release the interpreter
    mutex = ctypes.create_string_buffer(64)

    def deadlock(trainer: Any) -> None:
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)

    _at_step(step, "0", deadlock)


def starve(batches: str, rank: str = "0", seconds: str = "3600") -> None:
    """Reading training text stops after some micro-batches."""
    _after_micro_batches(batches, rank, lambda: time.sleep(float(seconds)))


def lose_data(batches: str, rank: str = "0") -> None:
    """The source of the training text gives up after some micro-batches."""

    def give_up() -> None:
        from nsa.train.data import DataUnavailableError

        rule = "send documents within the time limit of 300 s"
        raise DataUnavailableError("source", rule, "none")

    _after_micro_batches(batches, rank, give_up)


def _after_micro_batches(number: str, rank: str, action: Callable[[], None]) -> None:
    from nsa.train import trainer
    from nsa.train.data import batch

    real, calls = batch.collate, 0

    def collate(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > int(number) and os.environ.get("RANK", "0") == rank:
            action()
        return real(*args, **kwargs)

    trainer.collate = collate  # type: ignore[attr-defined]


def nan_in_weights(step: str, rank: str = "0") -> None:
    from nsa.train.distributed.processes import own_part

    def poison(trainer: Any) -> None:
        with torch.no_grad():
            own_part(trainer.model.norm.weight.detach())[3] = math.nan

    _at_step(step, rank, poison)


def die(step: str, rank: str, number: str) -> None:
    """The process signals itself, the first time that torchrun started it."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        _at_step(step, rank, lambda trainer: os.kill(os.getpid(), int(number)))


def small_files(num_bytes: str) -> None:
    """Files beyond this size cannot be written, as on a full disk."""
    import resource

    sys.dont_write_bytecode = True  # Python would leave half a file
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(num_bytes), resource.RLIM_INFINITY))


def slow(seconds: str, after: str = "0") -> None:
    """Every step but the first few takes at least this long."""

    def wait(trainer: Any) -> None:
        if trainer.state.progress.step >= int(after):
            time.sleep(float(seconds))

    _before_steps(wait)


FAULTS: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (stuck_in_c, starve, lose_data, nan_in_weights, die, small_files, slow)
}

if __name__ == "__main__":
    end = sys.argv.index("nsa")  # not "--", which torchrun's parser drops if nothing precedes it
    torch.set_num_threads(1)
    fault(*sys.argv[1:end])
    from nsa.cli import main

    sys.exit(main(sys.argv[end + 1 :]))
