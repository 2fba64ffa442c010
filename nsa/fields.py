"""Types of configuration fields: values that JSON gives are converted, wrong types are refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import typing
from collections.abc import Mapping
from typing import Any, Literal

from nsa.errors import check, fail, nearest, nearest_hint


def settle(config: Any) -> None:
    """Give every field of a frozen dataclass a value of its declared type.

    Lists become tuples, mappings become dataclasses, integers become floats where these are
    declared. Declared types are bool, int, float (finite), str, string literals, tuples and
    dataclasses, each with or without None.

    Raises:
        ValueError: naming the class, the field, the type and the value.
    """
    for name, hint in _hints(type(config)).items():
        value = _settled(getattr(config, name), hint, type(config).__name__, name)
        object.__setattr__(config, name, value)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls)}


def _settled(value: Any, hint: Any, *where: str) -> Any:
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in parts:
        (hint,) = (part for part in parts if part is not type(None))
        return None if value is None else _settled(value, hint, *where)
    if kind is Literal:
        words = f"{', '.join(parts[:-1])} or {parts[-1]}"
        check(isinstance(value, str) and value in parts, *where, f"be {words}", value)
        return value
    if kind is tuple:
        check(isinstance(value, list | tuple), *where, "be a list or tuple", repr(value))
        parts = (parts[0],) * len(value) if parts[-1] is Ellipsis else parts
        check(len(value) == len(parts), *where, f"have {len(parts)} entries", value)
        return tuple(_settled(x, part, *where) for x, part in zip(value, parts, strict=True))
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _section(value, hint, *where)
    return _scalar(value, hint, *where)


def _section(value: Any, cls: Any, *where: str) -> Any:
    """The dataclass whose fields a mapping contains."""
    check(isinstance(value, Mapping), *where, f"hold fields of {cls.__name__}", repr(value))
    for name in value:
        if name not in _hints(cls):
            hint = nearest_hint(nearest(str(name), _hints(cls)))
            fail(*where, f"hold fields of {cls.__name__} alone", name, hint)
    return cls(**value)


def _scalar(value: Any, kind: type, *where: str) -> Any:
    rules = {
        bool: (bool, "be True or False"),
        int: (numbers.Integral, "be an integer"),
        float: (numbers.Real, "be a finite number"),
        str: (str, "be a string"),
    }
    number, rule = rules[kind]
    fits = isinstance(value, number) and isinstance(value, bool) == (kind is bool)
    fits = fits and (kind is not float or _is_finite(value))
    check(fits, *where, rule, repr(value))
    return kind(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
