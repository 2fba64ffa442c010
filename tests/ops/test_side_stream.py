"""The second stream: which stream waits for which, from the calls that fake streams get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.ops import _side_stream
from nsa.ops._side_stream import fork_join

DEVICE = torch.device("cuda")


class FakeStream:
    """A stream with a number."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.device = number, DEVICE


class FakeEvent:
    """Notes which stream waits for which."""

    def __init__(self, said: list[str]) -> None:
        self.said, self.stream = said, -1

    def record(self, stream: FakeStream) -> None:
        self.said.append(f"event of {stream.cuda_stream}")
        self.stream = stream.cuda_stream

    def wait(self, stream: FakeStream) -> None:
        self.said.append(f"{stream.cuda_stream} waits for {self.stream}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that fake streams of a fake device get; side streams are numbered from 1."""
    said: list[str] = []
    made = 0

    def make(device: torch.device, priority: int) -> FakeStream:
        nonlocal made
        made += 1
        return FakeStream(made)

    @contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        said.append(f"on {stream.cuda_stream}")
        yield
        said.append(f"off {stream.cuda_stream}")  # not after an error

    main = FakeStream(0)
    cuda: Any = SimpleNamespace(stream=current, current_stream=lambda device: main)
    cuda.Stream, cuda.Event = make, lambda: FakeEvent(said)
    monkeypatch.setattr(torch, "cuda", cuda)
    _side_stream.streams_of.cache_clear()
    yield said
    _side_stream.streams_of.cache_clear()


def waits(said: list[str]) -> list[str]:
    """What was said, without the records of events."""
    return [line for line in said if not line.startswith("event")]


def test_both_begin_and_end_together(said: list[str]) -> None:
    with fork_join(DEVICE) as streams:
        with streams.on_side():
            wait = streams.record()
        wait()
    assert said == [
        *("event of 0", "1 waits for 0"),
        *("on 1", "event of 1", "off 1"),
        "0 waits for 1",
        *("event of 1", "0 waits for 1"),
    ]


def test_events_are_made_once_and_each_wait_is_for_its_own(said: list[str]) -> None:
    made: list[FakeEvent] = []

    def make() -> FakeEvent:
        made.append(FakeEvent(said))
        return made[-1]

    torch.cuda.Event = make  # type: ignore[misc,assignment]
    for _ in range(3):
        with fork_join(DEVICE) as streams:
            first = streams.record()
            second = streams.record()
            first()
            second()
    assert len(made) == 4


def test_a_fork_lets_the_side_wait_again(said: list[str]) -> None:
    with fork_join(DEVICE) as streams:
        said.clear()
        streams.fork()
        with streams.on_side():
            pass
    assert waits(said) == ["1 waits for 0", "on 1", "off 1", "0 waits for 1"]


def test_one_within_another_has_a_side_of_its_own(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the selected branch within whole attention."""
    with fork_join(DEVICE) as outer, outer.on_side():
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: outer.side)
        with fork_join(DEVICE) as inner, inner.on_side():
            pass
    assert waits(said) == [
        "1 waits for 0",
        "on 1",
        "2 waits for 1",
        "on 2",
        "off 2",
        "1 waits for 2",
        "off 1",
        "0 waits for 1",
    ]


def test_an_error_leaves_nothing_behind_on_the_side(said: list[str]) -> None:
    def fail() -> None:
        with fork_join(DEVICE) as streams, streams.on_side():
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert said[-1] == "0 waits for 1"


def test_every_call_has_the_same_side(said: list[str]) -> None:
    """Otherwise no later call could use the free memory of the side stream."""
    for _ in range(2):
        with fork_join(DEVICE) as streams, streams.on_side():
            pass
    assert [line for line in said if line.startswith("on")] == ["on 1", "on 1"]


@pytest.mark.parametrize(
    ("device", "enabled"), [(torch.device("cpu"), True), (DEVICE, False)], ids=["cpu", "no work"]
)
def test_all_on_one_stream(said: list[str], device: torch.device, enabled: bool) -> None:
    with fork_join(device, enabled=enabled) as streams:
        with streams.on_side():
            wait = streams.record()
        streams.fork()
        wait()
    assert not said
