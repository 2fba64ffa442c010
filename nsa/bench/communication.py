"""How much of a step's communication computation does not hide, from the trace of a profiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What runs on the GPU, by the categories of PyTorch's traces.
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True)
class Communication:
    """Of one GPU, microseconds.

    Attributes:
        total_us: time in which a kernel of NCCL ran, waiting for slower processes included.
        exposed_us: the part of it in which nothing else ran on the GPU.
        idle_us: time between the first and the last kernel in which nothing ran: the GPU waited for
            its host.
    """

    total_us: float
    exposed_us: float
    idle_us: float


def communication(events: Iterable[Mapping[str, Any]]) -> Communication:
    """Communication in a trace of one process.

    Args:
        events: ``traceEvents`` of a Chrome trace as PyTorch's profiler writes it: ``ts`` and
            ``dur`` in microseconds, ``cat`` and ``name``. Those of the host are left out, and so
            are copies and kernels without duration.
    """
    found: list[tuple[float, float, bool]] = []
    for event in events:
        if event.get("cat") in _ON_DEVICE and event.get("ph", "X") == "X":
            begin = float(event["ts"])
            sends = "nccl" in str(event["name"]).lower()
            found.append((begin, begin + float(event["dur"]), sends))
    sent, computed = (_covered(one for one in found if one[2] is sends) for sends in (True, False))
    ran = _covered(found)
    span = max(one[1] for one in found) - min(one[0] for one in found) if found else 0.0
    return Communication(sent, ran - computed, span - ran)


def _covered(intervals: Iterable[tuple[float, float, bool]]) -> float:
    """Length of the union of intervals ``begin, end``."""
    total, reached = 0.0, float("-inf")
    for begin, end, _ in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
