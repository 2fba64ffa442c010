"""Memory of operators that run on several streams, while other streams use memory too.

Kernels are held up behind a pause on the calling stream, while Python goes on and releases results
and saved tensors. What then takes free memory, on the calling stream, on the side streams of this
library or on any other one, writes junk at once. Results must have the bits of a run that nothing
disturbs. What the rules are: nsa/ops/_side_stream.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from nsa.ops._side_stream import streams_of
from tests.gpu.matrix import DEVICE, seed_case
from tests.gpu.test_execution import Step

ROUNDS = 20
PAUSE = 20_000_000  # clocks, some 10 ms: long enough for Python to launch a whole step
# of the long ones the selected blocks decide the algorithm
LENGTHS = {"short": (1200, 0, 70), "long": (6000, 300)}
STREAMS_OF_A_PRIORITY = 32  # that PyTorch hands out in turn


class Disturbed:
    """A step with the results of an undisturbed run, and the sizes of what it makes."""

    def __init__(self, lengths: tuple[int, ...], seed: int = 0) -> None:
        self.step = Step(dataclasses.replace(seed_case(*lengths), seed=seed))
        sizes: set[int] = set()

        def note(x: Tensor) -> Tensor:
            sizes.add(x.untyped_storage().nbytes())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            self.expected = self.step.run()
        for x in self.expected:
            note(x)
        self.sizes = sorted(size for size in sizes if size)
        torch.cuda.synchronize()

    def run(self, wrong: Tensor) -> None:
        """One step, whose differences are added to ``wrong``; its results are released at once."""
        for found, expected in zip(self.step.run(), self.expected, strict=True):
            wrong += (found != expected).sum()

    def spoil(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Take memory of every size of a step on each stream, fill it with junk, release it."""
        for stream in streams:
            with torch.cuda.stream(stream):
                taken = [
                    torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(0xFF)
                    for size in self.sizes
                ]
                del taken


def counters(number: int) -> list[Tensor]:
    """One for each stream that counts."""
    return list(torch.zeros(number, dtype=torch.int64, device=DEVICE).unbind())


def values(wrong: Sequence[Tensor]) -> list[int]:
    torch.cuda.synchronize()
    return [int(x) for x in wrong]


def sides_of(stream: torch.cuda.Stream) -> list[torch.cuda.Stream]:
    """Side streams of a calling stream: of the whole and, within it, of the selected branch."""
    side = streams_of(stream).side
    assert side is not None
    inner = streams_of(side).side
    assert inner is not None
    return [side, inner]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("priority", [0, -1], ids=["usual", "high"])
def test_memory_is_not_overwritten_before_its_last_use(lengths, priority):
    disturbed = Disturbed(LENGTHS[lengths])
    calling = torch.cuda.Stream(priority=priority)
    others = [calling, *sides_of(calling), *(torch.cuda.Stream(priority=-1) for _ in range(4))]
    wrong = counters(1)
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        with torch.cuda.stream(calling):
            torch.cuda._sleep(PAUSE)
            disturbed.run(wrong[0])
        disturbed.spoil(others)
    assert values(wrong) == [0]


def test_side_streams_that_others_have_too():
    """More calling streams than PyTorch has: some share a side stream, or call on one."""
    disturbed = Disturbed(LENGTHS["long"])
    callers = [torch.cuda.Stream(priority=-1) for _ in range(STREAMS_OF_A_PRIORITY)]
    numbers = {stream.cuda_stream for stream in callers}
    assert all(side.cuda_stream in numbers for stream in callers for side in sides_of(stream))
    wrong = counters(len(callers))
    torch.cuda._sleep(PAUSE)
    for index, stream in enumerate(callers):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            disturbed.run(wrong[index])
        disturbed.spoil(callers[index // 2 : index + 1])
    assert values(wrong) == [0] * len(callers)


def test_threads_with_streams_of_their_own_and_one_for_all():
    steps = [Disturbed(lengths, seed) for seed, lengths in enumerate([*LENGTHS.values()] * 2)]
    shared = torch.cuda.Stream()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), shared, shared]
    wrong = counters(len(steps))
    torch.cuda.synchronize()

    def work(index):
        others = [streams[index], *sides_of(streams[index])]
        for _ in range(ROUNDS):
            with torch.cuda.stream(streams[index]):
                torch.cuda._sleep(PAUSE // 10)
                steps[index].run(wrong[index])
            steps[index].spoil(others)

    with ThreadPoolExecutor(len(steps)) as pool:
        list(pool.map(work, range(len(steps))))
    assert values(wrong) == [0] * len(steps)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_replayed_graphs(lengths):
    """Capture keeps the memory of the graph apart, that of its side streams too."""
    disturbed = Disturbed(LENGTHS[lengths])
    calling, wrong = torch.cuda.Stream(), counters(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(calling):
        disturbed.run(wrong[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=calling):
        disturbed.run(wrong[0])
    others = [calling, *sides_of(calling)]
    for _ in range(ROUNDS):
        with torch.cuda.stream(calling):
            torch.cuda._sleep(PAUSE // 10)
            graph.replay()
        disturbed.spoil(others)
    assert values(wrong) == [0]
