"""Measurements from the metrics of a training run, and criteria for them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

STARTING_STEPS = 5  # compilations are expected in these steps
SETTLED = 0.1  # fraction of steps before speed is measured
MIN_GAIN_NATS = 0.5
LOSS_WITHIN, PEAK_WITHIN = 0.02, 0.15

Metrics = Sequence[Mapping[str, Any]]


def figures_of(rows: Metrics, warnings: int = 0) -> dict[str, float]:
    """Measured fields of a row; fields without metrics are omitted.

    Args:
        rows: rows of metrics, oldest first.
        warnings: number of warnings about steps that compiled after the first ones.
    """
    if not rows:
        return {}
    last = rows[-1]
    figures = {"loss_first": rows[0]["loss_nats"], "loss_last": last["loss_nats"]}
    if "memory_allocated_mib" in last:
        figures["peak_mib"] = last["memory_allocated_mib"]
    counts = [
        x["compilations"] for x in rows if "compilations" in x and x["step"] >= STARTING_STEPS
    ]
    if counts:  # warnings also cover steps before these rows
        figures["compilations_after_5"] = max(counts[-1] - counts[0], warnings)
    begin = max(STARTING_STEPS, SETTLED * last["step"])
    pairs = [
        (row, row["step"] - one["step"]) for one, row in itertools.pairwise([{"step": 0}, *rows])
    ]
    settled = [(row, steps) for row, steps in pairs if row["step"] - steps >= begin]
    if settled:
        seconds = [row["step_time_ms"] / 1000 * steps for row, steps in settled]
        tokens = [row["tokens_per_s"] * s for (row, _), s in zip(settled, seconds, strict=True)]
        figures["tokens_per_s"] = sum(tokens) / sum(seconds)
        median = {
            name: statistics.median(row[name] for row, _ in settled)
            for name in ("step_time_ms", "host_time_ms")
            if name in last
        }
        if "host_time_ms" in median:
            figures["host_ms"] = median["host_time_ms"]
        if slowest := [row["step_time_max_ms"] for row in rows if "step_time_max_ms" in row]:
            figures["slowest_over_median"] = max(slowest) / median["step_time_ms"]
        if "mfu" in last:
            figures["mfu"] = figures["tokens_per_s"] * last["mfu"] / last["tokens_per_s"]
    return figures


def training_faults(
    rows: Metrics, figures: Mapping[str, float], *, steps: int, on_gpu: bool
) -> Iterator[str]:
    """Faults of a training run.

    Args:
        rows: rows of metrics.
        figures: see :func:`figures_of`.
        steps: number of requested optimizer steps.
        on_gpu: whether the run had to use a GPU.
    """
    done = rows[-1]["step"] if rows else 0
    if done != steps:
        yield f"{done} of {steps} steps in the metrics"
        return
    if any("data_synthetic" in row for row in rows):
        yield "trained on synthetic data"
    gain = figures["loss_first"] - figures["loss_last"]
    if not gain >= MIN_GAIN_NATS:  # also if it is NaN
        yield f"the loss fell by {gain:.3f} nats, at least {MIN_GAIN_NATS} are required"
    if on_gpu and "peak_mib" not in figures:
        yield "ran on the CPU of a machine with a GPU"
    elif on_gpu and "compilations_after_5" not in figures:
        yield "compilations_after_5 is not known: no field compilations in the metrics"
    elif on_gpu and figures["compilations_after_5"]:
        late = figures["compilations_after_5"]
        yield f"{late} compilations or captures after step {STARTING_STEPS}"


def apart(name: str, found: float | None, expected: float | None, within: float) -> list[str]:
    """Fault if a number is too far from the expected one; none if either is missing.

    Args:
        name: name of the number.
        found: measured number.
        expected: planned or committed number.
        within: largest allowed relative difference.
    """
    if found is None or expected is None:
        return []
    off = found / expected - 1
    rule = f"{name} is {off:+.1%} from {expected:.5g}, {within:.0%} are allowed"
    return [] if abs(off) <= within else [rule]


def differences(expected: Metrics, found: Metrics, *, within: float) -> list[str]:
    """Differences between the losses of two runs.

    Args:
        expected: rows of metrics of the uninterrupted run.
        found: rows of metrics of the resumed run.
        within: largest allowed difference, nats.
    """
    if [row["step"] for row in expected] != [row["step"] for row in found]:
        return [f"{len(found)} of {len(expected)} rows"]
    off = [
        (abs(row[name] - other[name]), f"{name} of step {row['step']}")
        for row, other in zip(expected, found, strict=True)
        for name in ("loss_nats", "val_loss_nats")
        if name in row
    ]
    far = [one for one in off if not one[0] <= within]
    if not far:
        return []
    largest = f"up to {max(far)[0]:.3g} nats"
    return [f"{len(far)} of {len(off)} losses differ, from {far[0][1]}: {largest}"]
