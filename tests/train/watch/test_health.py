"""Warnings about a run: given once when a condition begins, and again when it comes back."""

from __future__ import annotations

import pytest

from nsa.train.telemetry.metrics import Row
from nsa.train.watch.health import Health

FAST: Row = {"tokens_per_s": 1000.0, "data_time_ms": 1.0, "step_time_ms": 10.0}
SLOW: Row = {**FAST, "tokens_per_s": 150.0}
WAITING: Row = {**FAST, "data_time_ms": 6.0}
IDLE: Row = {**FAST, "gpu_utilisation_percent": 40.0}
LATE: Row = {**FAST, "gpu_utilisation_percent": 60.0, "gpu_step_time_ms": 4.0}


def gates(slc: float, collapsed: float) -> Row:
    found = {"gate_cmp_mean": 0.5, "gate_slc_mean": slc, "gate_win_mean": 0.6}
    found |= {"gate_entropy": 0.7, "gate_collapsed": collapsed}
    return {**FAST, **found, **{f"{name}_layer_3": value for name, value in found.items()}}


SOUND, DEAD = gates(0.4, 0.0), gates(0.004, 1.0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([FAST] * 6 + [SLOW, SLOW, FAST, SLOW], ". . . . . . throughput . . throughput"),
        ([SLOW], "."),  # nothing to compare with
        ([FAST] * 6 + [{**FAST, "tokens_per_s": 250.0}], ". . . . . . ."),  # above a fifth
        ([WAITING] * 3, ". data ."),  # the first step always waits
        ([FAST, FAST, IDLE, IDLE], ". . gpu ."),
        ([LATE, LATE, {**LATE, "data_time_ms": 6.0}], ". gpu data"),  # the cause is known
        ([SOUND, DEAD, FAST, DEAD, SOUND, DEAD], ". gates . . . gates"),  # a row without gates
    ],
)
def test_warnings_are_given_once_each_time(rows, expected):
    health = Health(warmup_steps=10)
    found = [health.look({"step": step, **row}) for step, row in enumerate(rows, start=11)]
    assert [" ".join(kind for kind, _ in one) or "." for one in found] == expected.split()


def test_messages_and_the_warm_up():
    health = Health(warmup_steps=10)
    for _ in range(6):
        assert health.look({"step": 10, **FAST, **DEAD}) == []  # all gates start equal
    found = [health.look({"step": 11, **row}) for row in (DEAD, SLOW, WAITING, LATE)]
    assert [text for ((_, text),) in found] == [
        "gate collapse in layer 3: means cmp 0.5000, slc 0.0040, win 0.6000, entropy 0.7000",
        "throughput fell to 150 tokens/s, median so far: 1,000",
        "the device waits for data: 6 of 10 ms per step",
        "the GPU is idle: busy 60% of the time, kernels of a step take 4 of 10 ms",
    ]
