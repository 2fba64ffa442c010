"""``nsa check``, ``nsa report`` and ``nsa track``, which read the folder of a run."""

from __future__ import annotations

from pathlib import Path

from nsa.errors import check_output


def check(run: str) -> int:
    """Check that the records of a run agree.

    Recompute step counts, tokens and tokens/s of RUN from its records, and compare metrics.jsonl,
    metrics.csv and TensorBoard value by value. Exit code 1, with the first disagreements, if they
    do not agree.

    Args:
        run: run folder, for example runs/cpu-small-1
    """
    from nsa.train.run_folder import RunFolder
    from nsa.train.runs.check import check_run

    folder = RunFolder.open(run)
    summary, found = check_run(folder)
    result = f"{len(found)} records disagree" if found else "everything agrees"
    for line in summary:
        print(f"{folder.path}: {line}")
    for line in found:
        print(f"  {line}")
    print(f"{folder.path}: {result}")
    return 1 if found else 0


def report(runs: tuple[str, ...], *, output: Path | None = None) -> int:
    """Write a page about runs.

    One HTML page about one RUN or several: curves, gates, events, environment, differences of the
    configurations. It holds all that it shows and needs no network.

    Args:
        runs: run folders; several are compared
        output: page to write (default report.html in the first run)
    """
    from nsa.files import replace_text
    from nsa.train.run_folder import RunFolder
    from nsa.train.runs.report import report_page

    check_output("report", "--output", output)
    folders = [RunFolder.open(run) for run in runs]
    target = output or folders[0].path / "report.html"
    replace_text(target, report_page(folders))
    print(f"report: {target}")
    return 0


def track(
    run: str,
    *,
    to: str,
    project: str = "nsa",
    follow: bool = False,
) -> int:
    """Send the rows of a run to a tracker.

    It is trackio, which keeps them on this machine, or Weights & Biases (wandb). The run itself
    never waits for a tracker; this command reads its metrics.jsonl, during the run or afterwards,
    and goes on where it stopped.

    Args:
        run: run folder, for example runs/cpu-small-1
        to: trackio or wandb; the package must be installed
        project: project of the tracker
        follow: go on with new rows until the run ends
    """
    from nsa.train.run_folder import RunFolder
    from nsa.train.runs import tracking

    for line in tracking.track(RunFolder.open(run), to, project=project, follow=follow):
        print(line, flush=True)
    return 0
