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
from dataclasses import dataclass
from functools import cache

import torch

from nsa.ops._replay import recorder

Wait = Callable[[], None]


@cache
def side_of(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The side stream of ``stream``, the same one in every call: its free memory is used again."""
    return torch.cuda.Stream(stream.device, priority=-1)


@dataclass(frozen=True)
class Streams:
    """The calling stream and its side stream; both None where all runs on one.

    Attributes:
        calling: the stream that was current before the fork.
        side: the second stream.
    """

    calling: torch.cuda.Stream | None
    side: torch.cuda.Stream | None

    def on_side(self) -> AbstractContextManager[object]:
        """Within, kernels are launched and tensors are made on the side stream."""
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def fork(self) -> None:
        """Let later launches on the side wait for all earlier ones on the calling stream."""
        if self.side is not None and self.calling is not None:
            _wait(self.side, self.calling)

    def record(self) -> Wait:
        """A function that lets the calling stream wait for what the side was given until now."""
        if self.calling is None or self.side is None:
            return lambda: None
        calling, event, recording = self.calling, self.side.record_event(), recorder()
        name = None if recording is None else recording.event(self.side)

        def wait() -> None:
            if recording is not None and name is not None:
                recording.wait_event(calling, name)
            calling.wait_event(event)

        return wait


@contextmanager
def fork_join(device: torch.device, enabled: bool = True) -> Iterator[Streams]:
    """Fork a side stream off the current one, and join it at the end, also after an error.

    Args:
        device: where the tensors lie.
        enabled: whether there is work for a second stream at all.
    """
    if not enabled or device.type != "cuda":
        yield Streams(None, None)
        return
    calling = torch.cuda.current_stream(device)
    side, recording = side_of(calling), recorder()
    if recording is not None:
        recording.side(calling, side)
    streams = Streams(calling, side)
    streams.fork()
    try:
        yield streams
    finally:
        # Before the memory that the operator lets go is given to anything else.
        _wait(calling, side)


def _wait(waiting: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
    recording = recorder()
    if recording is not None:
        recording.wait_stream(waiting, awaited)
    waiting.wait_stream(awaited)
