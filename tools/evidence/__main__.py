"""``python -m tools.evidence``: train and measure, take what came of it, make the report."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nsa.errors import check
from nsa.train.environment import code_version
from tools.command import run as run_command
from tools.evidence.arms import take_folders
from tools.evidence.experiments import EXPERIMENTS
from tools.evidence.report import write_report
from tools.evidence.run import run_all

EXIT_INTERRUPTED = 130


def run(
    *,
    data: Path,
    out: Path,
    only: tuple[str, ...] = (),
    gpus: str | None = None,
    leg_s: float = 520.0,
    until_s: float = math.inf,
    commit: str | None = None,
) -> int:
    """Train and measure models of equal data: NSA beside dense.

    Exit code 1 if an experiment failed; the others go on. OUT gets a folder of small files for
    each finished one, and runs/ and logs/. Ctrl-C or SIGTERM end it, and the same command goes on
    with what is not finished, from the last checkpoints. Also:
      python -m tools.evidence take OUT
      python -m tools.evidence report

    Args:
        data: books as bytes, made by nsa data prepare with a test split
        out: folder for everything
        only: some experiments, by name, in this order
        gpus: GPUs to use, one experiment on each at a time, for example 0,1 (default all)
        leg_s: seconds after which the run of 50,000 steps is stopped and resumed
        until_s: begin nothing that takes longer than what is left of these seconds
        commit: commit to record where the checkout has no git
    """
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    for name in only:
        check(name in known, "evidence", "--only", f"name some of {', '.join(known)}", name)
    made = (data / "index.json").is_file()
    check(made, "evidence", "--data", "be a folder made by nsa data prepare", data)
    code = code_version()
    found = commit or f"{code['commit'] or ''}{'+changes' * bool(code['dirty'])}"
    check(bool(found), "evidence", "--commit", f"be given ({code['note']})", commit)
    places = gpus.split(",") if gpus else [str(n) for n in range(torch.cuda.device_count())]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [known[name] for name in only or known]
    return run_all(chosen, data, out, places or [""], commit=found, leg_s=leg_s, until_s=until_s)


def take(out: Path, *, rows: Path = Path("benchmarks/quality")) -> int:
    """Copy the folders of finished experiments to where rows are committed.

    Args:
        out: folder of `python -m tools.evidence run`
        rows: folder for 50k/, 2k/, long/ and the others
    """
    take_folders(out, rows)
    return 0


def report(*, rows: Path = Path("benchmarks/quality"), out: Path = Path("docs/results")) -> int:
    """Make the page on what models learn from committed rows.

    Args:
        rows: folder of the rows
        out: folder for learning.md and its plots
    """
    print(write_report(rows, out))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 1 if an experiment failed, 2 for a mistake in what was given."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    commands: dict[str, Callable[..., int]] = {"run": run, "take": take, "report": report}
    name = words.pop(0) if words and words[0] in commands else "run"
    try:
        return run_command(f"evidence {name}", commands[name], words)
    except KeyboardInterrupt:
        print("evidence: interrupted; the same command goes on", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
