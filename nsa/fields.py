"""Types of configuration fields: values from JSON are converted, wrong types are errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import typing
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self, cast

from nsa.errors import check, fail, nearest, nearest_hint


def settle(config: Any) -> None:
    """Convert every field of a frozen dataclass to its declared type.

    Lists become tuples, mappings become dataclasses, integers become floats where these are
    declared. Declared types are bool, int, float (finite), str, string literals, tuples and
    dataclasses, each with or without None. Dictionaries are left to the class.

    Raises:
        ValueError: naming the class, the field, the type and the value.
    """
    cls: Any = type(config)
    for name, hint in _hints(cls).items():
        value = _settled(getattr(config, name), hint, cls.__name__, name)
        object.__setattr__(config, name, value)


class AsText:
    """Base of frozen dataclasses that registered operators accept as a string.

    Attributes:
        text: all fields as JSON.
    """

    text: ClassVar[str]

    def __post_init__(self) -> None:
        settle(self)
        object.__setattr__(self, "text", json.dumps(dataclasses.asdict(cast(Any, self))))

    @classmethod
    @functools.cache
    def from_text(cls, text: str) -> Self:
        """Return the object with this :attr:`text`."""
        return cls(**json.loads(text))


def check_field(config: Any, fits: bool, name: str, rule: str, hint: str = "") -> None:
    """Check a rule about a field of a dataclass; see :func:`nsa.errors.check`.

    Args:
        config: the dataclass.
        fits: whether the rule holds.
        name: the field; dotted in a section.
        rule: the rule, as the words after "must".
        hint: advice, a sentence; may be empty.
    """
    check(fits, name, rule, attrgetter(name)(config), hint)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls)}


def _settled(value: Any, hint: Any, owner: str, name: str) -> Any:
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in parts:
        (hint,) = (part for part in parts if part is not type(None))
        return None if value is None else _settled(value, hint, owner, name)
    if kind is dict:
        return value
    if kind is Literal:
        words = f"{', '.join(parts[:-1])} or {parts[-1]}"
        if not isinstance(value, str) or value not in parts:
            fail(name, f"be {words}", value, nearest_hint(nearest(str(value), parts)))
        return value
    if kind is tuple:
        check(isinstance(value, list | tuple), name, "be a list or tuple", repr(value))
        parts = (parts[0],) * len(value) if parts[-1] is Ellipsis else parts
        check(len(value) == len(parts), name, f"have {len(parts)} entries", value)
        return tuple(_settled(x, part, owner, name) for x, part in zip(value, parts, strict=True))
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, cast(type, hint)) else _section(value, hint, name)
    return _scalar(value, hint, name)


def _section(value: Any, cls: Any, name: str) -> Any:
    """Build a dataclass from a mapping of its fields."""
    check(isinstance(value, Mapping), name, f"contain fields of {cls.__name__}", repr(value))
    for key in value:
        if key not in _hints(cls):
            hint = nearest_hint(nearest(str(key), _hints(cls)))
            fail(name, f"contain only fields of {cls.__name__}", key, hint)
    return cls(**value)


def _scalar(value: Any, kind: type, name: str) -> Any:
    rules = {
        bool: (bool, "be True or False"),
        int: (numbers.Integral, "be an integer"),
        float: (numbers.Real, "be a finite number"),
        str: (str, "be a string"),
    }
    number, rule = rules[kind]
    fits = isinstance(value, number) and isinstance(value, bool) == (kind is bool)
    fits = fits and (kind is not float or _is_finite(value))
    check(fits, name, rule, repr(value))
    return kind(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
