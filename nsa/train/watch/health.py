"""Warnings about the rows of a run: low throughput, waits for data, an idle GPU, gate collapse."""

from __future__ import annotations

import re
import statistics

from nsa.train.telemetry.metrics import Row

SLOW = 0.2  # of the median speed so far
MIN_ROWS = 5  # for a median
WAITING = 0.5  # of the step spent waiting for data
IDLE = 0.5  # of the time with a kernel on the GPU, or of the step from its first kernel to its last


class Health:
    """Reports a condition of the rows of metrics when it begins, and when it comes back.

    Args:
        warmup_steps: gates are not checked before this step, since all of them start equal.
    """

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self._speeds: list[float] = []  # of rows with sequences of the latest length
        self._seq_len: object = None
        self._reported: set[str] = set()

    def look(self, row: Row) -> list[tuple[str, str]]:
        """Conditions that begin with this row, as (kind, sentence)."""
        speed, speeds = float(row["tokens_per_s"]), self._speeds
        found = dict[str, str]()
        if row.get("sequence_tokens") != self._seq_len:
            self._seq_len = row.get("sequence_tokens")
            speeds.clear()
        if len(speeds) >= MIN_ROWS and speed < SLOW * (median := statistics.median(speeds)):
            found["throughput"] = (
                f"throughput fell to {speed:,.0f} tokens/s, median so far: {median:,.0f}"
            )
        if speeds:  # the first step always waits
            found |= _waits(row)
        if int(row["step"]) > self._warmup_steps:
            found |= _collapsed_gates(row)
        speeds.append(speed)
        begun = [(key.split()[0], text) for key, text in found.items() if key not in self._reported]
        # A row without gates keeps what is known about them.
        kept = set() if "gate_entropy" in row else {x for x in self._reported if "gates" in x}
        self._reported = kept | found.keys()
        return begun


def _waits(row: Row) -> dict[str, str]:
    wait, step = float(row["data_time_ms"]), float(row["step_time_ms"])
    busy = float(row.get("gpu_utilisation_percent", 100.0))
    span = float(row.get("gpu_step_time_ms", step))
    if wait > WAITING * step:
        return {"data": f"the device waits for data: {wait:.0f} of {step:.0f} ms per step"}
    if busy < 100 * IDLE or span < IDLE * step:
        kernels = f"kernels of a step take {span:.0f} of {step:.0f} ms"
        return {"gpu": f"the GPU is idle: busy {busy:.0f}% of the time, {kernels}"}
    return {}


def _collapsed_gates(row: Row) -> dict[str, str]:
    found = {}
    for name in (name for name, value in row.items() if value):
        if match := re.fullmatch(r"gate_collapsed(_layer_(\d+))", name):
            means = (re.fullmatch(rf"gate_(\w+)_mean{match[1]}", other) for other in row)
            parts = ", ".join(f"{m[1]} {row[m[0]]:.4f}" for m in means if m)
            entropy = f"entropy {row[f'gate_entropy{match[1]}']:.4f}"
            text = f"gate collapse in layer {match[2]}: means {parts}, {entropy}"
            found[f"gates {match[2]}"] = text
    return found
