"""What a reader of the rows of a run would notice."""

from __future__ import annotations

import re
import statistics

from nsa.train.telemetry.layer_statistics import DEAD, UNIFORM
from nsa.train.telemetry.metrics import Row

SLOW = 0.2  # of the median speed so far
MIN_ROWS = 5  # that make a median
WAITING = 0.5  # of the step spent waiting for data
IDLE = 0.5  # of the time with a kernel on the GPU, or of the step from its first kernel to its last


class Health:
    """Looks at each row of metrics and reports a condition when it begins, or comes back.

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
        begun = [(key.split()[0], text) for key, text in found.items() if key not in self._reported]
        # A row without gates says nothing about them.
        kept = set() if "gate_entropy" in row else {x for x in self._reported if "gates" in x}
        self._reported = kept | found.keys()
        return begun

    def _throughput(self, row: Row) -> dict[str, str]:
        found, speed = {}, float(row["tokens_per_s"])
        if len(self._speeds) >= MIN_ROWS:
            usual = statistics.median(self._speeds)
            if speed < SLOW * usual:
                text = f"throughput fell to {speed:,.0f} tokens/s, usual are {usual:,.0f}"
                found["throughput"] = text
        self._speeds.append(speed)
        if len(self._speeds) == 1:  # the first step always waits
            return found
        wait, step = float(row["data_time_ms"]), float(row["step_time_ms"])
        busy = float(row.get("gpu_utilisation_percent", 100.0))
        span = float(row.get("gpu_step_time_ms", step))
        if wait > WAITING * step:
            found["data"] = f"the device waits for data: {wait:.0f} of {step:.0f} ms a step"
        elif busy < 100 * IDLE:
            found["gpu"] = f"the GPU is idle: busy {busy:.0f}% of the time"
        elif span < IDLE * step:
            part = f"its part of a step takes {span:.0f} of {step:.0f} ms"
            found["gpu"] = f"the GPU is idle: {part}"
        return found

    def _gates(self, row: Row) -> dict[str, str]:
        found: dict[str, str] = {}
        layers = [name.rpartition("_")[2] for name in row if name.startswith("gate_entropy_layer_")]
        if int(row["step"]) <= self._warmup_steps:
            return found
        for layer in layers:
            where = f"gate collapse in layer {layer}"
            matches = (re.fullmatch(rf"gate_(\w+)_mean_layer_{layer}", name) for name in row)
            means = {match[1]: float(row[match[0]]) for match in matches if match}
            for branch, mean in means.items():
                if mean < DEAD * sum(means.values()):
                    text = f"{where}: branch {branch} is dead (mean {mean:.4f})"
                    found[f"gates {layer} {branch}"] = text
            entropy = float(row[f"gate_entropy_layer_{layer}"])
            if entropy > UNIFORM:
                text = f"{where}: all branches weigh alike (entropy {entropy:.4f})"
                found[f"gates {layer}"] = text
        return found
