"""From the records of a run to the figures of a row, and the criteria that they are judged by."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.train.telemetry.metrics import Row as MetricsRow
from nsa.train.telemetry.metrics import read_metrics
from nsa.train.telemetry.throughput import STARTING_STEPS

SETTLED = 0.1  # share of the steps at the beginning that speed is not measured in
LEAST_GAIN_NATS = 0.5
LOSS_WITHIN = 0.02
PEAK_WITHIN = 0.15
COMPILATION = '"kind": "compilation"'  # in the events: a step that compiles after the start


@dataclass(frozen=True)
class Figures:
    """Figures of one run, as in :class:`tools.accept.rows.Row`; None for what is not recorded.

    Attributes:
        steps: step of the last row of metrics; 0 without a row.
        on_gpu: whether it ran on a GPU.
        is_synthetic: whether it trained on random numbers instead of text.
        first_step_s: seconds for the set-up of the trainer and the first step.
    """

    steps: int = 0
    on_gpu: bool = False
    is_synthetic: bool = False
    first_step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    compilations_after_5: int | None = None
    slowest_over_median: float | None = None
    host_ms: float | None = None
    peak_mib: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None


def run_figures(run: Path) -> Figures:
    """Figures of the run in a folder; those of an empty record where it has none.

    Raises:
        UserError: the record cannot be read.
    """
    metrics, events = run / "metrics.jsonl", run / "events.jsonl"
    late = 0
    if events.exists():
        lines = events.read_text(encoding="utf-8").splitlines()
        late = sum(COMPILATION in line for line in lines)
    return figures_of(read_metrics(metrics) if metrics.exists() else [], late)


def figures_of(rows: Sequence[MetricsRow], late_compilations: int = 0) -> Figures:
    """Figures of one process.

    Args:
        rows: its rows of metrics, oldest first.
        late_compilations: warnings of steps that compiled after those of the start.
    """
    if not rows:
        return Figures()
    last = rows[-1]
    settled = list(_settled(rows))
    tokens_per_s = _tokens_per_s(settled)
    longest = [float(row["step_time_max_ms"]) for row in rows if "step_time_max_ms" in row]
    step_ms = [float(row["step_time_ms"]) for row, _ in settled]
    slowest = max(longest) / statistics.median(step_ms) if longest and step_ms else None
    host_ms = [float(row["host_time_ms"]) for row, _ in settled if "host_time_ms" in row]
    per_token = float(last["mfu"]) / float(last["tokens_per_s"]) if "mfu" in last else None
    return Figures(
        steps=int(last["step"]),
        on_gpu="memory_allocated_mib" in last,
        is_synthetic=any("data_synthetic" in row for row in rows),
        first_step_s=_first_step_s(rows),
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * per_token if tokens_per_s and per_token else None,
        compilations_after_5=_compilations_after_start(rows, late_compilations),
        slowest_over_median=slowest,
        host_ms=statistics.median(host_ms) if host_ms else None,
        peak_mib=float(last["memory_allocated_mib"]) if "memory_allocated_mib" in last else None,
        loss_first=float(rows[0]["loss_nats"]),
        loss_last=float(last["loss_nats"]),
    )


def _settled(rows: Sequence[MetricsRow]) -> Iterator[tuple[MetricsRow, int]]:
    """Rows that begin after the warm-up and the first tenth of the run, with their steps."""
    first = max(STARTING_STEPS, SETTLED * int(rows[-1]["step"]))
    ends = [0, *(int(row["step"]) for row in rows)]
    for row, (begin, end) in zip(rows, itertools.pairwise(ends), strict=True):
        if begin >= first:
            yield row, end - begin


def _tokens_per_s(settled: Sequence[tuple[MetricsRow, int]]) -> float | None:
    """All tokens of these rows over all time that their steps took."""
    seconds = [float(row["step_time_ms"]) / 1000 * steps for row, steps in settled]
    tokens = [float(row["tokens_per_s"]) * s for (row, _), s in zip(settled, seconds, strict=True)]
    return sum(tokens) / sum(seconds) if seconds else None


def _compilations_after_start(rows: Sequence[MetricsRow], late: int) -> int | None:
    """What the rows count between them, or the warnings, which also tell of steps before a row."""
    counted = [row for row in rows if int(row["step"]) >= STARTING_STEPS and "compilations" in row]
    if not counted:
        return None
    return max(int(counted[-1]["compilations"]) - int(counted[0]["compilations"]), late)


def _first_step_s(rows: Sequence[MetricsRow]) -> float | None:
    return next((float(row["first_step_s"]) for row in rows if "first_step_s" in row), None)


def training_faults(figures: Figures, *, steps: int, gpu_expected: bool) -> Iterator[str]:
    """What is wrong with a run that trained.

    Args:
        figures: of the run.
        steps: optimizer steps that it was to do.
        gpu_expected: whether it was to run on a GPU.
    """
    if figures.steps != steps:
        yield f"{figures.steps} of {steps} steps in the metrics"
        return
    if figures.is_synthetic:
        yield "trained on synthetic data"
    first, last = figures.loss_first, figures.loss_last
    gain = math.nan if first is None or last is None else first - last
    if not gain >= LEAST_GAIN_NATS:  # NaN is none
        yield f"the loss fell by {gain:.3f} nats, at least {LEAST_GAIN_NATS} are required"
    if gpu_expected and not figures.on_gpu:
        yield "ran on the CPU of a machine with a GPU"
    if not figures.on_gpu:
        return
    if figures.compilations_after_5 is None:
        yield "compilations_after_5 is not known: no field compilations in the metrics"
    elif figures.compilations_after_5:
        yield f"{figures.compilations_after_5} compilations or captures after step {STARTING_STEPS}"


def plan_faults(figures: Figures, plan_mib: float | None) -> Iterator[str]:
    """What is wrong with the peak memory beside the planned one; nothing on a CPU."""
    if figures.peak_mib is None:
        return
    if plan_mib is None:
        yield "nsa plan gave no peak"
    elif not abs(figures.peak_mib - plan_mib) <= PEAK_WITHIN * plan_mib:
        off = figures.peak_mib / plan_mib - 1
        yield f"the peak is {off:+.1%} from the planned one, {PEAK_WITHIN:.0%} are allowed"


def loss_faults(loss_last: float | None, committed: float | None) -> Iterator[str]:
    """What is wrong with the last loss beside the committed one; nothing without either."""
    if loss_last is None or committed is None:
        return
    off = loss_last / committed - 1
    if not abs(off) <= LOSS_WITHIN:
        rule = f"{LOSS_WITHIN:.0%} are allowed"
        yield f"loss_last is {off:+.1%} from the committed {committed:.4f}, {rule}"
