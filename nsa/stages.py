"""Named stages of a training step for the profiler; no-ops without a listener."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Parts of the model; forward and backward have the same name.
PROJECTION = "projection + RoPE"
COMPRESSION = "compression"
COMPRESSED = "compressed attention"
SELECTION = "scores + selection"
SELECTED = "selected attention"
WINDOW = "window"
DENSE = "dense attention"
GATES = "gates"
MLP = "MLP"
LOSS = "head + loss"
REST = "embedding + norms + residual"

# Parts of the step.
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
TELEMETRY = "telemetry"

Listener = Callable[[str], AbstractContextManager[Any]]

_NOTHING = nullcontext()
_listener: Listener | None = None


def stage(name: str) -> AbstractContextManager[Any]:
    """Context manager of a stage, from the listener; a no-op without one.

    Compiled code contains no stages.

    Args:
        name: one of the names above.
    """
    if torch.compiler.is_compiling() or _listener is None:
        return _NOTHING
    return _listener(name)


def in_stage(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: run every call of the function in a :func:`stage`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with stage(name):
                return function(*args, **kwargs)

        return run

    return decorate


@contextmanager
def stages_seen_by(listener: Listener) -> Iterator[None]:
    """Context manager: use ``listener(name)`` for the stages of all threads of this process."""
    global _listener
    assert _listener is None, "listeners do not nest"
    _listener = listener
    try:
        yield
    finally:
        _listener = None
