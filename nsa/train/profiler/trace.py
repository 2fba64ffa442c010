"""A Chrome trace of PyTorch's profiler, read: what ran on the host inside what, and which host call launched which kernel."""

from __future__ import annotations

import bisect
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"})
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})

Thread = tuple[Any, Any]  # process and thread, as the trace names them


@dataclass(slots=True, eq=False)
class Event:
    """Something that took time.

    Attributes:
        name: as in the trace.
        category: as in the trace: ``cpu_op``, ``user_annotation``, ``kernel``, ...
        begin: microseconds on the trace's clock.
        end: likewise.
        thread: of the host, or stream of a device.
        args: what else the trace says.
        parent: the event around it on its thread; None outside of all, and on a device.
        launch: on a device, the host call that launched it; None where the trace does not have it.
        forward: of the backward of an operator: the operator's forward.
    """

    name: str
    category: str
    begin: float
    end: float
    thread: Thread
    args: dict[str, Any]
    parent: Event | None = None
    launch: Event | None = None
    forward: Event | None = None

    def around(self) -> Iterator[Event]:
        """The event itself and those around it on its thread, innermost first."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


@dataclass
class Trace:
    """Events of a trace.

    Attributes:
        host: by thread, in the order of their beginnings.
        device: kernels, copies and fills, in the order of their beginnings.
        instants: moments such as allocations: time in microseconds, thread, name, args; in order.
    """

    host: dict[Thread, list[Event]] = field(default_factory=dict)
    device: list[Event] = field(default_factory=list)
    instants: list[tuple[float, Thread, str, dict[str, Any]]] = field(default_factory=list)

    def innermost(self, thread: Thread, time: float) -> Event | None:
        """The innermost host event at a moment."""
        events = self.host.get(thread, [])
        index = bisect.bisect_right(events, time, key=lambda event: event.begin) - 1
        event = events[index] if index >= 0 else None
        while event is not None and event.end < time:
            event = event.parent
        return event


def read_trace(path: Path) -> Trace:
    """Read a trace file, gzipped or not."""
    content = path.read_bytes()
    return parse_trace(
        json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    )


def parse_trace(records: Iterable[dict[str, Any]]) -> Trace:
    """Events of the ``traceEvents`` of a Chrome trace, with their relations."""
    trace = Trace()
    flows: dict[str, dict[Any, tuple[Thread, float]]] = {"s": {}, "f": {}}
    for record in records:
        category, phase = record.get("cat"), record.get("ph")
        thread = (record.get("pid"), record.get("tid"))
        if phase == "X" and (category in HOST or category in DEVICE):
            begin = float(record["ts"])
            event = Event(
                record["name"],
                category,
                begin,
                begin + float(record.get("dur", 0)),
                thread,
                record.get("args", {}),
            )
            (trace.device if category in DEVICE else trace.host.setdefault(thread, [])).append(
                event
            )
        elif phase == "i":
            trace.instants.append(
                (float(record["ts"]), thread, record["name"], record.get("args", {}))
            )
        elif category == "fwdbwd" and phase in flows:
            flows[phase][record["id"]] = (thread, float(record["ts"]))
    for events in trace.host.values():
        _nest(events)
    trace.device.sort(key=lambda event: event.begin)
    trace.instants.sort(key=lambda instant: instant[0])
    _link_launches(trace)
    _link_backward(trace, flows)
    return trace


def _nest(events: list[Event]) -> None:
    events.sort(key=lambda event: (event.begin, -event.end))
    open_events: list[Event] = []
    for event in events:
        while open_events and open_events[-1].end <= event.begin:
            open_events.pop()
        event.parent = open_events[-1] if open_events else None
        open_events.append(event)


def _link_launches(trace: Trace) -> None:
    launches = {
        event.args["correlation"]: event
        for events in trace.host.values()
        for event in events
        if event.category in LAUNCHES and "correlation" in event.args
    }
    for event in trace.device:
        event.launch = launches.get(event.args.get("correlation"))


def _link_backward(trace: Trace, flows: dict[str, dict[Any, tuple[Thread, float]]]) -> None:
    """Where a flow of the trace leads from an operator to its backward."""
    starts = {
        (thread, event.begin): event for thread, events in trace.host.items() for event in events
    }
    for key, place in flows["f"].items():
        origin = flows["s"].get(key)
        backward, forward = starts.get(place), None if origin is None else starts.get(origin)
        if backward is None or forward is None:
            continue
        # Around it, autograd adds up gradients of a tensor that several operators read.
        around = backward.parent
        evaluated = around is not None and around.name.startswith(
            "autograd::engine::evaluate_function"
        )
        (around if around is not None and evaluated else backward).forward = forward
