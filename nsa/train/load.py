"""A configuration from a YAML file and words of the command line, checked as one.

The file and the overrides become values by dotted name, each with the place where it was written.
Only then does pydantic build the frozen dataclasses, so that two values which are valid only
together may come from different places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from nsa import configs
from nsa.docstrings import descriptions
from nsa.errors import UserError, check, fail, nearest, nearest_hint, option
from nsa.train.config import TrainConfig

_MOST_NODES = 10_000  # of a file: aliases inside aliases would multiply without end
# Rules in place of messages of pydantic that a user would not understand, by type of error.
_RULES = {
    "missing": "be given",
    "int_parsing_size": "be a valid integer",
    "dataclass_type": "be a section with settings inside it",
    "tuple_type": "be a list",
    "bool_parsing": "be true or false",
}

# Values by dotted name, each with its place: "mine.yaml:12" or "--optim.lr".
Given = dict[str, tuple[Any, str]]


@dataclass(frozen=True)
class Setting:
    """One setting of the configuration.

    Attributes:
        name: dotted name, for example ``optim.lr``.
        hint: type of its values, without None.
        default: its value unless it is set.
        help: description from the dataclass.
    """

    name: str
    hint: Any
    default: Any
    help: str

    def read(self, text: str) -> Any:
        """Convert a word of the command line to the value that a file would contain."""
        if typing.get_origin(self.hint) is tuple:
            text = text if text.startswith("[") else f"[{text}]"
            with contextlib.suppress(yaml.YAMLError, RecursionError):
                return _value(yaml.compose(text, yaml.SafeLoader), "", itertools.count())
        return None if text == "null" else text


# --- YAML -----------------------------------------------------------------------------------------
# Every scalar except null is read as text, and pydantic converts it to the type of its setting: the
# rules of YAML 1.1, by which `no` is false, `3e-4` is text and `010` is eight, are never meant.
def _read(path: Path) -> Given:
    """Read the settings of a file."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        value = _value(node, str(path), itertools.count(1))
    except (FileNotFoundError, IsADirectoryError):
        others = {other.stem: str(other) for other in path.parent.glob("*.yaml") if other.is_file()}
        hint = nearest_hint(others.get(nearest(path.stem, others) or ""))
        if path.stem in configs.names():
            hint = f"The package has a configuration of that name; give its name: {path.stem}."
        fail("load_config", "the configuration", "be a YAML file that exists", path, hint)
    except UnicodeDecodeError:
        fail("load_config", "the configuration", "be text in UTF-8", path)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        fail("load_config", f"{path}{line}", "be valid YAML", error.problem or "an error")
    except yaml.YAMLError as error:
        fail("load_config", str(path), "be valid YAML", str(error).splitlines()[0])
    except RecursionError:
        fail("load_config", str(path), "have fewer nested sections", "too many levels")
    if value is not None and not isinstance(value, dict):
        fail("load_config", str(path), "contain settings as 'name: value'", value)
    hint = "To use a configuration of the package, give its name; `nsa configs` lists them."
    given: Given = value or {}
    has_settings = any(leaf != {} for leaf, _ in given.values())
    check(has_settings, "load_config", str(path), "contain a setting", "none", hint)
    return given


def _value(node: yaml.Node | None, source: str, count: Iterator[int]) -> Any:
    """Value of a node, with aliases copied: text, None, a list, or a section."""
    most = f"contain at most {_MOST_NODES:,} values, aliases included"
    check(next(count) <= _MOST_NODES, "load_config", source, most, "more")
    if isinstance(node, yaml.ScalarNode):
        is_null = node.style is None and node.value in ("null", "~", "")
        return None if is_null else node.value
    if isinstance(node, yaml.SequenceNode):
        items = [_value(child, source, count) for child in node.value]
        return [str([*item]) if isinstance(item, dict) else item for item in items]
    found: Given = {}
    for key, child in [] if node is None else node.value:
        value, place = _value(child, source, count), f"{source}:{key.start_mark.line + 1}"
        is_section = isinstance(value, dict) and value
        inside = {f".{name}": leaf for name, leaf in value.items()} if is_section else {"": value}
        for name, leaf in inside.items():
            name = f"{key.value}{name}"
            rule = "be given once in a section"
            check(name not in found, "load_config", f"{place}: {name}", rule, "a second value")
            found[name] = leaf if is_section else (leaf, place)
    return found


def to_yaml(config: Any) -> str:
    """Return the whole configuration as YAML that :func:`load_config` reads, defaults included.

    Args:
        config: a :class:`~nsa.train.config.TrainConfig` or any of its sections.

    Returns:
        YAML text in the order of the dataclass.
    """
    return yaml_text(dataclasses.asdict(config))


def yaml_text(values: Mapping[str, Any]) -> str:
    """See :func:`to_yaml`.

    Args:
        values: of a configuration, in sections.
    """
    plain = json.loads(json.dumps(values))  # lists for tuples
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)


# --- one configuration of a file and overrides ----------------------------------------------------
def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> TrainConfig:
    """Read a training configuration.

    Args:
        path: YAML file, or the name of a configuration that comes with the package (see
            :mod:`nsa.configs`); None starts from the defaults. What the file does not name keeps
            its default.
        overrides: dotted names to the text of their values, for example ``optim.lr`` to ``3e-4``;
            they win over the file.

    Returns:
        The checked configuration.

    Raises:
        UserError: for an unknown name, a wrong type or a value that breaks a rule, with the file
            and line or the option that is at fault and the nearest valid name.
    """
    known = {setting.name: setting for setting in settings()}
    typed = {
        name: (known[name].read(text) if name in known else text, option(name))
        for name, text in overrides.items()
    }
    given = {} if path is None else _read(configs.find(path))
    for name in [*given]:
        if any(_contains(name, other) or _contains(other, name) for other in typed):
            del given[name]
    return _build({**given, **typed}, "defaults" if path is None else str(path))


def _contains(section: str, name: str) -> bool:
    return f"{name}.".startswith(f"{section}.")


@functools.cache
def _model() -> Any:
    import pydantic  # a fifth of a second, for which a mistyped word does not wait

    class Run(pydantic.RootModel[TrainConfig]):
        model_config = pydantic.ConfigDict(allow_inf_nan=False)

    return Run


def _build(given: Given, source: str) -> TrainConfig:
    from pydantic import ValidationError

    tree: dict[str, Any] = {}
    for name, (value, origin) in given.items():
        inside = [place for other, (_, place) in given.items() if _contains(name, other)]
        rule = "not contradict another setting"
        found = f"settings inside it at {', '.join(inside)}"
        check(len(inside) == 1, "load_config", f"{origin}: {name}", rule, found)
        *parents, last = name.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    try:
        config: TrainConfig = _model().model_validate(tree, extra="forbid").root
    except ValidationError as error:
        raise _explained(error.errors()[0], given, source) from None
    return config


def _explained(error: Any, given: Given, source: str) -> UserError:
    """Error of pydantic as a UserError that names the line or option at fault."""
    kind, path, context = error["type"], list(map(str, error["loc"])), error.get("ctx", {})
    rule = _RULES.get(kind, re.sub(r"^\w+ should |, unable to .*", "", error["msg"]))
    value, hint = error["input"], ""
    value = "null" if value is None else value
    cause = context.get("error")
    if isinstance(cause, UserError):  # of a dataclass
        path.append(cause.argument)
        rule, value, hint = cause.rule, cause.value, cause.hint
    for end in range(len(path)):
        section = ".".join(path[: end + 1])
        places = (place for name, (_, place) in given.items() if _contains(section, name))
        source = next(places, source)
    name = ".".join(path)
    if kind == "unexpected_keyword_argument":
        hint = nearest_hint(nearest(name, {setting.name: setting.help for setting in settings()}))
        return UserError("load_config", f"{source}: names", "be settings", name, hint)
    if kind == "literal_error":
        hint = nearest_hint(nearest(str(value), re.findall("'(.*?)'", context["expected"])))
    return UserError("load_config", f"{source}: {name}", rule, value, hint)


# --- names ----------------------------------------------------------------------------------------
def settings(cls: Any = TrainConfig, prefix: str = "") -> list[Setting]:
    """Every setting below ``cls`` in the order of the dataclasses, and sections that may be null.

    Args:
        cls: a dataclass of the configuration.
        prefix: of the names, for example ``optim.``.
    """
    hints, described, found = typing.get_type_hints(cls), descriptions(cls), []
    for entry in dataclasses.fields(cls):
        name, hint = f"{prefix}{entry.name}", hints[entry.name]
        inner, *null = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
        if null or not dataclasses.is_dataclass(inner):
            found.append(Setting(name, inner, entry.default, described[entry.name]))
        if dataclasses.is_dataclass(inner):
            found += settings(inner, f"{name}.")
    return found
