"""The command line of a tool, from a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from nsa.cli.commands import command_parser
from nsa.errors import UsageError, UserError

EXIT_USER_ERROR = 2


def run(name: str, function: Callable[..., int], words: Sequence[str] | None) -> int:
    """Run a function with what the command line says, see :mod:`nsa.cli.commands`.

    Args:
        name: of the tool, ``python -m tools.<name>``.
        function: what runs.
        words: of the command line; None takes those of this process.

    Returns:
        Its exit code; 2 after one line about a mistake in what was given.
    """
    words = sys.argv[1:] if words is None else words
    try:
        return function(**command_parser(f"python -m tools.{name}", function).arguments(words))
    except (UsageError, UserError) as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
