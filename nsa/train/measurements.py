"""Measurements of models as files, to compare runs without their checkpoints."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from nsa.errors import check
from nsa.files import new_file
from nsa.train.evaluation import Measurement, paired_difference

# Fields that must be equal in measurements that are compared.
_SAME = ("tokenizer", "text", "split", "seq_len", "windows")
# Fields that must be equal if both files have them; files of earlier versions do not.
_SAME_IF_KNOWN = ("text_sha256", "data_seed", "document_mask")
# Errors of a file that is not a complete .npz of this module.
_DAMAGED = (BadZipFile, EOFError, KeyError, ValueError, zlib.error)


class _File(NamedTuple):
    path: Path
    measurement: Measurement
    about: dict[str, Any]

    def described(self) -> dict[str, Any]:
        """Run, step, scores if they were changed, and figures."""
        about = {x: self.about[x] for x in self.about if x in ("run", "step", "scores")}
        positions = self.measurement.by_position()
        return {**about, **self.measurement.figures(), "positions": positions}


def save_measurement(path: Path, measurement: Measurement, about: dict[str, Any]) -> None:
    """Write a measurement as a compressed ``.npz``.

    Args:
        path: of the file, which does not exist.
        measurement: sums by document and by position.
        about: ``run``, ``step``, ``split``, ``text``, ``tokenizer``, ``seq_len``, ``windows``; if
            known, ``seed`` of the run, ``checkpoint_sha256``, ``text_sha256``, ``data_seed`` of a
            synthetic task, ``document_mask``, ``device``, ``scores`` other than the trained ones,
            rows of ``needles``.
    """
    with new_file(path) as temporary, temporary.open("wb") as file:
        arrays = {name: sums for name, sums in vars(measurement).items() if sums is not None}
        np.savez_compressed(file, **arrays, about=np.array(json.dumps(about)))


def load_measurement(argument: str, path: Path) -> tuple[Measurement, dict[str, Any]]:
    """Read a file of :func:`save_measurement`.

    Raises:
        ValueError: there is no such file, or it has other content.
    """
    found, contexts, about = list[Any](), None, dict[str, Any]()
    if path.is_file():
        # NumPy would leave a damaged file open, and advise to unpickle it.
        with suppress(*_DAMAGED), path.open("rb") as file, np.load(file) as arrays:
            found = [np.asarray(arrays[name], np.float64) for name in ("documents", "positions")]
            contexts = np.asarray(arrays["contexts"]) if "contexts" in arrays else None
            about = json.loads(str(arrays["about"]))
    is_whole = [x.shape[1:] for x in found] == [(3,), (3,)] and {*_SAME, "run", "step"} <= {*about}
    check(is_whole, argument, "be a file of nsa eval --save", path)
    return Measurement(found[0], found[1], contexts), about


def compare(first: Sequence[Path], second: Sequence[Path], context: int = 1) -> dict[str, Any]:
    """Compare measured models pair by pair, such as those of equal seeds.

    Args:
        first: files of some models.
        second: files of the same number of other models, in the same order.
        context: tokens from which a target must have been predicted, see
            :meth:`~nsa.train.evaluation.Measurement.beyond`; 1 compares all targets.

    Returns:
        Figures of :func:`paired_difference`, with ``runs`` and ``against``: run, step, bits per
        byte and bins of positions of each.

    Raises:
        ValueError: different numbers of files, or different targets.
    """
    rule = f"be as many files as FILES ({len(first)})"
    check(len(first) == len(second) > 0, "--against", rule, len(second))
    ours, theirs = (
        [_File(path, *load_measurement(argument, path)) for path in paths]
        for argument, paths in (("FILES", first), ("--against", second))
    )
    _check_same_targets([*ours, *theirs])
    pair = ([x.measurement.beyond(context) for x in files] for files in (ours, theirs))
    found = paired_difference(*pair)
    found["runs"] = [file.described() for file in ours]
    found["against"] = [file.described() for file in theirs]
    return found


def _check_same_targets(files: Sequence[_File]) -> None:
    known = dict[str, tuple[Path, Any]]()
    counts = files[0].measurement.documents[:, 1:]
    for path, measurement, about in files:
        for name in (*_SAME, *_SAME_IF_KNOWN):
            value = about.get(name)
            if value is not None:
                origin, expected = known.setdefault(name, (path, value))
                rule = f"have the {name} of {origin} ({expected})"
                check(value == expected, str(path), rule, value)
        same = np.array_equal(measurement.documents[:, 1:], counts)
        rule = f"have the targets of {files[0].path} in each document"
        check(same, str(path), rule, "others")
