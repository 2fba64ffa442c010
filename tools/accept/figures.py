"""From the records of a training run to the figures of a row, and the criteria for them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsa.train.telemetry.throughput import STARTING_STEPS

SETTLED = 0.1  # share of the steps at the beginning in which speed is not measured
LEAST_GAIN_NATS = 0.5
LOSS_WITHIN = 0.02
PEAK_WITHIN = 0.15

Metrics = Sequence[Mapping[str, Any]]


def figures_of(rows: Metrics, warnings: int = 0) -> dict[str, float]:
    """Figures of a run, by the names of :class:`tools.accept.rows.Row`, as far as recorded.

    Args:
        rows: its rows of metrics, oldest first.
        warnings: number of warnings about steps that compiled after those of the start.
    """
    if not rows:
        return {}
    last = rows[-1]
    figures = {"loss_first": rows[0]["loss_nats"], "loss_last": last["loss_nats"]}
    if "memory_allocated_mib" in last:
        figures["peak_mib"] = last["memory_allocated_mib"]
    counts = _column([row for row in rows if row["step"] >= STARTING_STEPS], "compilations")
    if counts:  # the warnings also count steps before the first of these rows
        figures["compilations_after_5"] = max(counts[-1] - counts[0], warnings)
    steps = itertools.pairwise([0, *_column(rows, "step")])
    settled = [
        (row, end - begin)
        for row, (begin, end) in zip(rows, steps, strict=True)
        if begin >= max(STARTING_STEPS, SETTLED * last["step"])
    ]
    if not settled:
        return figures
    seconds = [row["step_time_ms"] / 1000 * steps for row, steps in settled]
    tokens = [row["tokens_per_s"] * s for (row, _), s in zip(settled, seconds, strict=True)]
    figures["tokens_per_s"] = sum(tokens) / sum(seconds)
    if "mfu" in last:
        figures["mfu"] = figures["tokens_per_s"] * last["mfu"] / last["tokens_per_s"]
    if slowest := _column(rows, "step_time_max_ms"):
        median_ms = statistics.median(row["step_time_ms"] for row, _ in settled)
        figures["slowest_over_median"] = max(slowest) / median_ms
    if host_ms := _column([row for row, _ in settled], "host_time_ms"):
        figures["host_ms"] = statistics.median(host_ms)
    return figures


def _column(rows: Metrics, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def training_faults(
    rows: Metrics,
    figures: Mapping[str, float],
    *,
    steps: int,
    on_gpu: bool,
) -> Iterator[str]:
    """What is wrong with a run that trained.

    Args:
        rows: its rows of metrics.
        figures: of :func:`figures_of`.
        steps: optimizer steps that it was to do.
        on_gpu: whether it was to run on a GPU.
    """
    done = rows[-1]["step"] if rows else 0
    if done != steps:
        yield f"{done} of {steps} steps in the metrics"
        return
    if any("data_synthetic" in row for row in rows):
        yield "trained on synthetic data"
    gain = figures["loss_first"] - figures["loss_last"]
    if not gain >= LEAST_GAIN_NATS:  # NaN is none
        yield f"the loss fell by {gain:.3f} nats, at least {LEAST_GAIN_NATS} are required"
    if "peak_mib" not in figures:
        if on_gpu:
            yield "ran on the CPU of a machine with a GPU"
        return
    compilations = figures.get("compilations_after_5")
    if compilations is None:
        yield "compilations_after_5 is not known: no field compilations in the metrics"
    elif compilations:
        yield f"{compilations} compilations or captures after step {STARTING_STEPS}"


def plan_faults(peak_mib: float | None, plan_mib: float | None) -> Iterator[str]:
    """What is wrong with the peak memory compared with the planned one; nothing on a CPU."""
    if peak_mib is None:
        return
    if plan_mib is None:
        yield "nsa plan gave no peak"
    elif not abs(peak_mib - plan_mib) <= PEAK_WITHIN * plan_mib:
        off = peak_mib / plan_mib - 1
        yield f"the peak is {off:+.1%} from the planned one, {PEAK_WITHIN:.0%} are allowed"


def loss_faults(loss_last: float | None, committed: float | None) -> Iterator[str]:
    """What is wrong with the last loss compared with the committed one; nothing without either."""
    if loss_last is None or committed is None:
        return
    off = loss_last / committed - 1
    if not abs(off) <= LOSS_WITHIN:
        rule = f"{LOSS_WITHIN:.0%} are allowed"
        yield f"loss_last is {off:+.1%} from the committed {committed:.4f}, {rule}"
