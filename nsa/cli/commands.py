"""Commands from functions: the words of a command are the signature and docstring of a function.

An argument before ``*`` is positional and one behind it an option; ``**settings`` stands for every
setting of the configuration, by its dotted name. Mistakes are one line, and an option is never
guessed at or taken twice.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NoReturn, cast

from nsa.docstrings import about, descriptions
from nsa.errors import UsageError, nearest, option
from nsa.extras import require


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        run: called with the words of the command line; returns the exit code.
        extra: packages that it needs, a key of :data:`nsa.extras.EXTRAS`.
    """

    run: Callable[..., int]
    extra: str | None = None


@dataclass(frozen=True)
class Group:
    """Commands below a word.

    Attributes:
        about: what they are for; the first line stands in the list of commands.
        commands: by name.
    """

    about: str
    commands: Mapping[str, Command | Group]


class Parser(argparse.ArgumentParser):
    """Reports a mistake as a :class:`UsageError` and does not guess at shortened options."""

    def __init__(self, name: str, description: str) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(name, None, description, allow_abbrev=False, formatter_class=layout)
        self.repeatable: set[str] = set()

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")

    def options(self) -> list[str]:
        """The words of all options."""
        return [name for action in self._actions for name in action.option_strings]

    @property
    def described(self) -> dict[str, str]:
        """Options with their help."""
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return {name: act.help or "" for act in actions for name in act.option_strings}

    @property
    def positional(self) -> set[str]:
        """Names of the arguments without an option."""
        return {action.dest for action in self._actions if not action.option_strings}

    def arguments(self, words: Iterable[str]) -> dict[str, Any]:
        """The values that words give to the arguments.

        Raises:
            UsageError: a word is not known or does not fit, or an option is given twice.
        """
        known = self.options()
        words = [*words]
        while "--set" in words[:-1] and "--set" not in known:
            at = words.index("--set")
            words[at : at + 2] = [f"--{words[at + 1]}"]
            said = f"--set {words[at][2:]} is {words[at]} now; --set goes with the next release"
            print(f"{self.prog}: {said}", file=sys.stderr)
        words = [_with_dashes(word) for word in words]
        names = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)]
        options = [name for name in names if name.startswith("--")]
        for name in options:
            if name not in known:  # before argparse takes its value for something else
                said = f"{self.prog}: unrecognized arguments: {name}"
                if name[2:] in self.positional:
                    raise UsageError(f"{said}; give {name[2:].upper()} without {name}")
                _fail_unknown(said, name, self.described)
            if options.count(name) > 1 and name not in self.repeatable:
                self.error(f"argument {name}: given twice")
        return vars(self.parse_args(words))


def parse(root: Group, words: Iterable[str]) -> tuple[Callable[..., int], dict[str, Any]] | None:
    """What runs for the words of a command line, and with which arguments.

    Args:
        root: all commands.
        words: after ``nsa``.

    Returns:
        None where a command below is missing, after help.

    Raises:
        UsageError: a word is not known or does not fit, or the command needs packages that are not
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
    """The parser of a word with commands below it, which shows what there is.

    Args:
        name: the words before the commands.
        group: the commands.
    """
    from nsa.train.environment import version

    parser = Parser(name, group.about)
    parser.add_argument("--version", action="version", version=f"nsa {version('nsa')}")
    parser.usage = f"{name} COMMAND ..."
    parser.epilog = f"commands (`{name} COMMAND --help` explains one):"
    for word, command in group.commands.items():
        text = command.about if isinstance(command, Group) else about(command.run)
        summary = text.splitlines()[0].rstrip(".")
        parser.epilog += f"\n  {word:12}{summary}"
    return parser


def command_parser(name: str, run: Callable[..., int]) -> Parser:
    """The parser of a command.

    Args:
        name: the words of the command.
        run: its function.
    """
    parser = Parser(name, about(run))
    hints, described = typing.get_type_hints(run), descriptions(run)
    for argument, parameter in inspect.signature(run).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            _add_settings(parser)
            continue
        hint, default = hints[argument], parameter.default
        how = _how(typing.get_args(hint)[0] if type(None) in typing.get_args(hint) else hint)
        if default is not parameter.empty:
            how["default"] = default
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
            described[argument] += f" (default {shown})" * (shown not in ("None", "False", ""))
        how["help"] = _plain(described[argument])
        if parameter.kind is parameter.KEYWORD_ONLY:
            required = default is parameter.empty
            parser.add_argument(option(argument), required=required, **how)
            parser.repeatable |= {option(argument)} if how.get("action") == "append" else set()
        else:
            if default is not parameter.empty:
                how["nargs"] = "*" if "nargs" in how else "?"
            parser.add_argument(argument, metavar=argument.upper(), **how)
    return parser


def _how(kind: Any) -> dict[str, Any]:
    """What argparse is told of the type of an argument."""
    if kind is bool:
        return {"action": "store_true"}
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return {"choices": inner}
    if origin is tuple:
        return {"type": _reader(inner[0]), "nargs": "+"}
    if origin is list:
        return {"type": _reader(inner[0]), "action": "append"}
    return {"type": _reader(kind)}


def _reader(kind: Any) -> Callable[[str], Any]:
    """The function that reads a word as a value; numbers are finite and fit into 64 bits."""
    if kind not in (int, float):
        return cast(Callable[[str], Any], kind)

    def read(word: str) -> Any:
        value = kind(word)
        if not abs(value) < 2**63:
            raise argparse.ArgumentTypeError(f"must lie between -2**63 and 2**63, got {word}")
        return value

    read.__name__ = kind.__name__  # argparse names it
    return read


def _add_settings(parser: Parser) -> None:
    """Options for the settings of the configuration, but for those that the command has itself."""
    from nsa.train.load import settings

    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " [--SETTING VALUE ...]"
    group, own = parser.add_argument_group("settings of the configuration"), parser.options()
    for setting in settings():
        if option(setting.name) in own:
            continue
        is_choice = typing.get_origin(setting.hint) is Literal
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
    """Without the marks of a docstring."""
    return re.sub(r":\w+:|`", "", text).replace("%", "%%")


def _with_dashes(word: str) -> str:
    """``--model.nsa.window_size=8`` as ``--model.nsa.window-size=8``."""
    name, equals, value = word.partition("=")
    return option(name[2:]) + equals + value if re.fullmatch(r"--[\w.-]+", name) else word


def _fail_unknown(message: str, word: str, known: Iterable[str]) -> NoReturn:
    near = nearest(word, known)
    raise UsageError(message if near is None else f"{message}; did you mean {near}?")
