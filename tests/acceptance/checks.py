"""Rows of the acceptance run, their measured fields from metrics, and criteria for them."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.bench.report import markdown
from nsa.bench.report import table as without_empty_columns

COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks/acceptance"
QUICK = "quick"
STARTING_STEPS = 5  # compilations are expected in these steps
SETTLED = 0.1  # fraction of steps before speed is measured
MIN_GAIN_NATS = 0.5
LOSS_WITHIN, PEAK_WITHIN = 0.02, 0.15
# Measured fields of a row and their formats in a table.
MEASURED = {
    "tokens_per_s": ",.0f",
    "compilations_after_5": "d",
    "peak_mib": ",.0f",
    "plan_mib": ",.0f",
    "loss_first": ".4f",
    "loss_last": ".4f",
}

Row = dict[str, Any]
Metrics = Sequence[Mapping[str, Any]]


# --- Rows
def append_row(path: Path, row: Row) -> None:
    """Append a row to a JSONL file, which is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Read complete rows of a JSONL file, which may still grow; none if it does not exist."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def committed_loss(row: Row, folder: Path) -> float | None:
    """Last loss in the newest committed row of the same case, number of steps and GPU."""

    def compared(one: Row) -> tuple[Any, ...]:
        steps = re.findall(r"--steps (\d+)", one["note"])
        return one["gpu"], one["config"], one["leg"] == QUICK, steps

    rows = [one for path in folder.glob("*.jsonl") for one in read_rows(path)]
    same = [one for one in rows if compared(one) == compared(row)]
    return max(same, key=lambda one: str(one["date"]))["loss_last"] if same else None


def table(rows: Sequence[Row]) -> str:
    """Number of passed cases, and a Markdown table."""
    cells = [
        {
            "case": row["config"],
            "passed": "yes" if row["passed"] else "NO",
            **{x: "" if row[x] is None else format(row[x], MEASURED[x]) for x in MEASURED},
            "seconds": f"{row['seconds']:.0f}",
            "note": row["note"].replace("|", "/"),
        }
        for row in rows
    ]
    passed = f"{sum(row['passed'] for row in rows)} of {len(rows)} cases passed"
    return f"{passed}:\n\n{markdown(without_empty_columns(cells))}"


# --- Measurements and criteria
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
    pairs = itertools.pairwise([{"step": 0}, *rows])
    settled = [row["tokens_per_s"] for before, row in pairs if before["step"] >= begin]
    if settled:
        figures["tokens_per_s"] = statistics.median(settled)
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
