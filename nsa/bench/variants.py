"""Variants of ours for comparison in one run: options of the pattern and fields of tiles that differ."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops._triton.tuning import Tile

TileOverrides = dict[str, dict[str, Any]]  # pattern of kernel names, where * stands for anything -> fields


@dataclass(frozen=True)
class Variant:
    """Ours with differences.

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
        tiles = {f"{kernel}.{name}": value for kernel, changes in self.tiles.items() for name, value in changes.items()}
        return {**self.config, **tiles}


def parse_variant(text: str, taken: Sequence[str] = ()) -> Variant:
    """``NAME:KEY=VALUE,...``: a key is a field of ``NSAConfig``, or ``KERNEL.FIELD`` of a tile.

    Args:
        text: for example ``small:window_attention_fwd.rows=64,window_attention_fwd.warps=4``.
        taken: names that it may not have.

    Raises:
        ValueError: the text does not say that.
    """
    where = "nsa bench --variant"
    name, colon, rest = text.partition(":")
    check(
        bool(re.fullmatch(r"[\w.-]+", name)) and bool(colon) and bool(rest),
        where,
        "it",
        "be a name, a colon and KEY=VALUE pairs",
        repr(text),
    )
    check(name not in taken, where, "the name", f"be none of {', '.join(taken)}", name)
    variant = Variant(name)
    for pair in re.split(r",(?![^\[(]*[\])])", rest):  # a comma inside brackets belongs to a value
        key, equals, value_text = pair.partition("=")
        check(bool(equals), where, "each setting", "be KEY=VALUE", repr(pair))
        value = yaml.safe_load(value_text)
        kernel, dot, option = key.rpartition(".")
        if dot:
            _known(where, "a field of a tile", option, list(Tile._fields))
            variant.tiles.setdefault(kernel, {})[option] = value
        else:
            _known(where, "a field of the pattern", key, [entry.name for entry in fields(NSAConfig)])
            variant.config[key] = tuple(value) if isinstance(value, list) else value
    return variant


def _known(where: str, what: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        fail(where, "each key", f"be {what}, or KERNEL.FIELD of a tile", repr(name), f"The nearest is {near[0]}.")
