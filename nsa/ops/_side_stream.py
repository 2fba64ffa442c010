"""A side stream for one operator: independent work runs on a second stream and is joined again.

**Memory.** PyTorch keeps free memory by stream. Memory that a tensor frees goes to the next tensor
made on the same stream, at once, because the kernels of one stream run in order; PyTorch does not
know that another stream may still read it. And a side stream is not ours alone: PyTorch hands out
32 streams of a priority in turn, so another caller, or FSDP2 with its three, may get the same one
and make tensors on it without waiting. So nothing here relies on having a stream to itself:

- A tensor that both streams use, or that outlives the operator (results, saved tensors,
  gradients), is made on the calling stream before the fork, and lives until the join. Earlier users
  of its memory are then done when the side begins, and later ones wait for the side.
- A tensor that is made on the side stream is used there alone. It may be freed at any time.

``Tensor.record_stream`` would be second best: memory then comes back when an event has passed and
not in the order of the program, so that a step needs more of it, by an amount that varies, and in
the capture of a CUDA graph it does not come back.

**Priority.** The side stream has a high one: callers put the longer chain of kernels there, and its
kernels should get multiprocessors first, with those of the calling stream in the gaps. Kernels of
ordinary priority can starve meanwhile, NCCL's among them; where that shows, give NCCL streams of
high priority (``is_high_priority_stream`` of its options).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

Wait = Callable[[], None]


class Streams:
    """A calling stream and its side stream; both None if everything runs on one stream.

    Events are made once and recorded again in every call. If two threads use one calling stream, a
    wait may be for the later of two records on the same stream, which includes the earlier one.

    Attributes:
        calling: the stream that was current before the fork.
        side: the second stream.
    """

    def __init__(
        self, calling: torch.cuda.Stream | None = None, side: torch.cuda.Stream | None = None
    ) -> None:
        self.calling, self.side = calling, side
        if calling is not None:
            self._of_calling, self._of_side = torch.cuda.Event(), torch.cuda.Event()
            self._recorded = list[torch.cuda.Event]()
            self._used = 0

    def on_side(self) -> AbstractContextManager[object]:
        """Context in which kernels are launched and tensors are made on the side stream."""
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def fork(self) -> None:
        """Let later launches on the side wait for all earlier ones on the calling stream."""
        if self.side is not None:
            self._of_calling.record(self.calling)
            self._of_calling.wait(self.side)

    def join(self) -> None:
        """Let later launches on the calling stream wait for all earlier ones on the side."""
        if self.side is not None:
            self._of_side.record(self.side)
            self._of_side.wait(self.calling)
            self._used = 0

    def record(self) -> Wait:
        """Return a function that lets the calling stream wait for the side's work until now."""
        if self.side is None:
            return lambda: None
        if self._used == len(self._recorded):
            self._recorded.append(torch.cuda.Event())
        event, self._used = self._recorded[self._used], self._used + 1
        event.record(self.side)
        return lambda: event.wait(self.calling)


@cache
def streams_of(calling: torch.cuda.Stream) -> Streams:
    """Return a stream with its side stream, always the same one: its free memory is used again."""
    return Streams(calling, torch.cuda.Stream(calling.device, priority=-1))


@contextmanager
def fork_join(device: torch.device, enabled: bool = True) -> Iterator[Streams]:
    """Fork a side stream off the current one, and join it at the end, also after an error.

    Args:
        device: where the tensors are.
        enabled: whether there is work for a second stream at all.
    """
    if not enabled or device.type != "cuda":
        yield Streams()
        return
    streams = streams_of(torch.cuda.current_stream(device))
    streams.fork()
    try:
        yield streams
    finally:
        # Before the memory that the operator releases is given to anything else.
        streams.join()
