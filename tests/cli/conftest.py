"""Commands as they are typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from nsa import cli

Command = Callable[[str], str]


@pytest.fixture
def nsa(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the words after ``nsa`` in this process; gives what was printed."""

    def run(line: str) -> str:
        capsys.readouterr()
        assert cli.main(shlex.split(line)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that is refused; gives the one line that the mistake ends in."""

    def run(line: str) -> str:
        capsys.readouterr()
        assert cli.main(shlex.split(line)) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert re.match(r"nsa( \w+)*: ", said)
        return said

    return run
