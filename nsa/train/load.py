"""Configuration from a YAML file and options of the command line, checked together.

Options are merged into the tree of the file before the dataclasses are built, so that two values
that are valid only together may have different sources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from nsa import configs
from nsa.config import NSAConfig
from nsa.docstrings import descriptions
from nsa.errors import UserError, check, fail, nearest, nearest_hint, option
from nsa.train.config import TrainConfig

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """One setting of the configuration.

    Attributes:
        name: dotted name, for example ``optim.lr``.
        hint: type of its values, without None.
        default: its default value.
        help: description from the dataclass.
    """

    name: str
    hint: Any
    default: Any
    help: str

    def read(self, text: str) -> Any:
        """Convert a word of the command line to the value that a file would contain."""
        if typing.get_origin(self.hint) in (tuple, dict):
            is_whole = text.startswith("[") or typing.get_origin(self.hint) is dict
            with contextlib.suppress(yaml.YAMLError):
                return yaml.load(text if is_whole else f"[{text}]", _Loader)
        return None if text == "null" else text


# --- YAML -----------------------------------------------------------------------------------------
class _Loader(yaml.BaseLoader):
    """Loader that reads every scalar except null as text, and rejects a key that is given twice.

    The rules of YAML 1.1, by which ``no`` is false, ``3e-4`` is text and ``010`` is eight, are
    never meant: the type of a setting decides.
    """

    def construct_scalar(self, node: Any) -> Any:
        """Text of a scalar, or None."""
        is_null = node.style is None and node.value in ("null", "~", "")
        return None if is_null else super().construct_scalar(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Section as a dictionary."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                text = f"{key.value} twice in a section"
                raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    """Read the settings of a file as nested dictionaries of text."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (FileNotFoundError, IsADirectoryError):
        others = {other.stem: str(other) for other in path.parent.glob("*.yaml") if other.is_file()}
        hint = nearest_hint(others.get(nearest(path.stem, others) or ""))
        if path.stem in configs.names():
            hint = f"The package has a configuration of that name; give its name: {path.stem}."
        fail("the configuration", "be a YAML file that exists", path, hint)
    except UnicodeDecodeError:
        fail("the configuration", "be text in UTF-8", path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        found = getattr(error, "problem", None) or str(error).splitlines()[0]
        fail(f"{path}{line}", "be valid YAML", found)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        fail(str(path), "contain settings as 'name: value'", tree)
    hint = "To use a configuration of the package, give its name; `nsa configs` lists them."
    check(_has_settings(tree), str(path), "contain a setting", "none", hint)
    return tree


def _has_settings(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_has_settings, tree.values()))
    return True


def to_yaml(config: Any) -> str:
    """Return the whole configuration as YAML that :func:`load_config` reads, defaults included.

    Args:
        config: a :class:`~nsa.train.config.TrainConfig` or any of its sections.

    Returns:
        YAML text in the order of the dataclass.
    """
    return yaml_text(dataclasses.asdict(config))


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return nested values of a configuration as YAML; see :func:`to_yaml`."""
    plain = json.loads(json.dumps(values))  # lists for tuples
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)


# --- one configuration of a file and overrides ----------------------------------------------------
def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> TrainConfig:
    """Read a training configuration.

    Args:
        path: YAML file, or the name of a configuration of the package (see :mod:`nsa.configs`);
            None starts from the defaults. Settings that the file does not contain keep their
            defaults.
        overrides: dotted names to the text of their values, for example ``optim.lr`` to ``3e-4``;
            they win over the file.

    Returns:
        The checked configuration.

    Raises:
        UserError: for an unknown name, a wrong type or a value that breaks a rule.
    """
    known = {setting.name: setting for setting in settings()}
    file = None if path is None else configs.find(path)
    tree = {} if file is None else _read(file)
    for name, text in overrides.items():
        inside = [option(other) for other in overrides if other.startswith(f"{name}.")]
        rule = "be left out with settings inside it"
        check(not inside, option(name), rule, ", ".join(inside))
        *parents, last = name.split(".")
        section = tree
        for parent in parents:
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[last] = known[name].read(text) if name in known else text
    return typing.cast(TrainConfig, _build(TrainConfig, tree, ""))


def _build(cls: Any, tree: Mapping[str, Any], prefix: str) -> Any:
    """Build a section; errors name settings by their dotted names."""
    hints, values = typing.get_type_hints(cls), {}
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if name not in hints:
            near = nearest(full, [setting.name for setting in settings()])
            fail("names", "be settings", full, nearest_hint(near))
        values[name] = _typed(value, hints[name], full)
    try:
        return cls(**values)
    except UserError as error:
        argument = f"{prefix}{error.argument}"
        raise UserError(argument, error.rule, error.value, error.hint) from None


def _typed(value: Any, hint: Any, name: str) -> Any:
    """Convert text to the type of a setting if that is possible; the dataclass checks the rest."""
    if type(None) in typing.get_args(hint):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is dict:  # model.layers
        return _typed_layers(value, name)
    if isinstance(value, dict) and dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{name}.")
    if isinstance(value, list):
        parts = [part for part in typing.get_args(hint) if part is not Ellipsis] or [str]
        return [
            _typed(item, parts[min(index, len(parts) - 1)], name)
            for index, item in enumerate(value)
        ]
    if isinstance(value, str) and hint is bool:
        return _BOOLS.get(value.lower(), value)
    if isinstance(value, str) and hint in (int, float):
        with contextlib.suppress(ValueError):
            return hint(value)
    return value


def _typed_layers(value: Any, name: str) -> Any:
    """Convert changes of layers, a list or a mapping; the dataclass checks the rest."""
    if not isinstance(value, list | dict):
        return value
    hints, found = typing.get_type_hints(NSAConfig), dict[Any, Any]()
    for key, changes in enumerate(value) if isinstance(value, list) else value.items():
        found[key] = changes
        if isinstance(changes, dict):
            found[key] = {
                x: _typed(y, hints.get(x), f"{name}.{key}.{x}") for x, y in changes.items()
            }
    return list(found.values()) if isinstance(value, list) else found


# --- names ----------------------------------------------------------------------------------------
def settings(cls: Any = TrainConfig, prefix: str = "") -> list[Setting]:
    """Return every setting below ``cls`` in order, and the sections that may be null.

    Args:
        cls: a dataclass of the configuration.
        prefix: prefix of the names, for example ``optim.``.
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
