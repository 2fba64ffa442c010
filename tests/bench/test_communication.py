"""Communication that computation does not hide, from traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nsa.bench.communication import Communication, communication


def kernel(name: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": length, **more}


SENT = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
TRACES: dict[str, tuple[list[dict[str, Any]], tuple[float, float, float]]] = {
    "nothing": ([], (0, 0, 0)),
    "alone": ([kernel(SENT, 10, 5)], (5, 5, 0)),
    "hidden": ([kernel("gemm", 0, 20), kernel(SENT, 5, 10)], (10, 0, 0)),
    "half hidden": ([kernel("gemm", 0, 10), kernel(SENT, 5, 10)], (10, 5, 0)),
    "two at a time count once": ([kernel(SENT, 0, 10), kernel(SENT, 5, 10)], (15, 15, 0)),
    "a gap between two kernels": (
        [kernel("a", 0, 4), kernel("b", 6, 4), kernel(SENT, 2, 6)],
        (6, 2, 0),
    ),
    "idle time is not communication": ([kernel("a", 0, 1), kernel(SENT, 50, 1)], (1, 1, 49)),
    "copies hide too": (
        [kernel("Memcpy DtoD", 0, 10, cat="gpu_memcpy"), kernel(SENT, 0, 10)],
        (10, 0, 0),
    ),
    "the host does not": (
        [kernel("nccl:all_reduce", 0, 9, cat="cpu_op"), {"ph": "i", "cat": "kernel", "name": SENT}],
        (0, 0, 0),
    ),
}


@pytest.mark.parametrize("trace", TRACES)
def test_exposed_is_what_nothing_else_runs_beside(trace: str) -> None:
    events, (total, exposed, idle) = TRACES[trace]
    for order in (events, events[::-1]):
        assert communication(order) == Communication(total, exposed, idle)
