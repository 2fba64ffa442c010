"""``python -m tools.accept``: run the acceptance cases, merge rows of legs, make the page."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from nsa.errors import UserError, check
from tools.accept.legs import Leg, chosen_legs
from tools.accept.programs import ROOT, run_program
from tools.accept.rows import COMMITTED, Row, merge
from tools.accept.run import LEG_LIMIT_S, read_committed, run_leg
from tools.accept.setting import look_at_machine
from tools.accept.shards import make_shards
from tools.accept.table import page, terminal_table

PAGE = "README.md"
OUT = Path("runs/acceptance")
EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130

RUN = """\
Run the product as a user does, case after case, on the GPU of this machine. Without --quick or
--leg all legs run one after the other. Other words:
  python -m tools.accept merge FOLDER... --into benchmarks/acceptance/h200.jsonl
  python -m tools.accept page
  python -m tools.accept shards --out FOLDER
What is run, and how to read the table: docs/acceptance.md.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 1 if a case failed, 2 for a mistake in what was given."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"merge": _merge, "page": _page, "shards": _shards}
    try:
        if words and words[0] in commands:
            return commands[words[0]](words[1:])
        return _run(words)
    except UserError as error:
        print(f"accept: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("accept: interrupted; the rows of the cases that ended are kept", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(words: Sequence[str]) -> int:
    options = _run_options(words)
    legs = chosen_legs(quick=options.quick, leg=options.leg, only=options.only)
    if options.list:
        print("\n".join(_list_lines(legs)))
        return 0
    shards = None if options.shards is None else options.shards.absolute()
    found = shards is None or (shards / "index.json").is_file()
    check(found, "accept", "--shards", "be a folder made by nsa data prepare", shards)
    # Programs run in sessions of their own: without this, SIGTERM would leave them behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = look_at_machine(options.commit)
    _say(f"{machine.gpu}, {machine.num_gpus} GPUs, commit {machine.commit}")
    committed = read_committed(machine, ROOT)
    rows: list[Row] = []
    for leg in legs:
        rows += run_leg(
            leg,
            options.out.absolute(),
            machine,
            limit_s=options.limit_s,
            shards=shards,
            committed=committed,
            say=_say,
        )
    if not rows:
        _say("no case ran: each needs more GPUs than there are")
        return EXIT_FAILED
    _say(terminal_table(rows))
    return 0 if all(row.passed for row in rows) else EXIT_FAILED


def _run_options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.accept",
        description=RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one leg: 60 steps of the main configurations")
    add("--leg", metavar="N", help="one leg of the full run")
    add("--only", nargs="+", metavar="CASE", default=[], help="some cases, by name")
    add("--list", action="store_true", help="print legs, cases and expected times alone")
    add("--out", type=Path, default=OUT, help=f"folder for rows, runs and logs ({OUT})")
    add("--shards", type=Path, metavar="FOLDER", help="prepared data (default: made here)")
    limit_help = f"seconds for a leg ({LEG_LIMIT_S:.0f})"
    add("--limit-s", type=float, default=LEG_LIMIT_S, metavar="S", help=limit_help)
    add("--commit", metavar="ID", help="commit to record where the checkout has no git")
    return parser.parse_args(words)


def _list_lines(legs: Sequence[Leg]) -> list[str]:
    lines = []
    for leg in legs:
        lines.append(f"leg {leg.name}: about {leg.expected_s / 60:.1f} minutes on an H200")
        for case in leg.cases:
            needs = f", needs {case.num_gpus} GPUs" if case.num_gpus > 1 else ""
            lines.append(f"  {case.name:28} {case.expected_s:4.0f} s{needs}")
    return lines


def _merge(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.accept merge", description=merge.__doc__)
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="FOLDER", help="folders of --out, or files")
    add("--into", type=Path, required=True, metavar="FILE", help="named after the GPU: h200.jsonl")
    add("--allow-mixed", action="store_true", help="take rows of several commits")
    options = parser.parse_args(words)
    rows = merge(options.sources, options.into, allow_mixed=options.allow_mixed)
    print(terminal_table(rows))
    print(f"{len(rows)} rows in {options.into}")
    return 0


def _page(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.accept page", description=page.__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / COMMITTED, help="of the rows")
    folder: Path = parser.parse_args(words).folder
    files = list(folder.glob("*.jsonl"))
    check(bool(files), "page", "--folder", "hold rows (*.jsonl)", folder)
    (folder / PAGE).write_text(page(files), encoding="utf-8")
    print(folder / PAGE)
    return 0


def _shards(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.accept shards",
        description="Make shards of FineWeb's form, for a machine without the package datasets.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="gets fineweb/ and shards/")
    out: Path = parser.parse_args(words).out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    prepared = make_shards(out, functools.partial(run_program, env={}, say=_say))
    print(prepared.fault or f"shards: {prepared.folder}")
    return EXIT_FAILED if prepared.fault else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
