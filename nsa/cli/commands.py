"""Command lines from functions: a signature and its docstring define the words of a command.

Arguments before ``*`` are positional and those after it are options; ``**settings`` stands for all
settings of the configuration, by their dotted names.
"""

from __future__ import annotations

import argparse
import builtins
import inspect
import json
import re
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

from nsa.docstrings import about, descriptions
from nsa.errors import UsageError, nearest, option
from nsa.extras import require


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        run: function that takes the arguments and returns the exit code.
        extra: packages that it needs, a key of :data:`nsa.extras.EXTRAS`.
    """

    run: Callable[..., int]
    extra: str | None = None


@dataclass(frozen=True)
class Group:
    """Commands with a common first word.

    Attributes:
        about: description; its first line is shown in the list of commands.
        commands: commands by name.
    """

    about: str
    commands: Mapping[str, Command | Group]


class Parser(argparse.ArgumentParser):
    """Reports mistakes as :class:`UsageError`, with a suggestion for a misspelt option."""

    def __init__(self, name: str, about: str) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(name, description=about, allow_abbrev=False, formatter_class=layout)

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")

    def arguments(self, words: Iterable[str]) -> dict[str, Any]:
        """Values of the arguments by name.

        Raises:
            UsageError: a word is unknown or invalid, or an option is given twice.
        """
        known, given = self._option_string_actions, set[str]()
        words = [_with_dashes(word) for word in words]
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if not name.startswith("--"):
                continue
            if name not in known:  # before argparse takes its value for a positional argument
                said = f"{self.prog}: unrecognized arguments: {name}"
                if any(action.dest == name[2:] for action in self._get_positional_actions()):
                    raise UsageError(f"{said}; give {name[2:].upper()} without {name}")
                _fail_unknown(said, name, known)
            if name in given and not isinstance(known[name], argparse._AppendAction):
                self.error(f"argument {name}: given twice")
            given.add(name)
        return vars(self.parse_args(words))


def parse(root: Group, words: Iterable[str]) -> tuple[Callable[..., int], dict[str, Any]] | None:
    """Find the function that a command line runs, and its arguments.

    Args:
        root: all commands.
        words: words after ``nsa``.

    Returns:
        None if a group is named without a command; its help has been printed.

    Raises:
        UsageError: a word is unknown or invalid, or the command needs packages that are not
            installed.
    """
    name, rest = "nsa", list(words)
    chosen: Command | Group = root
    while isinstance(chosen, Group):
        if not rest:
            group_parser(name, chosen).print_help()
            return None
        if rest[0].startswith("-"):
            group_parser(name, chosen).arguments(rest)
        word = rest.pop(0)
        if word not in chosen.commands:
            _fail_unknown(f"{name}: unrecognized command: {word}", word, chosen.commands)
        name, chosen = f"{name} {word}", chosen.commands[word]
    if chosen.extra is not None:
        require(name, chosen.extra)
    return chosen.run, command_parser(name, chosen.run).arguments(rest)


def group_parser(name: str, group: Group) -> Parser:
    """Parser that lists the commands of a group.

    Args:
        name: words before the commands.
        group: the commands.
    """
    from nsa.train.environment import version

    parser = Parser(name, group.about)
    parser.add_argument("--version", action="version", version=f"nsa {version('nsa')}")
    parser.usage = f"{name} COMMAND ..."
    parser.epilog = f"commands (`{name} COMMAND --help` explains one):"
    for word, command in group.commands.items():
        text = command.about if isinstance(command, Group) else about(command.run)
        parser.epilog += f"\n  {word:12}{text.splitlines()[0].rstrip('.')}"
    return parser


def command_parser(name: str, run: Callable[..., int]) -> Parser:
    """Parser of a command.

    Args:
        name: words of the command.
        run: its function.
    """
    parser, described = Parser(name, about(run)), descriptions(run)
    hints, parameters = typing.get_type_hints(run), inspect.signature(run).parameters
    for argument, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            _add_settings(parser, parameters)
            continue
        text, details = described[argument], _details(hints[argument])
        is_option, default = parameter.kind is parameter.KEYWORD_ONLY, parameter.default
        if default is parameter.empty:
            details |= {"required": True} if is_option else {}
        else:
            details["default"] = default
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
            text += f" (default {shown})" * (shown not in ("None", "False", ""))
            if not is_option:
                details["nargs"] = "*" if "nargs" in details else "?"
        if not is_option:
            details["metavar"] = argument.upper()
        parser.add_argument(
            option(argument) if is_option else argument, help=_plain(text), **details
        )
    return parser


def _details(hint: Any) -> dict[str, Any]:
    """Arguments of ``add_argument`` for a type."""
    inner = typing.get_args(hint)
    if type(None) in inner:
        return _details(inner[0])
    match typing.get_origin(hint) or hint:
        case builtins.bool:
            return {"action": "store_true"}
        case typing.Literal:
            return {"choices": inner}
        case builtins.tuple:
            return {**_details(inner[0]), "nargs": "+"}
        case builtins.list:
            return {**_details(inner[0]), "action": "append"}
        case builtins.int | builtins.float:
            return {"type": _number(hint)}
    return {"type": hint}


def _number(kind: Any) -> Callable[[str], Any]:
    """Reader of finite numbers that fit into 64 bits."""

    def read(word: str) -> Any:
        value = kind(word)
        if not abs(value) < 2**63:
            raise argparse.ArgumentTypeError(f"must lie between -2**63 and 2**63, got {word}")
        return value

    read.__name__ = kind.__name__  # argparse names it
    return read


def _add_settings(parser: Parser, own: Container[str]) -> None:
    """Add options for the settings of the configuration, except arguments of the command itself."""
    from nsa.train.load import settings

    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " [--SETTING VALUE ...]"
    group = parser.add_argument_group("settings of the configuration")
    for setting in settings():
        if setting.name in own:
            continue
        is_choice = typing.get_origin(setting.hint) is typing.Literal
        choices = "{" + ",".join(typing.get_args(setting.hint)) + "}" if is_choice else None
        default = json.dumps(setting.default).strip('"')
        group.add_argument(
            option(setting.name),
            dest=setting.name,
            default=argparse.SUPPRESS,
            metavar=choices or setting.hint.__name__.upper(),
            help=_plain(f"{setting.help.rstrip('.')} (default {default})"),
        )


def _plain(text: str) -> str:
    """The text of a docstring without its markup."""
    return re.sub(r":\w+:|`", "", text).replace("%", "%%")


def _with_dashes(word: str) -> str:
    """``--model.nsa.window_size=8`` as ``--model.nsa.window-size=8``."""
    name, equals, value = word.partition("=")
    return option(name[2:]) + equals + value if re.fullmatch(r"--[\w.-]+", name) else word


def _fail_unknown(message: str, word: str, known: Iterable[str]) -> NoReturn:
    near = nearest(word, known)
    raise UsageError(message if near is None else f"{message}; did you mean {near}?")
