"""Mutants: break the code on purpose, one line at a time; the tests must notice.

Each mutant of ``tests/mutants/mutants.yaml`` is applied alone to a fresh copy of the tree, and the
tests that it names run there. If no test fails, the mutant has survived: a test is missing.
``make test-mutants`` runs all of them, ``make test`` the three that are marked fast.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast
ROOT = Path(__file__).resolve().parents[1]
LIST = Path("tests/mutants/mutants.yaml")
# Everything that a test reads.
COPIED = ("nsa", "tests", "tools", "docs", "benchmarks", "pyproject.toml", "Makefile")
# Their conftest collects them only if Triton interprets kernels.
INTERPRETED = "tests/kernels/"
TIME_LIMIT_S = 180
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line")


class MutantError(Exception):
    """The list or one of its mutants does not fit the tree."""


@dataclass(frozen=True)
class Mutant:
    """One deliberate mistake.

    Attributes:
        name: short, unique.
        file: path of the source file, from the root of the tree.
        old: text that occurs in the file exactly once.
        new: text that replaces it.
        tests: test files or node ids, from the root; at least one must fail.
        fast: whether ``make test`` runs it too.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    fast: bool = False


@dataclass(frozen=True)
class Result:
    """Outcome of the tests.

    Attributes:
        outcome: ``survived`` if all passed, ``killed`` if one failed, ``timeout``, or ``broken`` if
            pytest could not tell (exit status above 1: it collected nothing, or a test module does
            not import).
        output: last characters of pytest's output.
    """

    outcome: str
    output: str = ""


def load_mutants(path: Path) -> list[Mutant]:
    """Read the list: by file, entries ``name: [old, new, tests]`` and the tests of the group.

    Raises:
        MutantError: a mutant repeats a name, changes nothing or names no test; a fast one does not
            exist.
    """
    groups = yaml.load(path.read_text(encoding="utf-8"), SafeLoader)
    mutants, fast = dict[str, Mutant](), {*groups.pop("fast")}
    for file, group in groups.items():
        shared = group.pop("tests", [])
        for name, (old, new, *tests) in group.items():
            if old == new or not (tests or shared) or name in mutants:
                rule = "changes nothing, names no test or has a name that is used twice"
                raise MutantError(f"{path.name}: {name} {rule}")
            mutants[name] = Mutant(name, file, old, new, (*(tests or shared),), name in fast)
    if fast - {*mutants}:
        raise MutantError(f"{path.name}: fast mutants that do not exist: {fast - {*mutants}}")
    return list(mutants.values())


def apply_mutant(mutant: Mutant, root: Path) -> None:
    """Write the mutant into the tree at ``root``.

    Raises:
        MutantError: the file or a test does not exist, or ``old`` does not occur in the file
            exactly once.
    """
    for path in (mutant.file, *mutant.tests):
        if not (root / path.partition("::")[0]).is_file():
            raise MutantError(f"{mutant.name}: {path} does not exist")
    file = root / mutant.file
    text = file.read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1:
        found = f"the text to break occurs {count} times in {mutant.file}, not once"
        raise MutantError(f"{mutant.name}: {found}")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    # Byte code of equal size and second would hide the break.
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
        compiled.unlink()


def run_tests(
    tests: Sequence[str],
    mutant: Mutant | None = None,
    source: Path = ROOT,
    time_limit_s: float = TIME_LIMIT_S,
) -> Result:
    """Run tests on a copy of the tree until the first failure; kernels are interpreted.

    Args:
        tests: test files or node ids.
        mutant: change of the copy. A failure means that it was noticed if the tests pass without.
        source: the tree, which is not changed.
        time_limit_s: limit of each of the two runs of pytest.

    Raises:
        MutantError: see :func:`apply_mutant`.
    """
    left_out = shutil.ignore_patterns("*.pyc.*", "*.png")  # the first: byte code half written
    result = Result("survived")
    with tempfile.TemporaryDirectory(prefix="nsa-mutant-") as folder:
        root = Path(folder)
        for path in (source / name for name in COPIED if (source / name).exists()):
            copy = partial(shutil.copytree, ignore=left_out) if path.is_dir() else shutil.copy2
            copy(path, root / path.name)
        if mutant is not None:
            apply_mutant(mutant, root)
        for interpreted in (False, True):
            chosen = [test for test in tests if test.startswith(INTERPRETED) == interpreted]
            if chosen and result.outcome == "survived":
                result = _run_pytest(root, chosen, time_limit_s, interpreted)
    return result


def _run_pytest(root: Path, tests: Sequence[str], time_limit_s: float, interpreted: bool) -> Result:
    left_out = ("PYTEST_", "COV_", "TRITON_")
    environment = {
        **{name: x for name, x in os.environ.items() if not name.startswith(left_out)},
        "PYTHONPATH": str(root),  # before an editable installation of the tree that was copied
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no test needs one, and they take two seconds
        **({"TRITON_INTERPRET": "1"} if interpreted else {}),
    }
    command = [*PYTEST, "-p", "no:cacheprovider", *tests]
    given: Any = {"capture_output": True, "text": True, "timeout": time_limit_s, "check": False}
    try:
        done = subprocess.run(command, cwd=root, env=environment, **given)
    except subprocess.TimeoutExpired:
        return Result("timeout")
    outcome = {0: "survived", 1: "killed"}.get(done.returncode, "broken")
    return Result(outcome, (done.stdout + done.stderr)[-2000:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants and print their outcomes; 1 if one survived."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=main.__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    options = parser.parse_args(arguments)
    mutants = load_mutants(ROOT / LIST)
    if unknown := {*options.names} - {mutant.name for mutant in mutants}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if mutant.name in options.names or not options.names]
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    print(f"{len(chosen)} mutants; first their tests on the unbroken tree", flush=True)
    sound = run_tests(tests, time_limit_s=10 * TIME_LIMIT_S)
    if sound.outcome != "survived":
        sys.exit(f"the tests do not pass on the unbroken tree: {sound.outcome}\n{sound.output}")
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda mutant: run_tests(mutant.tests, mutant), chosen))
    for mutant, result in zip(chosen, results, strict=True):
        print(f"{mutant.name}: {result.outcome}")
        if result.outcome != "killed":
            print(result.output)
    killed = sum(result.outcome == "killed" for result in results)
    print(f"{killed} of {len(results)} mutants killed")
    return int(killed < len(results))


if __name__ == "__main__":
    sys.exit(main())
