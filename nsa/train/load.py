"""A configuration from a YAML file and words of the command line, checked as one.

The file and the overrides become one tree of values that each remember where they were written. Only then are the frozen
dataclasses built, so that two values which are valid only together may come from different places.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import logging
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from nsa import configs
from nsa.errors import UserError, check, fail, nearest
from nsa.train.config import TrainConfig

logger = logging.getLogger(__name__)

# Settings of the release before that have another name now, dotted: old to new. They are accepted for one release.
RENAMED: dict[str, str] = {}
_MOST_NODES = 10_000  # of a file: aliases inside aliases would multiply without end


@dataclass(frozen=True)
class Setting:
    """One setting of the configuration, for ``--help``.

    Attributes:
        name: dotted name, for example ``optim.lr``.
        rule: what a value must be, written so that it follows "must".
        default: default as YAML.
        help: description from the dataclass.
    """

    name: str
    rule: str
    default: str
    help: str


@dataclass(frozen=True)
class _Leaf:
    value: Any
    origin: str  # "mine.yaml:12" or "--optim.lr"
    typed: bool = False  # a word of the command line: text until the setting's type is known


@dataclass
class _Section:
    origin: str
    children: dict[str, _Section | _Leaf] = field(default_factory=dict)


class _MismatchError(Exception):
    """A value that does not fit its type; the message is the rule."""


# --- YAML -----------------------------------------------------------------------------------------------------------------
# PyYAML follows YAML 1.1, where `no` is a boolean, `3e-4` is text and `010` is eight. These are the scalars of YAML 1.2.
_SCALARS = {
    "tag:yaml.org,2002:null": (r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
}


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


_Loader.yaml_implicit_resolvers, _Dumper.yaml_implicit_resolvers = {}, {}
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def _read(path: Path) -> _Section:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1, cutoff=0.5)
        hint = _nearest_hint(path.parent / near[0] if near else None)
        if path.stem in configs.names():
            hint = f"A configuration of that name comes with the package; take it by its name: {path.stem}."
        fail("configuration", "file", "be a YAML file that exists", path, hint)
    except UnicodeDecodeError:
        fail("configuration", "file", "be text in UTF-8", path)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return _Section(str(path))
        tree = _compose(loader, node, str(path), itertools.count(1))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        fail(f"{path}{line}", "file", "be valid YAML", error.problem or "an error")
    except yaml.YAMLError as error:
        fail(str(path), "file", "be valid YAML", str(error).splitlines()[0])
    except RecursionError:
        fail(str(path), "file", "hold sections that end", "one that is nested too deeply or holds itself")
    finally:
        loader.dispose()
    if isinstance(tree, _Leaf):
        fail(str(path), "file", "hold settings as 'name: value'", repr(tree.value))
    return tree


def _compose(loader: _Loader, node: yaml.Node, source: str, count: Iterator[int]) -> _Section | _Leaf:
    check(next(count) <= _MOST_NODES, source, "file", f"hold at most {_MOST_NODES:,} values, aliases included", "more")
    origin = f"{source}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        return _Leaf(loader.construct_object(node, deep=True), origin)
    section = _Section(origin)
    for key, child in node.value:
        name, place = str(key.value), f"{source}:{key.start_mark.line + 1}"
        check(name not in section.children, place, name, "be given once in a section", "a second value")
        section.children[name] = dataclasses.replace(_compose(loader, child, source, count), origin=place)
    return section


def to_yaml(config: Any) -> str:
    """The whole configuration, defaults included, as YAML that :func:`load_config` reads back to an equal one.

    Args:
        config: a :class:`~nsa.train.config.TrainConfig` or any of its sections.

    Returns:
        YAML text in the order of the dataclass.
    """
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


# --- Overrides ------------------------------------------------------------------------------------------------------------
def _overlay(root: _Section, overrides: Mapping[str, str]) -> None:
    for name, value in overrides.items():
        origin = f"--{name.replace('_', '-')}"
        *parents, last = name.split(".")
        section = root
        for parent in parents:
            child = section.children.get(parent)
            if not isinstance(child, _Section):  # `rope_scaling: null` in the file gives way, on the command line it clashes
                clash = child is not None and child.typed
                check(not clash, "command line", origin, "not contradict another setting", f"--{parent.replace('_', '-')} too")
                child = section.children[parent] = _Section(origin)
            section = child
        previous = section.children.get(last)
        clash = isinstance(previous, _Section) and previous.origin.startswith("--")
        check(not clash, "command line", origin, "not contradict another setting", "a setting inside it too")
        section.children[last] = _Leaf(value, origin, typed=True)


def load_config(path: str | Path | None = None, overrides: Mapping[str, str] | None = None) -> TrainConfig:
    """Read a training configuration.

    Args:
        path: YAML file, or the name of a configuration that comes with the package (see :mod:`nsa.configs`); None starts from
            the defaults. What the file does not name keeps its default.
        overrides: dotted names to the text of their values, for example ``optim.lr`` to ``3e-4``; they win over the file.

    Returns:
        The checked configuration.

    Raises:
        UserError: for an unknown name, a wrong type or a value that breaks a rule, with the file and line or the option that
            is at fault and the nearest valid name.
    """
    root = _Section("defaults") if path is None else _read(configs.find(path))
    _rename(root)
    _overlay(root, {_new_name(name, f"--{name.replace('_', '-')}"): text for name, text in (overrides or {}).items()})
    config: TrainConfig = _build(TrainConfig, root, "")
    return config


def _rename(root: _Section) -> None:
    """Move settings of a file that were renamed to where they belong now."""
    for old in RENAMED:
        *parents, last = old.split(".")
        section: _Section | _Leaf | None = root
        for parent in parents:
            section = section.children.get(parent) if isinstance(section, _Section) else None
        if not isinstance(section, _Section) or last not in section.children:
            continue
        moved = section.children.pop(last)
        *parents, last = _new_name(old, moved.origin).split(".")
        place = root
        for parent in parents:
            inner = place.children.setdefault(parent, _Section(moved.origin))
            clash = not isinstance(inner, _Section)
            check(not clash, moved.origin, old, f"not stand beside {parent}, which is no section", "both")
            assert isinstance(inner, _Section)
            place = inner
        check(last not in place.children, moved.origin, old, f"not stand beside {RENAMED[old]}, its new name", "both")
        place.children[last] = moved


def _new_name(name: str, origin: str) -> str:
    """The name of a setting now, said aloud where it is another one."""
    if name not in RENAMED:
        return name
    logger.warning("%s: the setting %s is called %s now; the old name goes with the next release", origin, name, RENAMED[name])
    return RENAMED[name]


# --- Building -------------------------------------------------------------------------------------------------------------
def _build(cls: type, section: _Section, path: str) -> Any:
    hints = typing.get_type_hints(cls)
    values = {}
    for name, child in section.children.items():
        dotted = f"{path}.{name}" if path else name
        if name not in hints:
            fail(child.origin, "names", "be settings", dotted, _nearest_hint(nearest(dotted, (s.name for s in settings()))))
        values[name] = _value(child, hints[name], dotted)
    try:
        return cls(**values)
    except UserError as error:
        child_at_fault = section.children.get(error.argument, section)
        argument = f"{path}.{error.argument}" if path else error.argument
        raise UserError(child_at_fault.origin, argument, error.rule, error.value, error.hint) from None


def _value(child: _Section | _Leaf, hint: Any, path: str) -> Any:
    inner, optional = _strip_none(hint)
    if isinstance(child, _Section):
        if not dataclasses.is_dataclass(inner):
            fail(child.origin, path, _rule(hint), f"settings inside it ({', '.join(child.children)})")
        assert isinstance(inner, type)
        return _build(inner, child, path)
    try:
        return _convert(child.value, hint, child.typed)
    except _MismatchError as error:
        close = ""
        if typing.get_origin(inner) is Literal:
            close = _nearest_hint(nearest(str(child.value), typing.get_args(inner)))
        rule = f"{error} or null" if optional else str(error)
        raise UserError(child.origin, path, rule, child.value if child.typed else _shown(child.value), close) from None


def _convert(value: Any, hint: Any, typed: bool) -> Any:
    """``value`` as ``hint`` says, or :class:`_MismatchError`; with ``typed`` it is text from the command line."""
    hint, optional = _strip_none(hint)
    if optional and (value is None or (typed and value == "null")):
        return None
    if dataclasses.is_dataclass(hint):
        raise _MismatchError(_rule(hint))
    is_tuple = typing.get_origin(hint) is tuple
    if typed and not (hint is str or typing.get_origin(hint) is Literal):
        try:
            value = yaml.load(f"[{value}]" if is_tuple and not value.startswith("[") else value, Loader=_Loader)
        except (yaml.YAMLError, RecursionError):
            raise _MismatchError(_rule(hint)) from None
    if is_tuple:
        return _convert_tuple(value, hint)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    allowed = typing.get_args(hint) if typing.get_origin(hint) is Literal else None
    fits = value in allowed if allowed else type(value) is hint
    if not fits or (hint is float and not math.isfinite(value)):
        raise _MismatchError(_rule(hint))
    return value


def _convert_tuple(value: Any, hint: Any) -> tuple[Any, ...]:
    items = typing.get_args(hint)
    if not isinstance(value, list) or (items[-1] is not ... and len(items) != len(value)):
        raise _MismatchError(_rule(hint))
    if items[-1] is ...:
        items = (items[0],) * len(value)
    try:
        return tuple(_convert(entry, item, False) for entry, item in zip(value, items, strict=True))
    except _MismatchError:
        raise _MismatchError(_rule(hint)) from None


def _strip_none(hint: Any) -> tuple[Any, bool]:
    """``X | None`` as ``(X, True)``, anything else as ``(hint, False)``."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return inner, True


_RULES = {int: "be an integer", float: "be a number", bool: "be true or false", str: "be text"}
_PLURALS = {int: "integers", float: "numbers", bool: "booleans", str: "texts"}


def _rule(hint: Any) -> str:
    inner, optional = _strip_none(hint)
    if typing.get_origin(inner) is Literal:
        rule = "be one of " + ", ".join(map(str, typing.get_args(inner)))
    elif typing.get_origin(inner) is tuple:
        first, *rest = typing.get_args(inner)
        if typing.get_origin(first) is tuple:
            kind = f"lists of {len(typing.get_args(first))} {_PLURALS[typing.get_args(first)[0]]}"
        else:
            kind = ", ".join(typing.get_args(first)) if typing.get_origin(first) is Literal else _PLURALS[first]
        rule = f"be a list of {kind}" if rest[-1:] == [...] else f"be a list of {1 + len(rest)} {kind}"
    elif dataclasses.is_dataclass(inner):
        rule = "be a section with settings inside it"
    else:
        rule = _RULES[inner]
    return f"{rule} or null" if optional else rule


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


# --- Names ----------------------------------------------------------------------------------------------------------------
def _nearest_hint(name: Any) -> str:
    return "" if name is None else f"The nearest is {name}."


def settings(cls: type = TrainConfig, prefix: str = "") -> list[Setting]:
    """Every setting below ``cls`` in the order of the dataclasses, sections left out unless they may be null."""
    hints, described, found = typing.get_type_hints(cls), _attribute_docs(cls), []
    for entry in dataclasses.fields(cls):
        inner, optional = _strip_none(hints[entry.name])
        name = f"{prefix}{entry.name}"
        if optional or not dataclasses.is_dataclass(inner):
            default = _plain(entry.default)
            shown = "[" + ", ".join(map(str, default)) + "]" if isinstance(default, list) else default
            shown = shown if isinstance(shown, str) else _shown(shown)
            found.append(Setting(name, _rule(hints[entry.name]), shown, described.get(entry.name, "")))
        if dataclasses.is_dataclass(inner):
            assert isinstance(inner, type)
            found += settings(inner, f"{name}.")
    return found


def _attribute_docs(cls: type) -> dict[str, str]:
    """Descriptions of the fields from the ``Attributes:`` part of the class docstring."""
    _, _, listed = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    described: dict[str, str] = {}
    names: list[str] = []
    for line in listed.splitlines():
        if not line.strip():
            break
        start = re.match(r"    (\w[\w, ]*): (.*)", line)
        if start:
            names = start[1].split(", ")
            described.update(dict.fromkeys(names, start[2]))
        else:
            described.update({name: f"{described[name]} {line.strip()}" for name in names})
    return described
