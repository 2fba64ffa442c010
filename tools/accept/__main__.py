"""``python -m tools.accept``: run the acceptance cases, merge rows of legs, make the page."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nsa.errors import check
from tools.accept.case import look_at_machine
from tools.accept.legs import chosen_legs
from tools.accept.programs import ROOT, say
from tools.accept.rows import COMMITTED, Row, merge_rows, terminal_table
from tools.accept.rows import page as page_text
from tools.accept.run import LEG_LIMIT_S, run_leg
from tools.accept.shards import make_shards
from tools.command import run

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
SHARDS_LIMIT_S = 600.0


def accept(
    *,
    quick: bool = False,
    leg: str | None = None,
    only: tuple[str, ...] = (),
    list: bool = False,
    out: Path = Path("runs/acceptance"),
    shards: Path | None = None,
    limit_s: float = LEG_LIMIT_S,
    commit: str | None = None,
) -> int:
    """Run the product as a user does, case after case, on the GPU of this machine.

    Without --quick or --leg all legs run one after the other. Exit code 1 if a case failed. Also:
      python -m tools.accept merge FOLDER... --into benchmarks/acceptance/h200.jsonl
      python -m tools.accept page
      python -m tools.accept shards --out FOLDER
    What is run, and how to read the table: docs/acceptance.md.

    Args:
        quick: one leg: 60 steps of the main configurations
        leg: number of one leg of the full run
        only: some cases, by name
        list: print legs, cases and expected times alone
        out: folder for rows, runs and logs
        shards: folder of prepared data (default: made here)
        limit_s: seconds for a leg
        commit: commit to record where the checkout has no git
    """
    legs = chosen_legs(quick=quick, leg=leg, only=only)
    if list:
        for one in legs:
            say(f"leg {one.name}: about {one.expected_s / 60:.1f} minutes on an H200")
            for case in one.cases:
                needs = f", needs {case.num_gpus} GPUs" if case.num_gpus > 1 else ""
                say(f"  {case.name:28} {case.expected_s:4.0f} s{needs}")
        return 0
    found = shards is None or (shards / "index.json").is_file()
    check(found, "accept", "--shards", "be a folder made by nsa data prepare", shards)
    given = shards and shards.absolute()
    # Programs run in sessions of their own: without this, SIGTERM would leave them behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = look_at_machine(commit)
    say(f"{machine.gpu}, {machine.num_gpus} GPUs, commit {machine.commit}")
    rows: Sequence[Row] = ()
    for one in legs:
        rows = *rows, *run_leg(one, out.absolute(), machine, limit_s=limit_s, shards=given)
    if not rows:
        say("no case ran: each needs more GPUs than there are")
        return EXIT_FAILED
    say(terminal_table(rows))
    return 0 if all(row.passed for row in rows) else EXIT_FAILED


def merge(folders: tuple[Path, ...], *, into: Path, allow_mixed: bool = False) -> int:
    """Bring the rows of several legs into one file; the newest row of a case stays.

    Args:
        folders: folders of --out, or files of rows
        into: file, named after the GPU: h200.jsonl
        allow_mixed: take rows of several commits
    """
    rows = merge_rows(folders, into, allow_mixed=allow_mixed)
    say(terminal_table(rows))
    say(f"{len(rows)} rows in {into}")
    return 0


def page(*, folder: Path = ROOT / COMMITTED) -> int:
    """Make the page of the committed rows.

    Args:
        folder: with the rows, a file for each kind of GPU
    """
    files = [*folder.glob("*.jsonl")]
    check(bool(files), "page", "--folder", "hold rows (*.jsonl)", folder)
    path = folder / "README.md"
    path.write_text(page_text(files), encoding="utf-8")
    say(str(path))
    return 0


def shards(*, out: Path) -> int:
    """Make shards of FineWeb's form, for a machine without the package datasets.

    Args:
        out: folder that gets fineweb/ and shards/
    """
    say(f"shards: {make_shards(out.absolute(), SHARDS_LIMIT_S)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 1 if a case failed, 2 for a mistake in what was given."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    commands: dict[str, Callable[..., int]] = {"merge": merge, "page": page, "shards": shards}
    chosen = commands.get(words[0], accept) if words else accept
    name = "accept" if chosen is accept else f"accept {words.pop(0)}"
    try:
        return run(name, chosen, words)
    except KeyboardInterrupt:
        print("accept: interrupted; the rows of the cases that ended are kept", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
