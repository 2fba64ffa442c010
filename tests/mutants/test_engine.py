"""The mutant runner itself: it must tell a break that was seen from one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import Mutant, MutantError

SOURCE = "def half(x):\n    return x / 2\n\n\ndef unused():\n    return 1\n"
TEST = "from nsa.maths import half\n\n\ndef test_half():\n    assert half(4) == 2\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with one function that a test holds and one that none does."""
    for folder in ("nsa", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "nsa/__init__.py").write_text("")
    (tmp_path / "nsa/maths.py").write_text(SOURCE)
    (tmp_path / "tests/test_maths.py").write_text(TEST)
    return tmp_path


def broken(old: str, new: str) -> Mutant:
    return Mutant("m", "why", "nsa/maths.py", old, new, ("tests/test_maths.py",))


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        ("x / 2", "x / 3", "killed"),
        ("return 1", "return 2", "survived"),  # no test looks at it
        ("def half(x):", "def half(x:", "broken"),  # does not import: the tests said nothing
        ("return x / 2", "while True: pass", "timeout"),
    ],
)
def test_outcome(tree: Path, old: str, new: str, outcome: str) -> None:
    limit = 2 if outcome == "timeout" else 60
    result = mutants.run_mutant(broken(old, new), source=tree, time_limit_s=limit)
    assert result.outcome == outcome, result.output
    assert (tree / "nsa/maths.py").read_text() == SOURCE  # the tree itself is never touched


def test_baseline_sees_a_red_tree(tree: Path) -> None:
    assert mutants.run_baseline(["tests/test_maths.py"], source=tree)[0] == "survived"
    (tree / "nsa/maths.py").write_text(SOURCE.replace("/ 2", "/ 3"))
    assert mutants.run_baseline(["tests/test_maths.py"], source=tree)[0] == "killed"


@pytest.mark.parametrize(("old", "count"), [("return", 2), ("absent", 0)])
def test_text_must_stand_once(tree: Path, old: str, count: int) -> None:
    with pytest.raises(MutantError, match=f"stands {count} times"):
        mutants.apply_mutant(broken(old, "x"), tree)


def test_missing_files_are_named(tree: Path) -> None:
    with pytest.raises(MutantError, match=r"nsa/gone\.py does not exist"):
        mutants.apply_mutant(
            Mutant("m", "why", "nsa/gone.py", "a", "b", ("tests/test_maths.py",)), tree
        )
    with pytest.raises(MutantError, match=r"tests/test_gone\.py::test_x does not exist"):
        mutants.apply_mutant(
            Mutant("m", "why", "nsa/maths.py", "a", "b", ("tests/test_gone.py::test_x",)), tree
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a: b}", "not valid YAML"),
        ("- {name: a, why: w, file: f, old: x, new: y}", "lacks .'tests'."),
        ("- {name: a, why: w, file: f, old: x, new: y, tests: [t], speed: 1}", "unknown .'speed'."),
        ("- {name: a, why: w, file: f, old: x, new: x, tests: [t]}", "changes nothing"),
        ("- {name: a, why: w, file: f, old: x, new: y, tests: []}", "names no test"),
        ("- &m {name: a, why: w, file: f, old: x, new: y, tests: [t]}\n- *m", "used twice"),
    ],
)
def test_list_is_checked(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mutants.yaml"
    path.write_text(text)
    with pytest.raises(MutantError, match=message):
        mutants.load_mutants(path)


def test_killer_is_named(tree: Path) -> None:
    result = mutants.run_mutant(broken("x / 2", "x / 3"), source=tree)
    assert result.killer == "tests/test_maths.py::test_half"
    assert "m  killed" in mutants.table([result])
    assert "tests/test_maths.py::test_half" in mutants.table([result])


def test_kernels_are_interpreted(tree: Path) -> None:
    """A test under tests/kernels runs with TRITON_INTERPRET, the others without it, and each can notice."""
    (tree / "tests/kernels").mkdir()
    ask = "import os\nfrom nsa.maths import half\n\n\ndef test_it():\n    assert os.environ.get('TRITON_INTERPRET') == {}\n{}"
    (tree / "tests/kernels/test_kernel.py").write_text(
        ask.format("'1'", "    assert half(4) == 2\n")
    )
    (tree / "tests/test_plain.py").write_text(ask.format("None", ""))
    tests = ("tests/kernels/test_kernel.py", "tests/test_plain.py")
    assert mutants.run_baseline(tests, source=tree)[0] == "survived"
    result = mutants.run_mutant(
        Mutant("m", "why", "nsa/maths.py", "x / 2", "x / 3", tests), source=tree
    )
    assert result.killer == "tests/kernels/test_kernel.py::test_it"
