"""Reads a Chrome trace of PyTorch's profiler: how events nest, which call launched which kernel."""

from __future__ import annotations

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
HOST = LAUNCHES | {"cpu_op", "user_annotation"}
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

Thread = tuple[Any, Any]  # process and thread, as the trace names them
_BEGIN = attrgetter("begin")


@dataclass(slots=True, eq=False)
class Event:
    """Something that took time, in microseconds on the trace's clock.

    Attributes:
        name: as in the trace.
        category: as in the trace: ``cpu_op``, ``user_annotation``, ``kernel``, ...
        begin: when it began.
        end: when it ended.
        args: what else the trace says.
        parent: the event that contains it on its thread; None on a device.
        launch: on a device, the host call that launched it; None where the trace does not have it.
        forward: on the backward pass of an operator: the operator's forward pass.
    """

    name: str
    category: str
    begin: float
    end: float
    args: dict[str, Any]
    parent: Event | None = None
    launch: Event | None = None
    forward: Event | None = None

    def ancestors(self) -> Iterator[Event]:
        """The event itself and those that contain it, innermost first."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


@dataclass
class Trace:
    """Events of a trace, in the order in which they began.

    Attributes:
        host: events of each thread.
        device: kernels, copies and fills.
        allocations: changes of allocated memory: time, thread, args.
    """

    host: dict[Thread, list[Event]] = field(default_factory=lambda: defaultdict(list))
    device: list[Event] = field(default_factory=list)
    allocations: list[tuple[float, Thread, dict[str, Any]]] = field(default_factory=list)

    def innermost(self, thread: Thread, time: float) -> Event | None:
        """The innermost host event at a moment."""
        events = self.host[thread]
        index = bisect.bisect_right(events, time, key=_BEGIN) - 1
        candidates = events[index].ancestors() if index >= 0 else ()
        return next((event for event in candidates if event.end >= time), None)


def read_trace(path: Path) -> Trace:
    """Read a gzipped trace file."""
    return parse_trace(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def parse_trace(records: Iterable[dict[str, Any]]) -> Trace:
    """Events of the ``traceEvents`` of a Chrome trace, with their relations."""
    trace = Trace()
    flows: dict[str, dict[Any, tuple[Thread, float]]] = {"s": {}, "f": {}}
    for record in records:
        category, name, phase = record.get("cat"), record.get("name"), record.get("ph")
        thread, args = (record.get("pid"), record.get("tid")), record.get("args", {})
        begin = float(record.get("ts", 0))
        if phase == "X" and category in HOST | DEVICE:
            event = Event(str(name), category, begin, begin + float(record.get("dur", 0)), args)
            (trace.device if category in DEVICE else trace.host[thread]).append(event)
        elif name == "[memory]":
            trace.allocations.append((begin, thread, args))
        elif category == "fwdbwd":
            flows[str(phase)][record["id"]] = thread, begin
    for events in trace.host.values():
        _nest(events)
    trace.device.sort(key=_BEGIN)
    trace.allocations.sort(key=itemgetter(0))
    _link_launches(trace)
    _link_backward(trace, flows)
    return trace


def _nest(events: list[Event]) -> None:
    events.sort(key=lambda event: (event.begin, -event.end))
    previous: Event | None = None
    for event in events:
        candidates = previous.ancestors() if previous is not None else ()
        event.parent = next((outer for outer in candidates if outer.end > event.begin), None)
        previous = event


def _link_launches(trace: Trace) -> None:
    launches = {
        event.args.get("correlation"): event
        for events in trace.host.values()
        for event in events
        if event.category in LAUNCHES
    }
    for event in trace.device:
        event.launch = launches.get(event.args.get("correlation"))


def _link_backward(trace: Trace, flows: dict[str, dict[Any, tuple[Thread, float]]]) -> None:
    """Follow the trace's flows from an operator to its backward pass."""
    starts = {
        (thread, event.begin): event for thread, events in trace.host.items() for event in events
    }
    for number, place in flows["f"].items():
        backward, forward = starts.get(place), starts.get(flows["s"].get(number, place))
        if backward is None or forward is None or backward is forward:
            continue
        # In the event that contains it, autograd sums gradients of a tensor with several readers.
        outer = backward.parent
        evaluated = outer is not None and outer.name.startswith("autograd::engine::evaluate")
        (outer if outer is not None and evaluated else backward).forward = forward
