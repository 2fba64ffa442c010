"""Batches made ahead in a thread, with a limit on how long the run waits for the next one."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

_CLOSING_S = 2.0
_POLL_S = 0.5


class StarvedError(Exception):
    """No batch came within the time limit."""


class Prefetcher(Generic[Item]):
    """Calls a function over and over in a thread and hands its results out in order.

    Args:
        make: makes the next item; an error in it comes out of :meth:`get`.
        ahead: items made before they are asked for.
    """

    def __init__(self, make: Callable[[], Item], ahead: int = 2) -> None:
        self._make = make
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
        self._closed = threading.Event()
        # A daemon: a read that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> Item | None:
        """The next item.

        Args:
            timeout_s: longest wait in seconds; 0 waits for ever.
            give_up: asked twice a second while nothing is ready; True ends the wait.

        Returns:
            The item; None if the wait was given up.

        Raises:
            StarvedError: the time is over.
        """
        deadline = time.monotonic() + (timeout_s or math.inf)
        while True:
            left_s = max(deadline - time.monotonic(), 0)
            try:
                item, error = self._ready.get(timeout=min(_POLL_S, left_s))
            except queue.Empty:
                if give_up():
                    return None
                if left_s <= _POLL_S:
                    raise StarvedError(f"no batch in {timeout_s:g} s") from None
                continue
            if error is not None:
                raise error
            return item

    def close(self) -> None:
        """End the thread, unless it is stuck; what is ready is dropped.

        A thread that still runs PyTorch's code when the interpreter ends would abort the process.
        """
        self._closed.set()
        deadline = time.monotonic() + _CLOSING_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            while not self._ready.empty():  # it may wait for room
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _work(self) -> None:
        with ExitStack() as stack:
            stack.push(self._ended)
            while not self._closed.is_set():
                self._ready.put((self._make(), None))

    def _ended(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Hand whatever ended the thread over to the one that waits, where it is raised."""
        if error is not None:
            self._ready.put((None, error))
        return True
