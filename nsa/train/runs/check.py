"""Check that the records of a run agree with each other and with arithmetic (``nsa check``)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from nsa.train.checkpoint import list_checkpoints, step_of
from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import (
    ALWAYS,
    Row,
    csv_text,
    lines_and_rows,
    metric_of_tag,
    names,
    numbers,
)

_SHOWN = 20
_CLOCK_SLACK_S = 0.1  # the clock of a row is rounded, and read a moment after the step
_CLOCK_SLACK = 0.05
_DECIDE_ROWS = {"log_every", "eval_every", "eval_windows"}
_START: Row = {"step": 0, "tokens": 0, "time_unix_s": -math.inf}


def check_run(folder: RunFolder) -> tuple[list[str], list[str]]:
    """Compare the records of metrics, and recompute step counts, tokens and tokens/s.

    Args:
        folder: run folder.

    Returns:
        A line that summarises the run (none without rows), and the disagreements.

    Raises:
        UserError: the record cannot be read.
    """
    config, lines = folder.load_config(), lines_and_rows(folder.metrics_jsonl, *ALWAYS)
    rows = [row for _, row in lines if row is not None]
    broken = [f"metrics.jsonl:{len(lines)}: the last line is no row"] * (len(rows) < len(lines))
    if not rows:
        return [], ["metrics.jsonl: no rows", *broken]
    pairs = list(itertools.pairwise([_START, *rows]))
    found = [
        *broken,
        *_steps(rows, config, folder),
        *(line for before, row in pairs for line in _arithmetic(before, row, config)),
        *_csv(folder, rows),
        *_tensorboard(folder, rows),
    ]
    more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    first, last, tokens = rows[0], rows[-1], int(rows[-1]["tokens"])
    speed = tokens / (sum(_seconds(*pair) for pair in pairs) or math.nan)
    summary = (
        f"{len(rows)} rows, steps {first['step']} to {last['step']}, {tokens:,} tokens, "
        f"{speed:,.0f} tokens/s in steps"
    )
    wall = float(last["time_unix_s"]) - float(first["time_unix_s"])
    if wall > 0:
        summary += f", {(tokens - int(first['tokens'])) / wall:,.0f} tokens/s by the clock"
    return [summary], [*found[:_SHOWN], *more]


def _seconds(before: Row, row: Row) -> float:
    """Time that the steps between two rows took."""
    return float(row["step_time_ms"]) * (int(row["step"]) - int(before["step"])) / 1000


def _steps(rows: Sequence[Row], config: TrainConfig, folder: RunFolder) -> Iterator[str]:
    resumptions = [run for run in folder.launches() if run["resumed_from_step"] is not None]
    if any(_DECIDE_ROWS & run["overrides"].keys() for run in resumptions):
        return
    steps, ends = {int(row["step"]) for row in rows}, folder.former_ends()
    every = [config.log_every, config.eval_every if config.eval_windows else 0]
    end = min(max(steps), max(config.steps, *ends))
    due = {step for n in every if n for step in range(n, end + 1, n)}
    if config.steps <= max([*steps, *map(step_of, list_checkpoints(folder.checkpoints))]):
        due.add(config.steps)
    for step in sorted(due - steps):
        yield f"metrics.jsonl: no row for step {step}"
    for step in sorted(steps - due - ends):
        yield f"metrics.jsonl: a row for step {step}, where none is due"


def _arithmetic(before: Row, row: Row, config: TrainConfig) -> Iterator[str]:
    """Recompute the tokens and the speed of a row, and compare its times with the clock."""
    step, tokens, seconds = int(row["step"]), int(row["tokens"]), _seconds(before, row)
    if step <= int(before["step"]):
        yield f"metrics.jsonl: step {step} follows step {before['step']}"
    expected = step * config.global_batch * config.seq_len
    if tokens != expected:
        yield f"step {step}: {tokens} tokens, must be {expected} = step * global_batch * seq_len"
    speed = (tokens - int(before["tokens"])) / seconds if seconds > 0 else math.nan
    recorded = float(row["tokens_per_s"])
    if not math.isclose(speed, recorded, rel_tol=1e-6):
        yield f"step {step}: {recorded:,.1f} tokens/s, must be {speed:,.1f} from the step times"
    wall = float(row["time_unix_s"]) - float(before["time_unix_s"])
    if seconds > wall * (1 + _CLOCK_SLACK) + _CLOCK_SLACK_S:
        clock = f"{wall:.2f} s by the clock since the row before"
        yield f"step {step}: {seconds:.2f} s spent in steps, but {clock}"
    waiting, whole = float(row["data_time_ms"]), float(row["step_time_ms"])
    if not 0 <= waiting <= whole:
        yield f"step {step}: data_time_ms {waiting} is not between 0 and step_time_ms {whole}"


def _csv(folder: RunFolder, rows: Sequence[Row]) -> Iterator[str]:
    if not folder.metrics_csv.exists():
        yield "metrics.csv: missing"
        return
    text = folder.metrics_csv.read_text(encoding="utf-8", errors="replace")
    head, *lines = text.splitlines() or [""]
    columns = head.split(",")
    for name in sorted({*names(rows)}.difference(columns)):
        yield f"metrics.csv: no column {name}"
    expected = csv_text(columns, rows).splitlines()
    for number, (line, right) in enumerate(itertools.zip_longest(lines, expected), start=2):
        if line != right:
            yield f"metrics.csv:{number}: {line}, must be {right} as in metrics.jsonl"


def _tensorboard(folder: RunFolder, rows: Sequence[Row]) -> Iterator[str]:
    found = read_scalars(folder)
    if not found:
        yield "TensorBoard: no rows"
        return
    expected = {int(row["step"]): numbers(row, "step", "time_unix_s") for row in rows}
    for step in sorted(expected.keys() | found.keys()):
        right, shown = expected.get(step, {}), found.get(step, {})
        for name in sorted(right.keys() | shown.keys()):
            value = float(np.float32(right[name])) if name in right else None
            if str(shown.get(name)) != str(value):  # as text, since NaN differs from itself
                yield f"step {step}: {name} is {shown.get(name)} in TensorBoard, must be {value}"


def read_scalars(folder: RunFolder) -> dict[int, dict[str, float]]:
    """Read the values that TensorBoard shows, by step and name, without those of a resumed part."""
    found: dict[int, dict[str, float]] = {}
    for path in sorted(folder.tensorboard.glob("events.out.tfevents.*"), key=_as_written):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                found = {step: values for step, values in found.items() if step < event.step}
            for value in event.summary.value:
                found.setdefault(event.step, {})[metric_of_tag(value.tag)] = value.simple_value
    return found


def _as_written(path: Path) -> list[str | int]:
    """Sort key of event files: the numbers in their names, which are time, process and writer.

    Writers of one process and second differ in the last number alone, without leading zeros.
    """
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]
