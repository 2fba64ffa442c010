"""Three of the deliberate mistakes of mutants.yaml: every run of the tests shows that they notice.

The tests that the mutants name run in this same session on the unbroken tree, too.
"""

from __future__ import annotations

import pytest

from tools.mutants import LIST, ROOT, load_mutants, run_tests

MUTANTS = load_mutants(ROOT / LIST)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_still_applies(mutant):
    """Whoever changes the code changes its mutants."""
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert all((ROOT / test.partition("::")[0]).is_file() for test in mutant.tests)


@pytest.mark.parametrize(
    "mutant", [mutant for mutant in MUTANTS if mutant.fast], ids=lambda mutant: mutant.name
)
def test_fast_mutant_is_killed(mutant):
    result = run_tests(mutant.tests, mutant)
    assert result.outcome == "killed", f"{result.outcome}\n{result.output}"
