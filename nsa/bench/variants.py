"""Variants of this library for comparison in one run: other options of the pattern, other tiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from nsa.config import NSAConfig
from nsa.errors import check, nearest
from nsa.ops._triton.tuning import Tile

# Pattern of kernel names, in which * stands for anything, to fields of the tile.
TileOverrides = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """This library with differences.

    Attributes:
        name: as provider in the rows.
        config: fields of ``NSAConfig`` that differ.
        tiles: fields of tiles that differ, by kernel.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tiles: TileOverrides = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Everything that differs, as it stands in a row."""
        found = dict(self.config)
        for kernel, changes in self.tiles.items():
            found |= {f"{kernel}.{name}": value for name, value in changes.items()}
        return found


def parse_settings(where: str, option: str, texts: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` texts as names and values.

    Raises:
        ValueError: a text is of another form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        hint = "For example: compile=true"
        check(bool(equals and key), where, option, "be KEY=VALUE", repr(text), hint)
        check(key not in found, where, option, "name a setting once", key)
        found[key.replace("-", "_")] = value
    return found


def split_variant(where: str, text: str) -> tuple[str, dict[str, str]]:
    """``NAME:KEY=VALUE,...`` as a name, and values by key.

    Raises:
        ValueError: the text is of another form.
    """
    name, _, rest = text.partition(":")
    rule = "be a name, a colon and KEY=VALUE pairs"
    check(bool(re.fullmatch(r"[\w.-]+", name) and rest), where, "--variant", rule, repr(text))
    pairs = re.split(r",(?![^\[(]*[\])])", rest)  # a comma inside brackets belongs to a value
    return name, parse_settings(where, "--variant", pairs)


def parse_variant(text: str, taken: Sequence[str] = ()) -> Variant:
    """``NAME:KEY=VALUE,...``: a key is a field of ``NSAConfig``, or ``KERNEL.FIELD`` of a tile.

    Args:
        text: for example ``small:window_attention_fwd.rows=64,window_attention_fwd.warps=4``.
        taken: names that it may not have.

    Raises:
        ValueError: the text does not say that.
    """
    where = "nsa bench attention"
    name, settings = split_variant(where, text)
    rule = f"have another name than {', '.join(taken)}"
    check(name not in taken, where, "--variant", rule, name)
    variant = Variant(name)
    for key, value_text in settings.items():
        value = yaml.safe_load(value_text)
        kernel, dot, option = key.rpartition(".")
        known = list(Tile._fields) if dot else [entry.name for entry in fields(NSAConfig)]
        near = nearest(option, known)
        hint = "" if near is None else f"The nearest is {near}."
        rule = "set a field of the pattern, or KERNEL.FIELD of a tile"
        check(option in known, where, "--variant", rule, repr(option), hint)
        if dot:
            variant.tiles.setdefault(kernel, {})[option] = value
        else:
            variant.config[key] = tuple(value) if isinstance(value, list) else value
    return variant
