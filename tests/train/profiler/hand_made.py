"""Traces written by hand, in the form in which PyTorch's profiler exports them."""

from __future__ import annotations

from typing import Any

from nsa.train.profiler.attribution import PREFIX
from nsa.train.profiler.trace import Trace, parse_trace

MAIN, AUTOGRAD = 1, 2


class HandMade:
    """Records of a trace; times in microseconds."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._numbers = iter(range(1, 10_000))

    def host(
        self, name: str, begin: float, end: float, thread: int = MAIN, category: str = "cpu_op",
        args: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 9,
            "tid": thread,
            "ts": begin,
            "dur": end - begin,
        }
        self.records.append({**event, "args": args or {}})

    def product(self, sizes: list[list[int]], begin: float, end: float, thread: int = MAIN) -> None:
        self.host("aten::mm", begin, end, thread, args={"Input Dims": sizes})

    def mark(self, stage: str, begin: float, end: float, thread: int = MAIN) -> None:
        self.host(PREFIX + stage, begin, end, thread, "user_annotation")

    def step(self, number: int, begin: float, end: float) -> None:
        self.host(f"ProfilerStep#{number}", begin, end, MAIN, "user_annotation")

    def launch(
        self, at: float, *kernels: tuple[str, float, float], thread: int = MAIN, stream: int = 7, category: str = "kernel",
        call: str = "cudaLaunchKernel",
    ) -> None:  # fmt: skip
        """A call of the host, and the kernels that it launched: name, begin, end."""
        number = next(self._numbers)
        self.host(call, at, at + 0.5, thread, "cuda_runtime", {"correlation": number})
        for name, begin, end in kernels:
            event = {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": begin,
                "dur": end - begin,
            }
            self.records.append({**event, "args": {"correlation": number}})

    def backward_of(
        self, forward_begin: float, backward_begin: float, thread: int = AUTOGRAD
    ) -> None:
        number = next(self._numbers)
        flow = {"cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 9}
        self.records += [
            {**flow, "ph": "s", "tid": MAIN, "ts": forward_begin},
            {**flow, "ph": "f", "tid": thread, "ts": backward_begin, "bp": "e"},
        ]

    def memory(self, at: float, change: int, thread: int = MAIN, device: int = 0) -> None:
        args = {"Bytes": change, "Device Type": device, "Total Allocated": 0}
        event = {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "pid": 9,
            "tid": thread,
            "ts": at,
        }
        self.records.append({**event, "args": args})

    def trace(self) -> Trace:
        return parse_trace(self.records)
