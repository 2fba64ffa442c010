"""Communication that computation does not hide, from traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nsa.bench.scaling import Communication, communication

SENT = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, begin: float, length: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length}


def sent(begin: float, length: float) -> dict[str, Any]:
    return kernel(SENT, begin, length)


COPY, HOST = kernel("Memcpy DtoD", 0, 10, "gpu_memcpy"), kernel("nccl:reduce", 0, 9, "cpu_op")


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([], (0, 0, 0)),
        ([sent(10, 5)], (5, 5, 0)),
        ([kernel("gemm", 0, 20), sent(5, 10)], (10, 0, 0)),
        ([kernel("gemm", 0, 10), sent(5, 10)], (10, 5, 0)),
        ([sent(0, 10), sent(5, 10)], (15, 15, 0)),  # two at a time count once
        ([kernel("a", 0, 4), kernel("b", 6, 4), sent(2, 6)], (6, 2, 0)),
        ([kernel("a", 0, 1), sent(50, 1)], (1, 1, 49)),  # idle time is not communication
        ([COPY, sent(0, 10)], (10, 0, 0)),  # copies hide it too, the host does not
        ([HOST, {"ph": "i", "cat": "kernel", "name": SENT}], (0, 0, 0)),
    ],
)
def test_exposed_is_what_nothing_else_hides(
    events: list[dict[str, Any]], found: tuple[float, ...]
) -> None:
    for order in (events, events[::-1]):
        assert communication(order) == Communication(*found)
