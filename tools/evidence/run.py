"""Runs experiments, as many at a time as there are GPUs, and collects what comes of each."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

from nsa.files import replace_text
from tools.accept import programs
from tools.accept.programs import last_lines, say, threads
from tools.evidence.experiments import BOOKS, Command, Experiment
from tools.evidence.rows import FAILED, ROW, collect, make_row
from tools.evidence.training import environment, nsa, train

COMMAND_LIMIT_S = 900.0
SHOWN_LINES = 15


def run_all(
    experiments: Sequence[Experiment],
    data: Path,
    out: Path,
    gpus: Sequence[str],
    *,
    commit: str,
    leg_s: float,
    until_s: float,
) -> int:
    """Run experiments, one at a time on each GPU.

    Args:
        experiments: in the order in which they begin.
        data: prepared data.
        out: folder for everything; what is finished there is not done again.
        gpus: values of CUDA_VISIBLE_DEVICES.
        commit: of the code, for the rows.
        leg_s: seconds of a leg.
        until_s: an experiment that takes longer than is left of these seconds is not begun.

    Returns:
        1 if one failed, otherwise 0.
    """
    begin, out, free = time.monotonic(), out.absolute(), SimpleQueue[str]()
    (out / "runs").mkdir(parents=True, exist_ok=True)
    (out / BOOKS).unlink(missing_ok=True)
    (out / BOOKS).symlink_to(data.absolute(), target_is_directory=True)
    for gpu in gpus:
        free.put(gpu)

    def run_one(experiment: Experiment) -> list[str]:
        """Faults of one that began."""
        name, started = experiment.name, time.monotonic()
        left, needed = until_s - (started - begin), experiment.expected_s
        if (out / name / ROW).exists():
            say(f"{name}: done before")
            return []
        if left < needed:
            say(f"{name}: not begun, it takes {needed:.0f} s, {max(left, 0.0):.0f} are left")
            return []
        gpu = free.get()
        where = f"GPU {gpu}" if gpu else "the CPU"
        say(f"{name}: begins on {where}, about {needed:.0f} s on an H100")
        try:
            faults = run_experiment(experiment, out, environment(gpu), commit, leg_s)
        except (ValueError, LookupError, OSError) as error:  # an unreadable record, a full disk
            faults = [f"{type(error).__name__}: {error}"]
        finally:
            free.put(gpu)
        verdict = f"FAILED: {'; '.join(faults)}" if faults else "done"
        say(f"{name}: {verdict} after {time.monotonic() - started:.0f} s")
        return faults

    with threads(len(gpus)) as pool:
        results = {experiment.name: pool.submit(run_one, experiment) for experiment in experiments}
        wait(results.values())
    bugs = {name: error for name, result in results.items() if (error := result.exception())}
    for error in bugs.values():
        traceback.print_exception(error)
    failed = [name for name, result in results.items() if name in bugs or result.result()]
    say(f"failed: {' '.join(failed)}" if failed else "all done")
    return 1 if failed else 0


def run_experiment(
    experiment: Experiment, out: Path, env: dict[str, str], commit: str, leg_s: float
) -> list[str]:
    """Train, do what is done afterwards, and collect; see :func:`run_all`.

    Returns:
        What went wrong. A command that fails costs its own file alone, and its row says so.
    """
    name = experiment.name
    run, folder, logs = out / "runs" / name, out / name, out / "logs" / name
    legs, fault = train(experiment, out, env, leg_s)
    if fault:
        _show(logs / "train.txt")
        return [fault]
    for place in (folder, run.with_name(f"{name}-profile")):  # of an attempt before
        shutil.rmtree(place, ignore_errors=True)
    folder.mkdir()
    run_one = functools.partial(_run_command, name=name, out=out, env=env)
    together = [command for command in experiment.afterwards if not command.alone]
    with ThreadPoolExecutor() as pool:
        results = [*pool.map(run_one, together)]
    results += [run_one(command) for command in experiment.afterwards if command.alone]
    faults = [fault for fault in results if fault]
    left_out = collect(experiment, run, folder, logs / "legs.jsonl")
    row = make_row(experiment, run, folder, legs, commit)
    row |= {"failed": faults, "left_out": left_out}
    replace_text(folder / ROW, json.dumps(row, indent=1) + "\n")
    say(f"{name}: {json.dumps(row)}")
    return faults


def _run_command(command: Command, name: str, out: Path, env: dict[str, str]) -> str:
    """One command on a finished run; what went wrong, and then its output has another name."""
    words = [word.format(run=f"runs/{name}", folder=name) for word in shlex.split(command.text)]
    say(f"$ nsa {shlex.join(words)}")
    log = out / "logs" / name / command.output
    log.unlink(missing_ok=True)
    fault = programs.run(nsa(out, *words), log, COMMAND_LIMIT_S, env)
    _, *lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if fault:
        _show(log)
        said = "".join(lines).replace(f"{out}/", "").replace(f"{programs.ROOT}/", "")
        path = (out / name / f"{FAILED}{command.output}").with_suffix(".txt")
        path.write_text(said, encoding="utf-8")
        return f"nsa {words[0]} for {command.output}: {fault}"
    if log.suffix == ".json":  # beside what was said on standard error
        lines = [line for line in lines if line.startswith("{")][-1:]
    (out / name / command.output).write_text("".join(lines), encoding="utf-8")
    return ""


def _show(log: Path) -> None:
    for line in last_lines(log, SHOWN_LINES):
        say(f"    | {line}")
