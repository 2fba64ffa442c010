"""Measurements of models as files, so that runs can be compared whose checkpoints are gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from nsa.errors import check, fail
from nsa.train.evaluation import Measurement, paired_difference

# What measurements have in common that may be compared.
_SAME = ("tokenizer", "text", "split", "seq_len", "windows")


def save_measurement(path: Path, measurement: Measurement, about: dict[str, Any]) -> None:
    """Write a measurement as a compressed ``.npz``.

    Args:
        path: of the file, which does not exist.
        measurement: sums by document and by position.
        about: what was measured: ``run``, ``step``, ``split``, ``text``, ``tokenizer``,
            ``seq_len``, ``windows``.
    """
    with path.open("xb") as file:
        np.savez_compressed(
            file,
            documents=measurement.documents,
            positions=measurement.positions,
            about=np.array(json.dumps(about)),
        )


def load_measurement(
    function: str, argument: str, path: Path
) -> tuple[Measurement, dict[str, Any]]:
    """What :func:`save_measurement` has written.

    Raises:
        ValueError: there is no such file, or it is another one.
    """
    rule = "be a file of nsa eval --save"
    check(path.is_file(), function, argument, rule, path)
    try:
        with np.load(path) as arrays:
            found = [np.asarray(arrays[name], np.float64) for name in ("documents", "positions")]
            about: dict[str, Any] = json.loads(str(arrays["about"]))
        is_whole = [x.shape[1:] for x in found] == [(3,), (3,)]
        is_whole &= {*_SAME, "run", "step"} <= {*about}
    except (BadZipFile, EOFError, KeyError, OSError, TypeError, ValueError) as error:
        fail(function, argument, rule, f"{path} ({error})")
    check(is_whole, function, argument, rule, path)
    return Measurement(*found), about


def compare(first: Sequence[Path], second: Sequence[Path]) -> dict[str, Any]:
    """Compare measured models pair by pair, such as those of equal seeds.

    Args:
        first: files of some models.
        second: of as many others, in the same order.

    Returns:
        Figures of :func:`paired_difference`, with ``runs`` and ``against``: run, step, bits per
        byte and bins of positions of each.

    Raises:
        ValueError: not as many, or not on the same targets.
    """
    function = "compare"
    rule = f"be as many files as FILES ({len(first)})"
    check(len(first) == len(second) > 0, function, "--against", rule, len(second))
    sides = [
        [load_measurement(function, argument, path) for path in paths]
        for argument, paths in (("FILES", first), ("--against", second))
    ]
    _, expected = sides[0][0]
    for path, (_, about) in zip((*first, *second), (*sides[0], *sides[1]), strict=True):
        for name in _SAME:
            rule = f"have the {name} of the first ({expected[name]})"
            check(about[name] == expected[name], function, str(path), rule, about[name])
    found = paired_difference(*([x for x, _ in side] for side in sides))
    for name, side in zip(("runs", "against"), sides, strict=True):
        found[name] = [_described(x, about) for x, about in side]
    return found


def _described(measurement: Measurement, about: dict[str, Any]) -> dict[str, Any]:
    figures = {"run": about["run"], "step": about["step"], **measurement.figures()}
    return {**figures, "positions": measurement.by_position()}
