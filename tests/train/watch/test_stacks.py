"""Stacks of threads that run on while they are read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nsa.train.watch.stacks import all_stacks


@contextmanager
def _inside() -> Iterator[None]:
    for _ in range(50):
        sum(range(10))
    yield


def test_a_generator_that_yields_meanwhile_hides_none_of_its_callers() -> None:
    """Its frame has no caller then, and the stack would end there."""
    ended, interval = threading.Event(), sys.getswitchinterval()

    def outermost_of_all() -> None:
        while not ended.is_set():
            with _inside():
                pass

    thread = threading.Thread(target=outermost_of_all, name="busy")
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        texts = [all_stacks() for _ in range(3000)]
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    assert [
        text for text in texts if "outermost_of_all" not in text.partition("Thread busy")[2]
    ] == []
