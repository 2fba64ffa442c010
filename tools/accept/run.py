"""Runs legs: case after case, each ends in a row, whatever happens in it."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from nsa.errors import UserError
from tools.accept.case import Case, Machine, Result, Setting
from tools.accept.figures import loss_faults, plan_faults
from tools.accept.legs import TRAINING, Leg
from tools.accept.programs import ROOT, last_lines, say, threads
from tools.accept.rows import COMMITTED, QUICK, Row, append_row, committed_row
from tools.accept.training import planned_mib

LEG_LIMIT_S = 530.0
LEAST_S = 5.0  # with less left, a case is not begun
SHOWN_LINES = 15
NOT_BEGUN = "not begun: the leg's time was used up"
# Figures of a row, and to how many digits they are rounded.
DIGITS = {
    "tokens_per_s": 0,
    "mfu": 4,
    "compilations_after_5": 0,
    "slowest_over_median": 2,
    "host_ms": 2,
    "peak_mib": 1,
    "plan_mib": 1,
    "loss_first": 5,
    "loss_last": 5,
}


def run_leg(
    leg: Leg,
    out: Path,
    machine: Machine,
    *,
    limit_s: float = LEG_LIMIT_S,
    shards: Path | None = None,
    committed: Path = ROOT / COMMITTED,
) -> list[Row]:
    """Run the cases of a leg that this machine has GPUs for, see :class:`Leg`.

    Args:
        leg: what to run.
        out: folder for the rows, ``leg-<n>.jsonl`` or ``quick.jsonl``, runs and logs; may exist.
        machine: what is measured.
        limit_s: for the whole leg, seconds.
        shards: prepared data, see :class:`Setting`.
        committed: folder of the rows whose last losses are compared.

    Returns:
        A row for each case that was run.
    """
    begin, rows = time.monotonic(), dict[str, Row]()
    path = out / (f"{leg.name}.jsonl" if leg.name == QUICK else f"leg-{leg.name}.jsonl")
    numbers, lock = {case.name: number for number, case in enumerate(leg.cases, 1)}, Lock()

    def run_one(case: Case) -> None:
        where = f"[{leg.name}] {numbers[case.name]}/{len(leg.cases)} {case.name}"
        if case.num_gpus > machine.num_gpus:
            say(f"{where}: left out, it needs {case.num_gpus} GPU{'s' * (case.num_gpus > 1)}")
            return
        say(f"{where}, about {case.expected_s:.0f} s")
        row = run_case(Setting(case, machine, leg.name, out, begin + limit_s, shards), committed)
        with lock:
            rows[case.name] = row
            append_row(path, row)

    def run_lane(lane: Sequence[Case]) -> None:
        for case in lane:
            run_one(case)

    run_lane(leg.timed(machine.num_gpus))
    lanes = leg.lanes(machine.num_gpus)
    with threads(max(len(lanes), 1)) as pool:
        for _ in pool.map(run_lane, lanes):
            pass
    say(f"[{leg.name}] {time.monotonic() - begin:.0f} s, {len(rows)} rows in {path}")
    return [rows[case.name] for case in leg.cases if case.name in rows]


def run_case(setting: Setting, committed: Path) -> Row:
    """Run one case and judge it; on failure the end of its log is shown."""
    shutil.rmtree(setting.folder, ignore_errors=True)
    setting.folder.mkdir(parents=True)
    result, plan_mib, begin = Result(faults=[NOT_BEGUN]), None, time.monotonic()
    try:
        if setting.seconds_left >= LEAST_S:
            # No peak is measured on a CPU.
            if setting.case.do in TRAINING and setting.machine.num_gpus:
                plan_mib, begin = planned_mib(setting), time.monotonic()
            result = setting.case.do(setting)
    except (UserError, OSError) as error:  # a record that cannot be read, a full disk
        result = Result(faults=[str(error)])
    figures = {**result.figures, "plan_mib": plan_mib}
    row = Row(
        config=setting.case.name,
        **{name: _rounded(figures.get(name), digits) for name, digits in DIGITS.items()},
        passed=False,
        gpu=setting.machine.gpu,
        commit=setting.machine.commit,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        note="; ".join(result.remarks),
        seconds=round(time.monotonic() - begin, 1),
        leg=setting.leg,
    )
    known = committed_row(row, committed)
    faults = [*result.faults, *plan_faults(figures.get("peak_mib"), plan_mib)]
    faults += loss_faults(row.loss_last, known.loss_last if known else None)
    failed = [f"failed: {'; '.join(faults)}"] if faults else []
    row = replace(row, passed=not faults, note="; ".join([*result.remarks, *failed]))
    verdict = "FAILED" if faults else "passed"
    say(f"    {row.config}: {verdict} in {row.seconds:.0f} s: {row.note}")
    for line in last_lines(setting.log, SHOWN_LINES) if faults else ():
        say(f"    | {line}")
    if faults:
        say(f"    all of it: {setting.folder}")
    return row


def _rounded(value: Any, digits: int) -> Any:
    """None for a value that is not finite, too, for which JSON has no form."""
    return round(value, digits) if value is not None and math.isfinite(value) else None
