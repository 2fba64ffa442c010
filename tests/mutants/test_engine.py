"""The mutant runner itself: it must tell a break that was seen from one that was not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tools import mutants
from tools.mutants import Mutant, MutantError, Result, run_tests

SOURCE = "def half(x):\n    return x / 2\n\n\ndef unused():\n    return 1\n"
TEST = "from nsa.maths import half\n\n\ndef test_half():\n    assert half(4) == 2\n"


@pytest.fixture
def tree(tmp_path):
    """A tree with one function that a test holds and one that none does."""
    for folder in ("nsa", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "nsa/__init__.py").write_text("")
    (tmp_path / "nsa/maths.py").write_text(SOURCE)
    (tmp_path / "tests/test_maths.py").write_text(TEST)
    return tmp_path


def broken(old: str = "x / 2", new: str = "x / 3", **changes: Any) -> Mutant:
    mutant = Mutant("m", "nsa/maths.py", old, new, ("tests/test_maths.py",))
    return replace(mutant, **changes)


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        ("x / 2", "x / 3", "killed"),
        ("return 1", "return 2", "survived"),  # no test looks at it
        ("def half(x):", "def half(x:", "broken"),  # does not import: the tests said nothing
        ("return x / 2", "__import__('time').sleep(60)", "timeout"),
    ],
)
def test_outcome(tree, old, new, outcome):
    limit = 2 if outcome == "timeout" else 60
    mutant = broken(old, new)
    result = run_tests(mutant.tests, mutant, tree, limit)
    assert result.outcome == outcome, result.output
    assert outcome != "killed" or "FAILED tests/test_maths.py::test_half" in result.output
    assert (tree / "nsa/maths.py").read_text() == SOURCE  # the tree itself is never touched


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old": "return"}, "occurs 2 times"),
        ({"old": "absent"}, "occurs 0 times"),
        ({"file": "nsa/gone.py"}, r"nsa/gone\.py does not exist"),
        ({"tests": ("tests/test_gone.py::test_x",)}, r"test_gone\.py::test_x does not exist"),
    ],
)
def test_a_break_that_does_not_fit_is_named(tree, changes, message):
    with pytest.raises(MutantError, match=message):
        mutants.apply_mutant(broken(**changes), tree)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast: []\nf: {a: [x, y]}", "a changes nothing, names no test"),
        ("fast: []\nf: {a: [x, x, t]}", "changes nothing"),
        ("fast: []\nf: {a: [x, y, t]}\ng: {a: [x, y, t]}", "used twice"),
        ("fast: [b]\nf: {a: [x, y, t]}", "do not exist: {'b'}"),
    ],
)
def test_list_is_checked(tmp_path, text, message):
    path = tmp_path / "mutants.yaml"
    path.write_text(text)
    with pytest.raises(MutantError, match=message):
        mutants.load_mutants(path)


def test_survivors_are_told(monkeypatch, capsys):
    def outcome(tests, mutant=None, **_):
        return Result("killed" if mutant and mutant.name == "m" else "survived")

    listed = [broken(), broken(name="alive")]
    monkeypatch.setattr(mutants, "load_mutants", lambda path: listed)
    monkeypatch.setattr(mutants, "run_tests", outcome)
    assert mutants.main(["m"]) == 0
    assert "m: killed" in capsys.readouterr().out
    assert mutants.main([]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 mutants killed" in said
    assert "alive: survived" in said
    with pytest.raises(SystemExit):
        mutants.main(["gone"])
