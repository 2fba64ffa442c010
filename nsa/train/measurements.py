"""Measurements of models as files, so that runs can be compared whose checkpoints are gone."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from nsa.errors import check, fail
from nsa.files import new_file
from nsa.train.evaluation import Measurement, paired_difference

# What measurements have in common that may be compared.
_SAME = ("tokenizer", "text", "split", "seq_len", "windows")
# The same, compared where both files have it: those of earlier versions do not.
_SAME_IF_KNOWN = ("text_sha256", "data_seed", "document_mask")
# Raised for a file that is no whole .npz of ours.
_DAMAGED = (
    BadZipFile,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zlib.error,
)


class _File(NamedTuple):
    path: Path
    measurement: Measurement
    about: dict[str, Any]


def save_measurement(path: Path, measurement: Measurement, about: dict[str, Any]) -> None:
    """Write a measurement as a compressed ``.npz``.

    Args:
        path: of the file, which does not exist.
        measurement: sums by document and by position.
        about: what was measured: ``run``, ``step``, ``split``, ``text``, ``tokenizer``,
            ``seq_len``, ``windows``; as far as known, ``seed`` of the run, ``checkpoint_sha256``,
            ``text_sha256``, ``data_seed`` of a synthetic task, ``document_mask``.
    """
    with new_file(path) as temporary, temporary.open("wb") as file:
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
    with path.open("rb") as file:
        try:
            with np.load(file) as arrays:
                names = ("documents", "positions")
                found = [np.asarray(arrays[name], np.float64) for name in names]
                about: dict[str, Any] = json.loads(str(arrays["about"]))
            is_whole = [x.shape[1:] for x in found] == [(3,), (3,)]
            is_whole &= {*_SAME, "run", "step"} <= {*about}
        except _DAMAGED:
            fail(function, argument, rule, path)  # NumPy would advise to unpickle the file
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
        ValueError: not as many, not on the same targets, or a model twice; of several pairs, one
            with different seeds, or two with the same.
    """
    function = "compare"
    rule = f"be as many files as FILES ({len(first)})"
    check(len(first) == len(second) > 0, function, "--against", rule, len(second))
    sides = [
        [_File(path, *load_measurement(function, argument, path)) for path in paths]
        for argument, paths in (("FILES", first), ("--against", second))
    ]
    files = [*sides[0], *sides[1]]
    _check_same_targets(files)
    for one, other in combinations(files, 2):
        _check_distinct(one, other)
    if len(first) > 1:
        _check_seeds(*sides)
    found = paired_difference(*([file.measurement for file in side] for side in sides))
    for name, side in zip(("runs", "against"), sides, strict=True):
        found[name] = [_described(file.measurement, file.about) for file in side]
    return found


def _check_same_targets(files: Sequence[_File]) -> None:
    known = dict[str, tuple[Path, Any]]()
    for path, _, about in files:
        for name in (*_SAME, *_SAME_IF_KNOWN):
            value = about.get(name)
            if value is not None:
                origin, expected = known.setdefault(name, (path, value))
                rule = f"have the {name} of {origin} ({expected})"
                check(value == expected, "compare", str(path), rule, value)
    counts = files[0].measurement.documents[:, 1:]
    rule = f"have the targets of {files[0].path} in each document"
    for path, measurement, _ in files:
        same = np.array_equal(measurement.documents[:, 1:], counts)
        check(same, "compare", str(path), rule, "others")


def _check_distinct(one: _File, other: _File) -> None:
    """Refuse a model that is there twice, under the same name or another.

    The name and step of a run do not tell: they are the same in another folder. Equal sums do, and
    so does the checkpoint, whose sums may differ on another device.
    """
    twice = one.path.resolve() == other.path.resolve()
    check(not twice, "compare", str(other.path), "be given once", "it twice")
    checkpoint = one.about.get("checkpoint_sha256")
    same = np.array_equal(one.measurement.documents, other.measurement.documents)
    same |= checkpoint is not None and checkpoint == other.about.get("checkpoint_sha256")
    rule = f"measure another model than {one.path}"
    model = f"the same: {other.about['run']} step {other.about['step']}"
    check(not same, "compare", str(other.path), rule, model)


def _check_seeds(first: Sequence[_File], second: Sequence[_File]) -> None:
    """Of several pairs, each has a seed of its own, as far as the files say it."""
    for one, other in zip(first, second, strict=True):
        ours, theirs = one.about.get("seed"), other.about.get("seed")
        same = None in (ours, theirs) or ours == theirs
        rule = f"have the seed of {one.path} ({ours})"
        hint = "Of several pairs, each must have equal seeds: give both sides in the same order."
        check(same, "compare", str(other.path), rule, theirs, hint)
    for one, other in (*combinations(first, 2), *combinations(second, 2)):
        ours, theirs = one.about.get("seed"), other.about.get("seed")
        rule = f"have another seed than {one.path}"
        check(ours is None or ours != theirs, "compare", str(other.path), rule, theirs)


def _described(measurement: Measurement, about: dict[str, Any]) -> dict[str, Any]:
    figures = {"run": about["run"], "step": about["step"], **measurement.figures()}
    return {**figures, "positions": measurement.by_position()}
