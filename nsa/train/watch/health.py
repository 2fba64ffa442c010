"""What a person who watched the rows of a run would notice."""

from __future__ import annotations

import re
import statistics

from nsa.train.telemetry.layer_statistics import DEAD, UNIFORM
from nsa.train.telemetry.metrics import Row

SLOW = 0.2  # of the median speed so far
MIN_ROWS = 5  # before there is a median to speak of
WAITING = 0.5  # of the step spent waiting for data
IDLE = 0.5  # of the time with a kernel on the GPU, or of the step from its first kernel to its last


class Health:
    """Looks at each row of metrics; a condition is reported when it begins and again when it has gone and come back.

    Args:
        warmup_steps: gates are not judged before this step, for all of them start alike.
    """

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self._speeds: list[float] = []
        self._reported: set[str] = set()

    def look(self, row: Row) -> list[tuple[str, str]]:
        """Conditions that begin with this row, as (kind, sentence)."""
        found = {**self._throughput(row), **self._gates(row)}
        # A row without gates says nothing about them.
        gone = {
            key
            for key in self._reported - found.keys()
            if "gate_entropy" in row or not key.startswith("gate")
        }
        begun = [
            (key.partition(" ")[0], text)
            for key, text in found.items()
            if key not in self._reported
        ]
        self._reported = (self._reported - gone) | found.keys()
        return begun

    def _throughput(self, row: Row) -> dict[str, str]:
        found = {}
        speed = float(row["tokens_per_s"])
        if len(self._speeds) >= MIN_ROWS and speed < SLOW * statistics.median(self._speeds):
            usual = statistics.median(self._speeds)
            found["throughput"] = (
                f"throughput fell to {speed:,.0f} tokens/s, usual are {usual:,.0f}"
            )
        self._speeds.append(speed)
        wait, step = float(row["data_time_ms"]), float(row["step_time_ms"])
        if len(self._speeds) > 1 and wait > WAITING * step:
            found["data"] = f"the device waits for data: {wait:.0f} of {step:.0f} ms a step"
        elif len(self._speeds) > 1:
            busy = float(row.get("gpu_utilisation_percent", 100.0))
            span = float(row.get("gpu_step_time_ms", step))
            if busy < 100 * IDLE:
                found["gpu"] = f"the GPU is idle: busy {busy:.0f}% of the time"
            elif span < IDLE * step:
                found["gpu"] = (
                    f"the GPU is idle: its part of a step takes {span:.0f} of {step:.0f} ms"
                )
        return found

    def _gates(self, row: Row) -> dict[str, str]:
        found: dict[str, str] = {}
        if int(row["step"]) <= self._warmup_steps:
            return found
        for name, value in row.items():
            layer = re.fullmatch(r"gate_entropy_layer_(\d+)", name)
            if layer is None:
                continue
            means = {
                part[1]: float(mean)
                for key, mean in row.items()
                if (part := re.fullmatch(rf"gate_(\w+)_mean_layer_{layer[1]}", key))
            }
            for branch, mean in means.items():
                if mean < DEAD * sum(means.values()):
                    found[f"gates {layer[1]} {branch}"] = (
                        f"gate collapse in layer {layer[1]}: branch {branch} is dead (mean {mean:.4f})"
                    )
            if float(value) > UNIFORM:
                found[f"gates {layer[1]}"] = (
                    f"gate collapse in layer {layer[1]}: all branches weigh alike (entropy {float(value):.4f})"
                )
        return found
