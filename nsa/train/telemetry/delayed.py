"""Reads small tensors from the device without waiting for it."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch
from torch import Tensor

Info = TypeVar("Info")


class LateReader(Generic[Info]):
    """A queue of small device tensors that are read some steps after they were computed.

    :meth:`put` starts a copy to the host and returns at once; :meth:`take` waits for that copy
    only, while the device continues with later work.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Info, Tensor, torch.cuda.Event | None]] = deque()

    def put(self, info: Info, values: Tensor) -> None:
        """Queue ``values``, a 1-D tensor, with data of the host."""
        if values.device.type != "cuda":
            self._waiting.append((info, values, None))
            return
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.current_stream(values.device).record_event()
        self._waiting.append((info, host, copied))

    def take(self, keep: int) -> list[tuple[Info, list[float]]]:
        """Take all entries except the newest ``keep``, oldest first."""
        taken = []
        while len(self._waiting) > keep:
            info, host, copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
            taken.append((info, host.tolist()))
        return taken
