"""Cases that resume a run: its losses must be those of a run that nobody disturbed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsa.train.checkpoint import list_checkpoints
from nsa.train.load import load_config
from nsa.train.telemetry.metrics import Row as MetricsRow
from nsa.train.telemetry.metrics import read_metrics
from tools.accept.case import Case, Finding
from tools.accept.figures import Figures
from tools.accept.programs import Ended, Program
from tools.accept.setting import NSA, TORCHRUN, Setting

STEPS = 120
CHECKPOINTS = 6  # in a run
WITHIN_NATS = 2e-4  # on two processes instead of one, which add in another order
COMPARED = ("loss_nats", "val_loss_nats")
POLL_S = 0.02


def killed_and_resumed(case: Case, setting: Setting) -> Finding:
    """SIGKILL at a random step, twice, and resumption: equal losses, bit for bit.

    The undisturbed run goes on at the same time.
    """
    folder = setting.empty_folder(case.name)
    whole, broken = folder / "whole", folder / "broken"
    log = folder / "log.txt"
    kills = kill_steps(random.Random())
    with setting.start(_words(case, whole), folder / "whole.txt") as undisturbed:
        faults = list(_kill(setting, case, broken, log, kills))
        ended = undisturbed.wait(setting.seconds_left(case.limit_s), setting.say)
    if ended.fault:
        faults.append(f"the undisturbed run: {ended.fault}")
    if not faults:
        faults = list(differences(_rows(whole), _rows(broken), within=0.0))
    remarks = (f"{STEPS} steps, killed at steps {kills[0]} and {kills[1]}",)
    return _finding(log, whole, remarks, faults, (whole, broken))


def resumed_on_two(case: Case, setting: Setting) -> Finding:
    """A run of one GPU goes on with two from its middle: losses equal within rounding."""
    folder = setting.empty_folder(case.name)
    whole, two, log = folder / "whole", folder / "two", folder / "log.txt"
    keep_all = ["--keep-checkpoints", str(CHECKPOINTS)]
    ended = setting.run([*_words(case, whole), *keep_all], folder / "whole.txt", case.limit_s)
    faults = [f"on one GPU: {ended.fault}"] if ended.fault else []
    if not faults:
        shutil.copytree(whole, two)
        checkpoints = list_checkpoints(two / "checkpoints")
        for path in checkpoints[len(checkpoints) // 2 :]:
            shutil.rmtree(path)
        words = [*TORCHRUN, "2", *NSA[1:], "train", "--resume", str(two), *_halved(case)]
        ended = setting.run(words, log, case.limit_s)
        faults = [f"on two GPUs: {ended.fault}"] if ended.fault else []
    if not faults:
        faults = list(differences(_rows(whole), _rows(two), within=WITHIN_NATS))
    return _finding(log, whole, (f"{STEPS} steps",), faults, (whole, two))


def kill_steps(rng: random.Random) -> tuple[int, int]:
    """Steps to kill at: each after two checkpoints, of which the first is complete then."""
    every = STEPS // CHECKPOINTS
    return rng.randint(2 * every + 1, 3 * every), rng.randint(4 * every + 1, 5 * every)


def differences(
    expected: Sequence[MetricsRow],
    found: Sequence[MetricsRow],
    *,
    within: float,
) -> Iterator[str]:
    """Where the losses of two runs differ.

    Args:
        expected: rows of one run.
        found: rows of the other one.
        within: largest difference that is allowed, nats.

    Yields:
        Missing rows; otherwise how many losses are too far off, the first one and the largest.
    """
    theirs = {int(row["step"]): row for row in found}
    missing = [int(row["step"]) for row in expected if int(row["step"]) not in theirs]
    if missing or len(theirs) != len(expected):
        yield f"{len(theirs)} of {len(expected)} rows"
        return
    off = [
        (abs(float(row[name]) - float(theirs[int(row["step"])][name])), name, int(row["step"]))
        for row in expected
        for name in COMPARED
        if name in row
    ]
    apart = [item for item in off if not item[0] <= within]
    if apart:
        _, name, step = apart[0]
        largest = f"up to {max(apart)[0]:.3g} nats"
        yield f"{len(apart)} of {len(off)} losses differ, from {name} of step {step}: {largest}"


def _words(case: Case, run: Path) -> list[str]:
    """A short run with a row for each step, some checkpoints, and evaluations between them."""
    every = STEPS // CHECKPOINTS
    settings = {
        "steps": STEPS,
        "log-every": 1,
        "checkpoint-every": every,
        "eval-every": every + every // 2,
        "eval-windows": 4,
        "sample-tokens": 0,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*NSA, "train", case.config, "--run-dir", str(run), *words]


def _halved(case: Case) -> list[str]:
    """Words that share the batch of one process between two."""
    config = load_config(case.config)
    if config.accumulation % 2 == 0:
        return ["--world-size", "2", "--accumulation", str(config.accumulation // 2)]
    return ["--world-size", "2", "--micro-batch", str(config.micro_batch // 2)]


def _kill(
    setting: Setting,
    case: Case,
    run: Path,
    log: Path,
    kills: Sequence[int],
) -> Iterator[str]:
    """Start, kill at each step and resume until the end; yields what went wrong."""
    words = _words(case, run)
    for step in kills:
        with setting.start(words, log) as program:
            fault = _wait_for(program, run, step, setting.seconds_left(case.limit_s))
            if fault:
                yield fault
                return
            program.kill()
        setting.say(f"    killed after step {_last_step(run)}")
        words = [*NSA, "train", "--resume", str(run)]
    ended: Ended = setting.run(words, log, case.limit_s)
    if ended.fault:
        yield f"the resumed run: {ended.fault}"


def _wait_for(program: Program, run: Path, step: int, limit_s: float) -> str:
    """Until the run has come to a step and has a checkpoint; otherwise why not."""
    while _last_step(run) < step or not list_checkpoints(run / "checkpoints"):
        if program.code is not None:
            return f"ended with exit code {program.code} before it was killed at step {step}"
        if program.seconds > limit_s:
            return f"did not come to step {step} within {limit_s:.0f} s"
        program.pause(POLL_S)
    return ""


def _rows(run: Path) -> list[MetricsRow]:
    path = run / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def _last_step(run: Path) -> int:
    rows = _rows(run)
    return int(rows[-1]["step"]) if rows else 0


def _finding(
    log: Path,
    whole: Path,
    remarks: Sequence[str],
    faults: Sequence[str],
    runs: Sequence[Path],
) -> Finding:
    """What was found; checkpoints, which are large, go where all went well."""
    rows = _rows(whole)
    losses = [float(row["loss_nats"]) for row in rows]
    figures = Figures()
    if losses:
        figures = Figures(steps=len(losses), loss_first=losses[0], loss_last=losses[-1])
    for run in runs if not faults else ():
        shutil.rmtree(run / "checkpoints")
    return Finding(log, figures, None, tuple(remarks), tuple(faults))
