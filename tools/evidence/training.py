"""A training in legs: stopped by SIGTERM after some minutes, and resumed from its checkpoint."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nsa.cli.train import EXIT_SIGNAL
from nsa.train.checkpoint import list_checkpoints, step_of
from nsa.train.run_folder import RunFolder
from tools.accept.programs import ROOT, last_lines, say, start
from tools.evidence.experiments import Experiment

STOPPED = EXIT_SIGNAL + signal.SIGTERM  # docs/failures.md
STOP_S = 180.0  # from SIGTERM, for a checkpoint, to SIGKILL
POLL_S, LINE_S = 0.2, 60.0

Leg = dict[str, Any]


def nsa(out: Path, *words: str) -> list[str]:
    """``nsa`` in a folder: with paths relative to it, records name none of the machine."""
    return ["env", "-C", str(out), sys.executable, "-m", "nsa", *words]


def environment(gpu: str) -> dict[str, str]:
    """Environment in which ``nsa`` finds this checkout from any folder, and one GPU.

    Args:
        gpu: value of CUDA_VISIBLE_DEVICES.
    """
    places = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path = os.pathsep.join(str(Path(place).absolute()) for place in places if place)
    return {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": gpu}


def train(
    experiment: Experiment, out: Path, env: dict[str, str], leg_s: float
) -> tuple[list[Leg], str]:
    """Train to the end; a run with a checkpoint goes on from there.

    ``logs/<name>/legs.jsonl`` gets a line for each leg: begin and end (UTC), seconds, exit code,
    last step with a checkpoint.

    Args:
        experiment: what to train.
        out: folder where it runs, with ``runs/`` and ``logs/``.
        env: see :func:`environment`.
        leg_s: seconds after which a leg is stopped; it does steps in any case.

    Returns:
        The legs, and what went wrong.
    """
    run, logs = out / "runs" / experiment.name, out / "logs" / experiment.name
    if not _done(run)[0]:  # nothing to go on from
        for folder in (run, logs):
            shutil.rmtree(folder, ignore_errors=True)
    limit_s, path = leg_s if experiment.in_legs else math.inf, logs / "legs.jsonl"
    fault, code, before = _unfinished(run), STOPPED, (-1, -1)
    while fault and code in (0, STOPPED) and _done(run) != before:
        before, place = _done(run), f"runs/{run.name}"
        words = ["--resume", place]
        if not before[0]:
            words = [*shlex.split(experiment.train), "--run-dir", place]
        leg = _leg(nsa(out, "train", *words), logs / "train.txt", env, run, limit_s)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(leg) + "\n")
        say(f"{run.name}: leg ended, {json.dumps(leg)}")
        code, fault = leg["exit_code"], _unfinished(run)
    return read_lines(path), fault if code in (0, STOPPED) else f"nsa train: exit code {code}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file; none without one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _leg(words: list[str], log: Path, env: dict[str, str], run: Path, limit_s: float) -> Leg:
    begin = shown = time.time()
    first = _newest_row(run)
    with start(words, log, env) as process:
        while process.poll() is None:
            now, newest = time.time(), _newest_row(run)
            if now - begin >= limit_s and first < newest < _steps(run):
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
                break  # the context ends what is left
            if now - shown >= LINE_S:
                shown = now
                say(f"{run.name}: {''.join(last_lines(log, 1))[:110]}")
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    moments = (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) for at in (begin, time.time()))
    figures = (*moments, round(time.time() - begin, 1), process.returncode, _done(run)[0])
    return dict(zip(("begin", "end", "seconds", "exit_code", "last_step"), figures, strict=True))


def _unfinished(run: Path) -> str:
    """Why a run is not finished; empty where it is."""
    if not _done(run)[0]:
        return "nsa train left no checkpoint"
    done, steps = min(_done(run)), _steps(run)
    return "" if done == steps else f"nsa train ended after step {done} of {steps}"


def _done(run: Path) -> tuple[int, int]:
    """Last steps with a checkpoint and with a row, which a stop may leave to the next leg."""
    checkpoints = map(step_of, list_checkpoints(run / "checkpoints"))
    return max(checkpoints, default=0), _newest_row(run)


def _newest_row(run: Path) -> int:
    """Step of the newest row of metrics; 0 without one."""
    lines = last_lines(run / "metrics.jsonl", 1)
    with suppress(ValueError):  # half of a row, which is being written
        return int(json.loads(lines[0])["step"]) if lines else 0
    return 0


def _steps(run: Path) -> int:
    return RunFolder.open(run).load_config().steps
