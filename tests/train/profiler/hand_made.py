"""Traces written by hand, in the form in which PyTorch's profiler exports them."""

from __future__ import annotations

import itertools
from typing import Any

from nsa.train.profiler.attribution import PREFIX
from nsa.train.profiler.trace import Trace, parse_trace

MAIN, AUTOGRAD = 1, 2


class HandMade:
    """Records of a trace; times in microseconds, counted from ``origin``."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.origin = 0.0
        self._numbers = itertools.count()

    def _add(self, at: float, thread: int, **record: Any) -> None:
        self.records.append({"pid": 9, "tid": thread, "ts": self.origin + at, **record})

    def host(
        self,
        name: str,
        begin: float,
        end: float,
        thread: int = MAIN,
        category: str = "cpu_op",
        args: dict[str, Any] | None = None,
    ) -> None:
        given = {"name": name, "cat": category, "args": args or {}}
        self._add(begin, thread, ph="X", dur=end - begin, **given)

    def product(self, sizes: list[list[int]], begin: float, end: float, thread: int = MAIN) -> None:
        self.host("aten::mm", begin, end, thread, args={"Input Dims": sizes})

    def mark(self, stage: str, begin: float, end: float, thread: int = MAIN) -> None:
        self.host(PREFIX + stage, begin, end, thread, "user_annotation")

    def step(self, number: int, begin: float, end: float) -> None:
        self.host(f"ProfilerStep#{number}", begin, end, MAIN, "user_annotation")

    def launch(
        self,
        at: float,
        *kernels: tuple[str, float, float],
        thread: int = MAIN,
        stream: int = 7,
        call: str = "cudaLaunchKernel",
    ) -> None:
        """A call of the host, and the kernels that it launched: name, begin, end."""
        args = {"correlation": next(self._numbers)}
        self.host(call, at, at + 0.5, thread, "cuda_runtime", args)
        for name, begin, end in kernels:
            self.host(name, begin, end, stream, "kernel", args)

    def backward_of(self, forward: float, backward: float, thread: int = AUTOGRAD) -> None:
        flow = {"cat": "fwdbwd", "name": "fwdbwd", "id": next(self._numbers)}
        self._add(forward, MAIN, ph="s", **flow)
        self._add(backward, thread, ph="f", **flow)

    def memory(self, at: float, change: int, thread: int = MAIN, device: int = 0) -> None:
        args = {"Bytes": change, "Device Type": device}
        self._add(at, thread, ph="i", cat="cpu_instant_event", name="[memory]", args=args)

    def trace(self) -> Trace:
        return parse_trace(self.records)
