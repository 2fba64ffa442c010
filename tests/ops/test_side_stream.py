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
    """Records the calls that it gets."""

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
    """The calls that fake streams of a fake device get; side streams are numbered from 1."""
    said: list[str] = []
    made = 0

    def make(device: torch.device, priority: int) -> FakeStream:
        nonlocal made
        made += 1
        return FakeStream(made, said)

    @contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        said.append(f"on {stream.cuda_stream}")
        yield
        said.append(f"off {stream.cuda_stream}")  # not after an error

    main = FakeStream(0, said)
    cuda: Any = SimpleNamespace(Stream=make, stream=current, current_stream=lambda device: main)
    monkeypatch.setattr(torch, "cuda", cuda)
    _side_stream.side_of.cache_clear()
    yield said
    _side_stream.side_of.cache_clear()


def test_both_begin_and_end_together(said: list[str]) -> None:
    with fork_join(DEVICE) as streams:
        with streams.on_side():
            wait = streams.record()
        wait()
    assert said == [
        "1 waits for 0",
        "on 1",
        "event of 1",
        "off 1",
        "0 waits for the event of 1",
        "0 waits for 1",
    ]


def test_a_fork_lets_the_side_wait_again(said: list[str]) -> None:
    with fork_join(DEVICE) as streams:
        said.clear()
        streams.fork()
        with streams.on_side():
            pass
    assert said == ["1 waits for 0", "on 1", "off 1", "0 waits for 1"]


def test_one_within_another_has_a_side_of_its_own(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the selected branch within whole attention."""
    with fork_join(DEVICE) as outer, outer.on_side():
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: outer.side)
        with fork_join(DEVICE) as inner, inner.on_side():
            pass
    assert said == [
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
