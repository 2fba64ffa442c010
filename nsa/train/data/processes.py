"""Processes that work for this one, each at the end of a pipe of its own.

A pool of the standard library shares one pipe between its workers: one that is killed while it writes there leaves the others,
and whoever waits for them, hanging. Here the end of a process is the end of its pipe, which is noticed at once.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, TypeVar

from nsa.errors import UserError
from nsa.train.distributed.launch import one_thread_for_tokenizers

Item = TypeVar("Item")
Result = TypeVar("Result")

_PRELOADED = ["nsa.train.data", "datasets"]  # once, in a process that the others are forked from
_CLOSING_S = 2.0
_AHEAD = 2  # items on their way to each worker


class ChildDiedError(RuntimeError):
    """A process that worked for this one has ended without a word."""


class Child:
    """A process and the pipe to it; it ends with this process, however that ends.

    Args:
        name: of the process, for people.
        target: what it runs, called with the other end of the pipe and ``arguments``.
        arguments: can be pickled.
    """

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(target, theirs, *arguments), daemon=True, name=name)
        self._process.start()
        theirs.close()

    def send(self, item: Any) -> None:
        """Send something.

        Raises:
            ChildDiedError: the process has ended.
        """
        try:
            self._connection.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise ChildDiedError(self._process.name) from None

    def has_sent(self, within_s: float) -> bool:
        """Whether something can be received, or the process has ended, before so many seconds are over."""
        return self._connection.poll(within_s)

    def receive(self) -> Any:
        """What the process sends next.

        Raises:
            ChildDiedError: the process has ended.
        """
        try:
            return self._connection.recv()
        except (EOFError, OSError):  # also in the middle of a message
            raise ChildDiedError(self._process.name) from None

    def close(self) -> None:
        """End the process."""
        self._connection.close()  # which ends it, unless it hangs
        self._process.join(timeout=_CLOSING_S)
        self._process.kill()
        self._process.join(timeout=_CLOSING_S)


def _begin(target: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    one_thread_for_tokenizers()
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a child process"

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    target(connection, *arguments)


@dataclass(frozen=True)
class _Failure:
    error: UserError | None
    trace: str


class _Handover:
    """Context that sends whatever goes wrong in it to the parent, which raises it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None and not isinstance(error, BrokenPipeError):  # which says that the parent has gone
            user_error = error if isinstance(error, UserError) else None
            self._connection.send(_Failure(user_error, "".join(traceback.format_exception(error))))
        return True


class Workers(Generic[Item, Result]):
    """Processes that apply a function to items.

    Args:
        number: of processes.
        function: can be pickled, as items and results can.
    """

    def __init__(self, number: int, function: Callable[[Item], Result]) -> None:
        self._children = [Child(f"nsa-worker-{i}", _work, function) for i in range(number)]

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """The results in the order of the items, of which a few are taken ahead.

        Raises:
            ChildDiedError: a process has ended.
            UserError: raised by the function.
            RuntimeError: with the traceback of any other error in the function.
        """
        waiting: deque[Child] = deque()
        for number, item in enumerate(items):
            child = self._children[number % len(self._children)]
            if len(waiting) == _AHEAD * len(self._children):
                yield _result(waiting.popleft())
            child.send(item)
            waiting.append(child)
        while waiting:
            yield _result(waiting.popleft())

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()


def _result(child: Child) -> Any:
    result = child.receive()
    if not isinstance(result, _Failure):
        return result
    if result.error is not None:
        raise result.error
    raise RuntimeError(f"a process ended with an error:\n{result.trace}")


def _work(connection: Connection, function: Callable[[Any], Any]) -> None:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Items are taken in at once: a parent that waits to send and a worker that waits to send would wait for ever.
    threading.Thread(target=_take_in, args=(connection, inbox), daemon=True).start()
    with _Handover(connection):
        while (item := inbox.get()) is not None:
            connection.send(function(item))


def _take_in(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(None)
