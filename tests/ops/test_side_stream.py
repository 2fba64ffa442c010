"""The second stream: who waits for whom, told from what streams are asked (there is no GPU here)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.ops import _side_stream
from nsa.ops._side_stream import two_streams

DEVICE = torch.device("cuda")


class FakeStream:
    """Notes what it is asked."""

    def __init__(self, number: int, said: list[str]) -> None:
        self.cuda_stream, self.device, self.said = number, DEVICE, said

    def wait_stream(self, other: FakeStream) -> None:
        self.said.append(f"{self.cuda_stream} waits for {other.cuda_stream}")

    def record_event(self) -> int:
        self.said.append(f"event of {self.cuda_stream}")
        return self.cuda_stream

    def wait_event(self, event: int) -> None:
        self.said.append(f"{self.cuda_stream} waits for the event of {event}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What fake streams of a fake device are asked; three side streams, 1 to 3, are handed out in turn."""
    said: list[str] = []
    made = 0

    def make(device: torch.device, priority: int) -> FakeStream:
        nonlocal made
        made += 1
        return FakeStream((made - 1) % 3 + 1, said)

    @contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        said.append(f"on {stream.cuda_stream}")
        yield
        said.append(f"off {stream.cuda_stream}")  # not after an error

    main = FakeStream(0, said)
    cuda: Any = SimpleNamespace(Stream=make, stream=current, current_stream=lambda device: main)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(_side_stream, "_handed_out", set())
    _side_stream._side.cache_clear()
    yield said
    _side_stream._side.cache_clear()


def test_both_begin_and_end_together(said: list[str]) -> None:
    with two_streams(DEVICE) as streams:
        with streams.beside():
            wait = streams.queued()
        wait()
    assert said == ["1 waits for 0", "on 1", "event of 1", "off 1", "0 waits for the event of 1", "0 waits for 1"]


def test_a_fork_lets_the_side_wait_again(said: list[str]) -> None:
    with two_streams(DEVICE) as streams:
        said.clear()
        streams.fork()
        with streams.beside():
            pass
    assert said == ["1 waits for 0", "on 1", "off 1", "0 waits for 1"]


def test_one_within_another_has_a_side_of_its_own(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the selected branch within whole attention."""
    with two_streams(DEVICE) as outer, outer.beside():
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: outer.side)
        with two_streams(DEVICE) as inner, inner.beside():
            pass
    assert said == ["1 waits for 0", "on 1", "2 waits for 1", "on 2", "off 2", "1 waits for 2", "off 1", "0 waits for 1"]


def test_an_error_leaves_nothing_behind_on_the_side(said: list[str]) -> None:
    def fail() -> None:
        with two_streams(DEVICE) as streams, streams.beside():
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert said[-1] == "0 waits for 1"


def test_every_thread_has_a_side_of_its_own_while_there_are_any(said: list[str]) -> None:
    def call() -> None:
        with two_streams(DEVICE) as streams, streams.beside():
            barrier.wait()

    threads = [threading.Thread(target=call) for _ in range(4)]
    barrier = threading.Barrier(4)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The fourth would share one with the first: it has none.
    assert sorted(line for line in said if line.startswith("on")) == ["on 0", "on 1", "on 2", "on 3"]


def test_a_cpu_has_no_streams() -> None:
    with two_streams(torch.device("cpu")) as streams:
        with streams.beside():
            wait = streams.queued()
        wait()
    assert streams.side is None
