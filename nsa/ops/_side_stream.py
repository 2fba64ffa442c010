"""Fork and join of a side stream: independent work of one operator runs on a second stream.

**Memory.** PyTorch's allocator keeps free memory per stream. Memory that a tensor frees is reused
at once by the next tensor allocated on the same stream, because the kernels of one stream run in
order; the allocator does not know that another stream may still read it. A side stream is not
exclusive either: PyTorch hands out 32 streams per priority round robin, so another caller, or
FSDP2 with its three streams, may get the same one and allocate on it without waiting. Therefore:

- A tensor that both streams use, or that outlives the operator (results, saved tensors,
  gradients), is allocated on the calling stream before the fork and kept alive until the join.
  Earlier users of its memory are then done when the side stream begins, and later ones wait for it.
- A tensor allocated on the side stream is used only there. It may be freed at any time.

``Tensor.record_stream`` is worse: memory is released when an event has completed rather than in
program order, so that a step needs more memory, by a varying amount, and during CUDA graph capture
the memory is not released.

**Priority.** The side stream has high priority: callers run the longer chain of kernels on it, so
its kernels should get multiprocessors first and those of the calling stream fill the gaps. Kernels
of ordinary priority can starve meanwhile, including NCCL's; in that case use high-priority NCCL
streams (``is_high_priority_stream`` in its options).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

Wait = Callable[[], None]


class Streams:
    """A calling stream and its side stream; both None if everything runs on one stream.

    Events are created once and reused in every call. If two threads share a calling stream, a wait
    may see the later of two records on that stream, which includes the earlier one.

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
        """Context manager: launch kernels and allocate tensors on the side stream."""
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def fork(self) -> None:
        """Make later work on the side stream wait for all earlier work on the calling stream."""
        if self.side is not None:
            self._of_calling.record(self.calling)
            self._of_calling.wait(self.side)

    def join(self) -> None:
        """Make later work on the calling stream wait for all earlier work on the side stream."""
        if self.side is not None:
            self._of_side.record(self.side)
            self._of_side.wait(self.calling)
            self._used = 0

    def record(self) -> Wait:
        """Return a function that makes the calling stream wait for the side's work so far."""
        if self.side is None:
            return lambda: None
        if self._used == len(self._recorded):
            self._recorded.append(torch.cuda.Event())
        event, self._used = self._recorded[self._used], self._used + 1
        event.record(self.side)
        return lambda: event.wait(self.calling)


@cache
def streams_of(calling: torch.cuda.Stream) -> Streams:
    """Return the streams of a calling stream, cached so that the side's free memory is reused."""
    return Streams(calling, torch.cuda.Stream(calling.device, priority=-1))


@contextmanager
def fork_join(device: torch.device, enabled: bool = True) -> Iterator[Streams]:
    """Context manager: fork a side stream from the current one; join at the end, even on errors.

    Args:
        device: device of the tensors.
        enabled: whether there is work for a second stream.
    """
    if not enabled or device.type != "cuda":
        yield Streams()
        return
    streams = streams_of(torch.cuda.current_stream(device))
    streams.fork()
    try:
        yield streams
    finally:
        # Join before the memory that the operator frees is reused.
        streams.join()
