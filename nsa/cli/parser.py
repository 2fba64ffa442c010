"""The parser of the command line: mistakes are one line, an option is never guessed at or taken twice."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from nsa.errors import UsageError, nearest


class Parser(argparse.ArgumentParser):
    """Reports a mistake as a :class:`UsageError` and does not guess at shortened options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self.register("action", None, _Once)
        self.commands: dict[str, Parser] = {}
        self.extra: str | None = None
        self.takes_settings = False

    def add_commands(self, commands: Sequence[tuple[Any, ...]]) -> None:
        """Commands below this one: name, extra, words, what runs or the commands below it, summary, description."""
        made = self.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
        for name, extra, add, run, summary, description in commands:
            self.commands[name] = made.add_parser(name, help=summary, description=description)
            self.commands[name].extra = extra
            if callable(run):
                self.commands[name].set_defaults(command=run)
                add(self.commands[name])
            else:
                self.commands[name].add_commands(run)

    def option_names(self) -> list[str]:
        """All options, with their dashes."""
        return [name for action in self._actions for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(shutil.get_terminal_size().columns, 128))


class _Once(argparse.Action):
    """Stores a value and refuses a second one; the action of every argument that names no other."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, name: str | None = None
    ) -> None:
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            parser.error(f"argument {name}: given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def with_dashes(word: str) -> str:
    """``--model.nsa.window_size=8`` as ``--model.nsa.window-size=8``."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if re.fullmatch(r"--[\w.-]+", name) else word


def check_options(words: Sequence[str], parser: Parser) -> None:
    """Refuse an unknown option before argparse takes its value for something else."""
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and name not in parser.option_names():
            fail_unknown(f"{parser.prog}: unrecognized arguments: {name}", name, parser.option_names())


def fail_unknown(message: str, word: str, known: Sequence[str]) -> NoReturn:
    """Raise with the message, and with the known word that is most like the one given where there is any."""
    near = nearest(word, known)
    raise UsageError(message if near is None else f"{message}; did you mean {near}?")
