"""``python -m tools.evidence run`` and ``python -m tools.evidence report``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.evidence.report import write_report
from tools.evidence.run import experiments, run_all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 1 if an experiment failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.evidence", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="train and measure; the same command continues what is not finished",
        description="Finished rows are in OUT/rows; copy them to benchmarks/quality.",
    )
    run.add_argument("--data", type=Path, required=True, help="books, made by nsa data prepare")
    run.add_argument("--out", type=Path, required=True, help="folder for everything")
    run.add_argument("--only", nargs="+", help="some experiments, such as 2k/nsa-1337, or groups")
    run.add_argument("--commit", help="commit to record if the checkout has no git")
    report = commands.add_parser("report", help="write the tables and plots of the committed rows")
    report.add_argument("--rows", type=Path, default=Path("benchmarks/quality"), help="the rows")
    report.add_argument("--plots", type=Path, default=Path("docs/results"), help="for the plots")
    options = parser.parse_args(arguments)
    if options.command == "report":
        return write_report(options.rows, options.plots)
    known = [*experiments()]
    chosen = [one for one in known if not options.only or {one.group, one.folder} & {*options.only}]
    if unknown := {*(options.only or ())} - {x for one in known for x in (one.group, one.folder)}:
        parser.error(f"--only must name experiments or groups, got {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run_all(chosen, options.data, options.out, options.commit)


if __name__ == "__main__":
    sys.exit(main())
