"""Cases that resume a run: its losses must be those of a run without an interruption."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsa.train.checkpoint import list_checkpoints
from nsa.train.load import load_config
from nsa.train.telemetry.metrics import Row as MetricsRow
from nsa.train.telemetry.metrics import read_metrics
from tools.accept.case import Result, Setting, changes, train_words
from tools.accept.programs import say, wait

STEPS = 120
CHECKPOINTS = 6  # in a run
WITHIN_NATS = 2e-4  # on two processes instead of one, which add in another order
POLL_S = 0.02
# A row for each step, and evaluations between the checkpoints.
_EVERY = STEPS // CHECKPOINTS
_SHORT = [
    *("--steps", str(STEPS), "--log-every", "1", "--sample-tokens", "0"),
    *("--checkpoint-every", str(_EVERY), "--keep-checkpoints", str(CHECKPOINTS)),
    *("--eval-every", str(_EVERY + _EVERY // 2), "--eval-windows", "4"),
]


def killed_and_resumed(setting: Setting) -> Result:
    """SIGKILL at a random step, twice, and resumption: equal losses, bit for bit.

    The uninterrupted run goes on at the same time.
    """
    whole, killed, log = (setting.folder / name for name in ("whole", "killed", "whole.txt"))
    kills = kill_steps(random.Random())
    with setting.start(_train(setting, whole), log) as process:
        faults = list(_kill(setting, killed, kills))
        fault = wait(process, log, setting.seconds_left)
    faults += [f"the uninterrupted run: {fault}"] if fault else []
    return _result(f"killed at steps {kills[0]} and {kills[1]}", faults, whole, killed, 0.0)


def resumed_on_two(setting: Setting) -> Result:
    """A run of one GPU goes on with two from its middle: losses equal within rounding."""
    whole, two, log = (setting.folder / name for name in ("whole", "two", "whole.txt"))
    fault = setting.run(_train(setting, whole), log)
    if fault:
        return Result(faults=[f"on one GPU: {fault}"])
    shutil.copytree(whole, two)
    for path in list_checkpoints(two / "checkpoints")[CHECKPOINTS // 2 :]:
        shutil.rmtree(path)
    config = load_config(setting.case.config)
    halved = changes(config, world_size=2, accumulation=config.accumulation // 2)
    fault = setting.run([*train_words(2), "--resume", str(two), *halved])
    return _result("", [f"on two GPUs: {fault}"] if fault else [], whole, two, WITHIN_NATS)


def kill_steps(rng: random.Random) -> tuple[int, int]:
    """Steps to kill at: each after two checkpoints, of which the first is complete then."""
    return rng.randint(2 * _EVERY + 1, 3 * _EVERY), rng.randint(4 * _EVERY + 1, 5 * _EVERY)


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
    if [row["step"] for row in expected] != [row["step"] for row in found]:
        yield f"{len(found)} of {len(expected)} rows"
        return
    off = [
        (abs(float(row[name]) - float(other[name])), name, int(row["step"]))
        for row, other in zip(expected, found, strict=True)
        for name in ("loss_nats", "val_loss_nats")
        if name in row
    ]
    apart = [one for one in off if not one[0] <= within]
    if apart:
        _, name, step = apart[0]
        largest = f"up to {max(apart)[0]:.3g} nats"
        yield f"{len(apart)} of {len(off)} losses differ, from {name} of step {step}: {largest}"


def _train(setting: Setting, run: Path) -> list[str]:
    return [*train_words(1), setting.case.config, "--run-dir", str(run), *_SHORT]


def _kill(setting: Setting, run: Path, kills: Sequence[int]) -> Iterator[str]:
    """Start, kill at each step and resume until the end; yields what went wrong."""
    words = _train(setting, run)
    for step in kills:
        with setting.start(words) as process:
            fault = _wait_for(process, run, step, setting.seconds_left)
            if fault:
                yield fault
                return
            process.kill()  # alone: what it has started notices by itself
            process.wait()
        say(f"    killed after step {_last_step(run)}")
        words = [*train_words(1), "--resume", str(run)]
    fault = setting.run(words)
    if fault:
        yield f"the resumed run: {fault}"


def _wait_for(process: subprocess.Popen[bytes], run: Path, step: int, limit_s: float) -> str:
    """Wait until the run has come to a step and has a checkpoint; otherwise why not."""
    end = time.monotonic() + limit_s
    while _last_step(run) < step or not list_checkpoints(run / "checkpoints"):
        if process.poll() is not None:
            return f"ended with exit code {process.poll()} before it was killed at step {step}"
        if time.monotonic() > end:
            return f"did not come to step {step} within {limit_s:.0f} s"
        time.sleep(POLL_S)
    return ""


def _rows(run: Path) -> list[MetricsRow]:
    path = run / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def _last_step(run: Path) -> int:
    rows = _rows(run)
    return int(rows[-1]["step"]) if rows else 0


def _result(remark: str, faults: list[str], whole: Path, other: Path, within: float) -> Result:
    """Compare two runs; their checkpoints, which are large, are removed where all went well."""
    rows = _rows(whole)
    faults += differences(rows, _rows(other), within=within) if not faults else ()
    for run in (whole, other) if not faults else ():
        shutil.rmtree(run / "checkpoints")
    losses = [row["loss_nats"] for row in rows]
    figures = {"loss_first": losses[0], "loss_last": losses[-1]} if losses else {}
    return Result(figures, [f"{STEPS} steps" + f", {remark}" * bool(remark)], faults)
