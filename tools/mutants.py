"""Break the code on purpose, one line at a time, and demand that the tests notice.

``tests/mutants/mutants.yaml`` lists the breaks. Each is applied alone to a fresh copy of the tree,
the tests that it names are run there, and the copy is deleted. A break that leaves its tests green
has survived: a test is missing. ``make test-mutants`` runs them all, ``make test`` the five that
are marked fast.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = Path("tests/mutants/mutants.yaml")
# All that a test reads.
COPIED = ("nsa", "tests", "tools", "docs", "benchmarks", "pyproject.toml", "Makefile")
# their own conftest collects them only where Triton interprets kernels
INTERPRETED = "tests/kernels/"
TIME_LIMIT_S = 180

Outcome = Literal["killed", "survived", "timeout", "broken"]


class MutantError(Exception):
    """The list, or one of its breaks, does not fit the tree."""


@dataclass(frozen=True)
class Mutant:
    """One deliberate mistake.

    Attributes:
        name: short, unique.
        why: what the mistake would do, a phrase.
        file: path of the source file, from the root of the tree.
        old: text that stands in the file exactly once.
        new: text that takes its place.
        tests: test files or node ids, from the root, of which at least one must fail.
        fast: whether ``make test`` runs it too.
    """

    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    fast: bool = False


@dataclass(frozen=True)
class Result:
    """What a run of the tests said about one mutant: ``seconds`` of wall time and the end of pytest's output."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    output: str

    @property
    def killer(self) -> str:
        """The test that noticed, or nothing."""
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", self.output, re.MULTILINE)
        return found[1] if found else ""


def load_mutants(path: Path) -> list[Mutant]:
    """Read the list.

    Raises:
        MutantError: the file is not YAML; an entry lacks a key, has an unknown one, repeats a name,
            changes nothing, names no test.
    """
    known = {field.name for field in fields(Mutant)}
    mutants: list[Mutant] = []
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise MutantError(f"{path.name}: not valid YAML: {error}") from error
    for number, entry in enumerate(entries, start=1):
        missing, unknown = known - {"fast"} - entry.keys(), entry.keys() - known
        if missing or unknown:
            raise MutantError(
                f"{path.name}: entry {number} lacks {sorted(missing)}, has unknown {sorted(unknown)}"
            )
        mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
        if mutant.old == mutant.new or not mutant.tests:
            raise MutantError(f"{path.name}: {mutant.name} changes nothing or names no test")
        mutants.append(mutant)
    names = [mutant.name for mutant in mutants]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise MutantError(f"{path.name}: names used twice: {repeated}")
    return mutants


def apply_mutant(mutant: Mutant, root: Path) -> None:
    """Write the break into the tree at ``root``.

    Raises:
        MutantError: the file or a test is not there, or ``old`` does not stand in the file exactly
            once.
    """
    path = root / mutant.file
    if not path.is_file():
        raise MutantError(f"{mutant.name}: {mutant.file} does not exist")
    for test in mutant.tests:
        if not (root / test.partition("::")[0]).is_file():
            raise MutantError(f"{mutant.name}: {test} does not exist")
    text = path.read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1:
        raise MutantError(
            f"{mutant.name}: the text to break stands {count} times in {mutant.file}, not once"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def copy_tree(source: Path, target: Path) -> None:
    """Copy what tests need. Byte code stays behind: a stale file of equal size and second would hide a break."""
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(
                source / name,
                target / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.png"),
            )
        elif (source / name).is_file():
            shutil.copy2(source / name, target / name)


def run_tests(root: Path, tests: Sequence[str], time_limit_s: float) -> tuple[Outcome, str]:
    """Run ``tests`` on the tree at ``root`` until the first failure, those of kernels in Triton's interpreter.

    Returns:
        ``survived`` where all passed, ``killed`` where one failed, ``timeout``, or ``broken`` where
        pytest could not tell (exit status above 1: it collected nothing, or a test module does not
        import); and the end of the output.
    """
    outcome: Outcome = "survived"
    output = ""
    for interpreted in (False, True):
        chosen = [test for test in tests if test.startswith(INTERPRETED) == interpreted]
        if chosen and outcome == "survived":
            outcome, output = _run_pytest(
                root, chosen, time_limit_s, {"TRITON_INTERPRET": "1"} if interpreted else {}
            )
    return outcome, output


def _run_pytest(
    root: Path, tests: Sequence[str], time_limit_s: float, settings: dict[str, str]
) -> tuple[Outcome, str]:
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "COV_", "TRITON_"))
        },
        "PYTHONPATH": str(root),  # before an editable installation of the tree that was copied
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "timeout", f"no end after {time_limit_s:.0f} s"
    outcomes: dict[int, Outcome] = {0: "survived", 1: "killed"}
    return outcomes.get(done.returncode, "broken"), (done.stdout + done.stderr)[-2000:]


def run_mutant(mutant: Mutant, source: Path = ROOT, time_limit_s: float = TIME_LIMIT_S) -> Result:
    """Apply ``mutant`` to a temporary copy of ``source`` and run its tests there.

    Raises:
        MutantError: see :func:`apply_mutant`.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-mutant-") as folder:
        root = Path(folder)
        copy_tree(source, root)
        apply_mutant(mutant, root)
        start = time.monotonic()
        outcome, output = run_tests(root, mutant.tests, time_limit_s)
        return Result(mutant, outcome, time.monotonic() - start, output)


def run_baseline(
    tests: Sequence[str], source: Path = ROOT, time_limit_s: float = 10 * TIME_LIMIT_S
) -> tuple[Outcome, str]:
    """Run ``tests`` on an unbroken copy: only where they pass does a failure mean that a break was seen."""
    with tempfile.TemporaryDirectory(prefix="nsa-mutant-") as folder:
        copy_tree(source, Path(folder))
        return run_tests(Path(folder), tests, time_limit_s)


def table(results: Sequence[Result]) -> str:
    """The results as aligned lines of text, one a mutant, with the test that noticed."""
    width = max(len(result.mutant.name) for result in results)
    return "\n".join(
        f"{result.mutant.name:<{width}}  {result.outcome:<8}  {result.seconds:5.1f} s  {result.killer}"
        for result in results
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 0 when every mutant was killed, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants to run; without any, all")
    parser.add_argument("--fast", action="store_true", help="only those that make test runs")
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="mutants at a time"
    )
    options = parser.parse_args(arguments)
    try:
        mutants = load_mutants(ROOT / LIST)
        unknown = set(options.names) - {mutant.name for mutant in mutants}
        if unknown:
            raise MutantError(f"no mutant is called {', '.join(sorted(unknown))}")
        chosen = [
            mutant for mutant in mutants if (not options.names or mutant.name in options.names)
        ]
        chosen = [mutant for mutant in chosen if mutant.fast or not options.fast]
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        print(f"{len(chosen)} mutants; first their tests on the unbroken tree", flush=True)
        outcome, output = run_baseline(tests)
        if outcome != "survived":
            raise MutantError(f"the tests do not pass on the unbroken tree ({outcome}):\n{output}")
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(run_mutant, chosen))
    except MutantError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    print(table(results))
    alive = [result for result in results if result.outcome != "killed"]
    for result in alive:
        print(f"\n{result.mutant.name}: {result.outcome}\n{result.output}", file=sys.stderr)
    print(f"{len(results) - len(alive)} of {len(results)} mutants killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
