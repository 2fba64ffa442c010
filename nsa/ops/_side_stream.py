"""Work of one operator that runs side by side: a second stream beside every stream that calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

Wait = Callable[[], None]

_handed_out: set[int] = set()
_handing_out = threading.Lock()


@cache
def _side(stream: torch.cuda.Stream, thread: int) -> torch.cuda.Stream:
    """The one beside ``stream`` for a thread of Python; its kernels go first.

    It must be of its own: PyTorch gives memory that a stream frees to what the same stream makes next, and only ``stream``, as
    this thread uses it, is known to be done with it by then. PyTorch hands out 32 streams of a priority in turn; once they come
    again there is none, and the stream itself is given: one after the other.
    """
    with _handing_out:
        side = torch.cuda.Stream(stream.device, priority=-1)
        if side.cuda_stream in _handed_out:
            return stream
        _handed_out.update((stream.cuda_stream, side.cuda_stream))
    return side


@dataclass(frozen=True)
class Streams:
    """The stream that calls and the one beside it; both None on a CPU, where nothing is different."""

    around: torch.cuda.Stream | None
    side: torch.cuda.Stream | None

    def beside(self) -> AbstractContextManager[object]:
        """What is queued within runs beside what is queued outside, and first where both want a multiprocessor."""
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def fork(self) -> None:
        """Let what is queued beside later wait for all that was queued around up to now."""
        if self.side is not None and self.around is not None:
            self.side.wait_stream(self.around)

    def queued(self) -> Wait:
        """What lets the stream around wait for all that was queued beside it up to now."""
        if self.around is None or self.side is None:
            return lambda: None
        around, event = self.around, self.side.record_event()
        return lambda: around.wait_event(event)


@contextmanager
def two_streams(device: torch.device) -> Iterator[Streams]:
    """Two streams for one operator: both begin after all that was queued before, and what is queued later waits for both.

    A tensor that is made on one of them must live until the other has waited for its last use.

    Args:
        device: where the tensors lie.
    """
    if device.type != "cuda":
        yield Streams(None, None)
        return
    around = torch.cuda.current_stream(device)
    side = _side(around, threading.get_ident())
    side.wait_stream(around)
    try:
        yield Streams(around, side)
    finally:
        # Also after an error: before anything takes the memory that the operator lets go.
        around.wait_stream(side)
