"""Runs legs: case after case, each ends in a row, whatever happens in it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from nsa.errors import UserError
from tools.accept.case import Case, Finding
from tools.accept.figures import loss_faults
from tools.accept.legs import KINDS, Leg
from tools.accept.programs import last_lines
from tools.accept.rows import COMMITTED, Row, append_row, committed_loss, gpu_stem, read_rows
from tools.accept.setting import Machine, Setting
from tools.accept.training import make_plans

LEG_LIMIT_S = 530.0
LEAST_S = 5.0  # with less left, a case is not begun
SHOWN_LINES = 15


def run_leg(
    leg: Leg,
    out: Path,
    machine: Machine,
    *,
    limit_s: float = LEG_LIMIT_S,
    shards: Path | None = None,
    committed: Sequence[Row] = (),
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Run the cases of a leg that this machine has GPUs for.

    Args:
        leg: what to run.
        out: folder for the rows, ``leg-<n>.jsonl`` or ``quick.jsonl``, runs and logs; may exist.
        machine: what is measured.
        limit_s: for the whole leg, seconds.
        shards: prepared data, see :class:`Setting`.
        committed: rows whose last losses are compared.
        say: told what happens, line by line.

    Returns:
        A row for each case that was run.
    """
    begin = time.monotonic()
    setting = Setting(out, machine, leg.name, begin + limit_s, shards, say=say)
    path = out / ("quick.jsonl" if setting.is_quick else f"leg-{leg.name}.jsonl")
    cases = [case for case in leg.cases if case.num_gpus <= machine.num_gpus]
    for case in leg.cases:
        if case not in cases:
            needs = f"{case.num_gpus} GPU{'s' * (case.num_gpus > 1)}"
            say(f"[{leg.name}] {case.name}: left out, it needs {needs}")
    make_plans(setting, [case.config for case in cases if case.trains_configuration])
    rows = []
    for number, case in enumerate(cases, start=1):
        say(f"[{leg.name}] {number}/{len(cases)} {case.name}, about {case.expected_s:.0f} s")
        row = run_case(case, setting, committed)
        append_row(path, row)
        rows.append(row)
    if rows:
        say(f"[{leg.name}] {time.monotonic() - begin:.0f} s, rows in {path}")
    return rows


def run_case(case: Case, setting: Setting, committed: Sequence[Row]) -> Row:
    """Run one case and judge it; on failure the end of its log is shown."""
    begin = time.monotonic()
    if setting.seconds_left(LEAST_S) < LEAST_S:
        fault = "not begun: the leg's time was used up"
        finding = Finding(setting.folder(case.name), faults=(fault,))
    else:
        try:
            finding = KINDS[case.kind](case, setting)
        except (UserError, OSError) as error:  # a record that cannot be read, a full disk
            finding = Finding(setting.folder(case.name) / "log.txt", faults=(str(error),))
    row = make_row(case, setting, finding, time.monotonic() - begin)
    expected = committed_loss(row, committed)
    faults = (*finding.faults, *loss_faults(row.loss_last, expected))
    if faults != finding.faults:
        finding = dataclasses.replace(finding, faults=faults)
        row = make_row(case, setting, finding, row.seconds)
    setting.say(f"    {'passed' if row.passed else 'FAILED'} in {row.seconds:.0f} s: {row.note}")
    if not row.passed:
        for line in last_lines(finding.log, SHOWN_LINES) if finding.log.is_file() else ():
            setting.say(f"    | {line}")
        setting.say(f"    all of it: {finding.log}")
    return row


def make_row(case: Case, setting: Setting, finding: Finding, seconds: float) -> Row:
    """The row of a case."""
    figures = finding.figures
    failed = f"failed: {'; '.join(finding.faults)}" if finding.faults else ""
    return Row(
        config=case.name,
        tokens_per_s=_rounded(figures.tokens_per_s, 0),
        mfu=_rounded(figures.mfu, 4),
        compilations_after_5=figures.compilations_after_5,
        slowest_over_median=_rounded(figures.slowest_over_median, 2),
        host_ms=_rounded(figures.host_ms, 2),
        peak_mib=_rounded(figures.peak_mib, 1),
        plan_mib=_rounded(finding.plan_mib, 1),
        loss_first=_rounded(figures.loss_first, 5),
        loss_last=_rounded(figures.loss_last, 5),
        passed=not finding.faults,
        gpu=setting.machine.gpu,
        commit=setting.machine.commit,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        note="; ".join(filter(None, (*finding.remarks, failed))),
        seconds=round(seconds, 1),
        leg=setting.leg,
    )


def _rounded(value: float | None, digits: int) -> float | None:
    """None for a value that is not finite, too, for which JSON has no form."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


def read_committed(machine: Machine, folder: Path) -> list[Row]:
    """Committed rows of this kind of GPU; none where there is no file."""
    path = folder / COMMITTED / f"{gpu_stem(machine.gpu)}.jsonl"
    return read_rows(path) if path.exists() else []
