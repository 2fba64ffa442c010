"""Whether the records of a run agree with each other and with arithmetic: what ``nsa check`` says."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import Row, Value, read_metrics

_SHOWN = 20
_CLOCK_SLACK_S = 0.1  # the clock of a row is rounded, and read a moment after the step
_CLOCK_SLACK = 0.05


def check_run(folder: RunFolder) -> tuple[list[str], list[str]]:
    """Compare ``metrics.jsonl``, ``metrics.csv`` and TensorBoard, and recompute step counts, tokens and tokens/s.

    Args:
        folder: run folder.

    Returns:
        What was found, in lines, and the disagreements, which are empty for a sound run.

    Raises:
        UserError: the record cannot be read.
    """
    config = folder.load_config()
    rows = read_metrics(folder.metrics_jsonl) if folder.metrics_jsonl.exists() else []
    if not rows:
        return [], ["metrics.jsonl: no rows"]
    found = [
        *_steps(rows, config, _changed(folder), folder.former_ends()),
        *_tokens(rows, config),
        *_speed(rows),
        *_csv(folder, rows),
        *_tensorboard(folder, rows),
    ]
    more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [_summary(rows)], [*found[:_SHOWN], *more]


def _summary(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    in_steps = sum(_seconds(row, steps) for row, steps in zip(rows, _step_counts(rows), strict=True))
    line = (
        f"{len(rows)} rows, steps {first['step']} to {last['step']}, {int(last['tokens']):,} tokens, "
        f"{float(last['tokens']) / in_steps:,.0f} tokens/s in steps"
    )
    wall = float(last["time_unix_s"]) - float(first["time_unix_s"])
    if wall > 0:
        line += f", {(float(last['tokens']) - float(first['tokens'])) / wall:,.0f} tokens/s by the clock"
    return line


def _changed(folder: RunFolder) -> set[str]:
    """Settings that some resumption changed."""
    return {name for launch in folder.launches() for name in launch["overrides"] if launch["resumed_from_step"] is not None}


def _step_counts(rows: Sequence[Row]) -> list[int]:
    """Steps that each row sums up."""
    steps = [int(row["step"]) for row in rows]
    return [after - before for before, after in itertools.pairwise([0, *steps])]


def _seconds(row: Row, steps: int) -> float:
    return float(row["step_time_ms"]) * steps / 1000


def _steps(rows: Sequence[Row], config: TrainConfig, changed: set[str], former_ends: set[int]) -> Iterator[str]:
    steps = [int(row["step"]) for row in rows]
    for before, after in itertools.pairwise(steps):
        if after <= before:
            yield f"metrics.jsonl: step {after} follows step {before}"
    if changed & {"log_every", "eval_every", "eval_windows"}:
        return
    every = [config.log_every] + ([config.eval_every] if config.eval_windows else [])
    due = {step for step in range(1, steps[-1] + 1) if step == config.steps or any(n and step % n == 0 for n in every)}
    for step in sorted(due - set(steps)):
        yield f"metrics.jsonl: no row for step {step}"
    for step in sorted(set(steps) - due - former_ends):
        yield f"metrics.jsonl: a row for step {step}, where none is due"


def _tokens(rows: Sequence[Row], config: TrainConfig) -> Iterator[str]:
    for row in rows:
        expected = int(row["step"]) * config.global_batch * config.seq_len
        if row["tokens"] != expected:
            yield f"step {row['step']}: {row['tokens']} tokens recorded, {expected} = step * global_batch * seq_len"


def _speed(rows: Sequence[Row]) -> Iterator[str]:
    tokens = [0, *(int(row["tokens"]) for row in rows)]
    clocks = [None, *(float(row["time_unix_s"]) for row in rows)]
    for index, (row, steps) in enumerate(zip(rows, _step_counts(rows), strict=True)):
        seconds, claimed = _seconds(row, steps), float(row["tokens_per_s"])
        speed = (tokens[index + 1] - tokens[index]) / seconds if seconds > 0 else math.nan
        if not math.isclose(speed, claimed, rel_tol=1e-6):
            yield f"step {row['step']}: {claimed:,.1f} tokens/s recorded, {speed:,.1f} from tokens and step times"
        before = clocks[index]
        wall = math.inf if before is None else float(row["time_unix_s"]) - before
        if seconds > wall * (1 + _CLOCK_SLACK) + _CLOCK_SLACK_S:
            yield f"step {row['step']}: {seconds:.2f} s spent in steps, but {wall:.2f} s by the clock since the row before"
        if not 0 <= float(row["data_time_ms"]) <= float(row["step_time_ms"]):
            yield f"step {row['step']}: data_time_ms {row['data_time_ms']} lies outside step_time_ms {row['step_time_ms']}"


def _csv(folder: RunFolder, rows: Sequence[Row]) -> Iterator[str]:
    if not folder.metrics_csv.exists():
        yield "metrics.csv: missing"
        return
    with folder.metrics_csv.open(newline="", encoding="utf-8") as file:
        cells = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    if len(cells) != len(rows):
        yield f"metrics.csv: {len(cells)} rows, metrics.jsonl has {len(rows)}"
    for row, found in zip(rows, cells, strict=False):
        expected = {name: str(value) for name, value in row.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                yield f"step {row['step']}: {name} is {found.get(name)} in metrics.csv, {expected.get(name)} in metrics.jsonl"


def _tensorboard(folder: RunFolder, rows: Sequence[Row]) -> Iterator[str]:
    found = read_scalars(folder)
    expected: dict[tuple[int, str], Value] = {
        (int(row["step"]), name): value
        for row in rows
        for name, value in row.items()
        if not isinstance(value, str) and name not in ("step", "time_unix_s")
    }
    for key in sorted(expected.keys() | found.keys()):
        (step, name), wanted, value = key, expected.get(key), found.get(key)
        if wanted is None or value is None or not np.array_equal(np.float32(wanted), np.float32(value), equal_nan=True):
            yield f"step {step}: {name} is {value} in TensorBoard, {wanted} in metrics.jsonl"


def read_scalars(folder: RunFolder) -> dict[tuple[int, str], float]:
    """What TensorBoard shows of a run: value by (step, name), without what a resumption took back."""
    found: dict[tuple[int, str], float] = {}
    for path in sorted(folder.tensorboard.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                found = {key: value for key, value in found.items() if key[0] < event.step}
            for value in event.summary.value:
                found[event.step, value.tag] = value.simple_value
    return found
