"""How much of a step's communication the computation does not hide, from the trace of a profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]  # begin and end, microseconds

# What runs on the GPU, by the categories of PyTorch's traces.
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True)
class Communication:
    """Of one GPU, microseconds.

    Attributes:
        total_us: time in which a kernel of NCCL ran, waiting for slower processes included.
        exposed_us: the part of it in which nothing else ran on the GPU.
        idle_us: time between the first and the last of what ran in which nothing did: the GPU waited for its host.
    """

    total_us: float
    exposed_us: float
    idle_us: float


def communication(events: Iterable[Mapping[str, Any]]) -> Communication:
    """Communication in a trace of one process.

    Args:
        events: ``traceEvents`` of a Chrome trace as PyTorch's profiler writes it: ``ts`` and ``dur`` in microseconds, ``cat``
            and ``name``. Those of the host are passed over, and so are copies and kernels without duration.
    """
    found: dict[bool, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _ON_DEVICE and event.get("ph", "X") == "X":
            begin = float(event["ts"])
            found["nccl" in str(event["name"]).lower()].append((begin, begin + float(event["dur"])))
    sent, computed = _union(found[True]), _union(found[False])
    ran = _union([*sent, *computed])
    span = ran[-1][1] - ran[0][0] if ran else 0.0
    return Communication(_length(sent), _length(ran) - _length(computed), span - _length(ran))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, in intervals that do not meet."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
