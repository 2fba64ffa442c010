"""Work of one operator that runs side by side: a second stream beside every stream that calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

Wait = Callable[[], None]


@cache
def _side(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The one beside ``stream``: what it frees is taken again by nothing but itself. Its kernels go first.

    PyTorch hands out 32 streams of a priority in turn, so it is not its own alone where more are in use.
    """
    return torch.cuda.Stream(stream.device, priority=-1)


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], Wait]]:
    """What is queued in the block runs after all that was queued before, but beside what is queued after the block.

    Kernels of the block go first where both want a multiprocessor: it is the place for the longer chain. PyTorch gives memory
    of a tensor that is freed to what the same stream makes next, so one that is made on either side must live until the other
    has waited for its last use.

    Args:
        device: where the tensors lie; on a CPU nothing is different from no block at all.

    Yields:
        A function for use inside the block; what it returns is called after the block, and lets what is queued from then on
        wait for all that the block had queued when the function was called.
    """
    if device.type != "cuda":
        yield lambda: lambda: None
        return
    around = torch.cuda.current_stream(device)
    side = _side(around)
    side.wait_stream(around)

    def queued() -> Wait:
        event = side.record_event()
        return lambda: around.wait_event(event)

    with ExitStack() as after_a_failure:
        # Before anything takes the memory that this operator lets go.
        after_a_failure.callback(around.wait_stream, side)
        with torch.cuda.stream(side):
            yield queued
        after_a_failure.pop_all()
