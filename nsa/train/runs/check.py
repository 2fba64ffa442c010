"""Whether the records of a run agree with each other and with arithmetic (``nsa check``)."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from nsa.train.config import TrainConfig
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.metrics import Row, read_metrics

Values = Mapping[tuple[int, str], object]
_SHOWN = 20
_CLOCK_SLACK_S = 0.1  # the clock of a row is rounded, and read a moment after the step
_CLOCK_SLACK = 0.05
_DECIDE_ROWS = {"log_every", "eval_every", "eval_windows"}


def check_run(folder: RunFolder) -> tuple[list[str], list[str]]:
    """Compare the records of metrics, and recompute step counts, tokens and tokens/s.

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
        *_steps(rows, config, folder),
        *_tokens(rows, config),
        *_speed(rows),
        *_csv(folder, rows),
        *_tensorboard(folder, rows),
    ]
    more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [_summary(rows)], [*found[:_SHOWN], *more]


def _summary(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    tokens, wall = int(last["tokens"]), float(last["time_unix_s"]) - float(first["time_unix_s"])
    in_steps = sum(map(_seconds, rows, _step_counts(rows)))
    parts = [f"{len(rows)} rows", f"steps {first['step']} to {last['step']}", f"{tokens:,} tokens"]
    parts.append(f"{tokens / in_steps:,.0f} tokens/s in steps")
    if wall > 0:
        parts.append(f"{(tokens - int(first['tokens'])) / wall:,.0f} tokens/s by the clock")
    return ", ".join(parts)


def _step_counts(rows: Sequence[Row]) -> list[int]:
    """Steps that each row sums up."""
    steps = [int(row["step"]) for row in rows]
    return [after - before for before, after in itertools.pairwise([0, *steps])]


def _seconds(row: Row, steps: int) -> float:
    return float(row["step_time_ms"]) * steps / 1000


def _steps(rows: Sequence[Row], config: TrainConfig, folder: RunFolder) -> Iterator[str]:
    steps = [int(row["step"]) for row in rows]
    for before, after in itertools.pairwise(steps):
        if after <= before:
            yield f"metrics.jsonl: step {after} follows step {before}"
    resumptions = [run for run in folder.launches() if run["resumed_from_step"] is not None]
    if any(_DECIDE_ROWS & run["overrides"].keys() for run in resumptions):
        return
    every = [config.log_every] + ([config.eval_every] if config.eval_windows else [])
    due = {step for n in every if n for step in range(n, steps[-1] + 1, n)}
    due |= {config.steps} & set(range(steps[-1] + 1))
    for step in sorted(due - set(steps)):
        yield f"metrics.jsonl: no row for step {step}"
    for step in sorted(set(steps) - due - folder.former_ends()):
        yield f"metrics.jsonl: a row for step {step}, where none is due"


def _tokens(rows: Sequence[Row], config: TrainConfig) -> Iterator[str]:
    for row in rows:
        expected = int(row["step"]) * config.global_batch * config.seq_len
        if row["tokens"] != expected:
            rule = f"{expected} = step * global_batch * seq_len"
            yield f"step {row['step']}: {row['tokens']} tokens recorded, {rule}"


def _speed(rows: Sequence[Row]) -> Iterator[str]:
    tokens, clock = 0, -math.inf
    for row, steps in zip(rows, _step_counts(rows), strict=True):
        step, seconds, claimed = row["step"], _seconds(row, steps), float(row["tokens_per_s"])
        speed = (int(row["tokens"]) - tokens) / seconds if seconds > 0 else math.nan
        if not math.isclose(speed, claimed, rel_tol=1e-6):
            found = f"{claimed:,.1f} tokens/s recorded, {speed:,.1f} from tokens and step times"
            yield f"step {step}: {found}"
        wall = float(row["time_unix_s"]) - clock
        if seconds > wall * (1 + _CLOCK_SLACK) + _CLOCK_SLACK_S:
            found = f"{seconds:.2f} s spent in steps, but {wall:.2f} s by the clock"
            yield f"step {step}: {found} since the row before"
        waiting, whole = row["data_time_ms"], row["step_time_ms"]
        if not 0 <= float(waiting) <= float(whole):
            yield f"step {step}: data_time_ms {waiting} lies outside step_time_ms {whole}"
        tokens, clock = int(row["tokens"]), float(row["time_unix_s"])


def _csv(folder: RunFolder, rows: Sequence[Row]) -> Iterator[str]:
    if not folder.metrics_csv.exists():
        yield "metrics.csv: missing"
        return
    with folder.metrics_csv.open(newline="", encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    if len(cells) != len(rows):
        yield f"metrics.csv: {len(cells)} rows, metrics.jsonl has {len(rows)}"
        return
    wanted, found = dict[tuple[int, str], str](), dict[tuple[int, str], str]()
    for row, cell in zip(rows, cells, strict=True):
        wanted |= {(int(row["step"]), name): str(value) for name, value in row.items()}
        found |= {(int(row["step"]), name): text for name, text in cell.items() if text}
    yield from _compared("metrics.csv", wanted, found)


def _tensorboard(folder: RunFolder, rows: Sequence[Row]) -> Iterator[str]:
    wanted = {
        (int(row["step"]), name): float(np.float32(value))
        for row in rows
        for name, value in row.items()
        if not isinstance(value, str) and name not in ("step", "time_unix_s")
    }
    yield from _compared("TensorBoard", wanted, read_scalars(folder))


def _compared(where: str, wanted: Values, found: Values) -> Iterator[str]:
    """Disagreements with metrics.jsonl; values are looked up by (step, name)."""
    for key in sorted(wanted.keys() | found.keys()):
        if str(wanted.get(key)) != str(found.get(key)):  # as text, since NaN differs from itself
            (step, name), right = key, wanted.get(key)
            yield f"step {step}: {name} is {found.get(key)} in {where}, {right} in metrics.jsonl"


def read_scalars(folder: RunFolder) -> dict[tuple[int, str], float]:
    """What TensorBoard shows: value by (step, name), without what a resumption took back."""
    found: dict[tuple[int, str], float] = {}
    for path in sorted(folder.tensorboard.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                found = {key: value for key, value in found.items() if key[0] < event.step}
            for value in event.summary.value:
                found[event.step, value.tag] = value.simple_value
    return found
