"""Prepared data: tokens in memory-mapped shards with an index. docs/data.md describes the format.

Nothing here needs more than NumPy.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa.errors import UserError, check, fail
from nsa.files import replace_text
from nsa.train.data.documents import SIDES, Side
from nsa.train.data.source import DataUnavailableError, TextSource
from nsa.train.data.tokenizer import Ids, Tokenizer, Tokens, load_tokenizer, token_dtype

logger = logging.getLogger(__name__)

FORMAT = 1
INDEX, PROGRESS, TOKENIZER = "index.json", "progress.json", "tokenizer.json"
STAMP = "verified.json"
OFFSET_DTYPE = np.dtype("<u8")
_SHOWN = 3
_REPAIR = "Copy the folder again, or remove it and prepare the data again."
_TEXT = (str, type(None))
SHARD = {"name": str, "tokens": int, "documents": int}
_SHARD: dict[str, Any] = {**SHARD, "tokens_sha256": str, "offsets_sha256": str}
_SIDE: dict[str, Any] = {"tokens": int, "documents": int, "text_bytes": int, "shards": [_SHARD]}
_FORM: dict[str, Any] = {
    "request": {"origin": {}, "validation_fraction": float},
    "source": {"name": str, "subset": _TEXT, "split": str, "revision": _TEXT, "licence": _TEXT},
    "tokenizer": {"kind": str, "vocab_size": int, "separator_id": int, "fingerprint": str},
    "token_dtype": str,
    "byte_order": str,
    "left_out": {"empty": int, "unreadable": int},
    "sides": {"train": _SIDE, "validation": _SIDE},
}


def shard_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of a token on disk: the smallest unsigned one, little-endian on every machine."""
    return token_dtype(vocab_size).newbyteorder("<")


def index_digest(index: Mapping[str, Any]) -> str:
    """SHA-256 of an index without its own ``sha256``."""
    fields = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shard_files(
    folder: Path,
    shard: Mapping[str, Any],
    vocab_size: int,
) -> dict[Path, tuple[int, str]]:
    """Size in bytes and SHA-256 of the two files of a shard, as its entry in the index says.

    A shard that is not complete has no hashes yet.
    """
    sizes = {
        "tokens": shard["tokens"] * shard_dtype(vocab_size).itemsize,
        "offsets": shard["documents"] * OFFSET_DTYPE.itemsize,
    }
    return {
        folder / f"{shard['name']}.{part}": (size, shard.get(f"{part}_sha256", ""))
        for part, size in sizes.items()
    }


@dataclass(frozen=True)
class ShardFolder:
    """A folder that ``nsa data prepare`` has completed; :func:`open_shards` makes it.

    Attributes:
        path: the folder.
        index: content of ``index.json``.
        tokenizer: of all shards.
    """

    path: Path
    index: dict[str, Any]
    tokenizer: Tokenizer

    def files(self) -> dict[Path, tuple[int, str]]:
        """Size in bytes and SHA-256 of each shard file, as the index says."""
        found: dict[Path, tuple[int, str]] = {}
        for side in self.index["sides"].values():
            for shard in side["shards"]:
                found |= shard_files(self.path, shard, self.tokenizer.vocab_size)
        return found

    def source(self, side: Side) -> ShardSource:
        """Windows of one side, one of ``index["sides"]``."""
        return ShardSource(self, side)


def open_shards(path: str | Path, *, verify: bool = False) -> ShardFolder:
    """Open prepared data after a check of what is there.

    Sizes are checked every time. Contents are read and compared with their SHA-256 when the folder
    is opened for the first time, and again whenever a file has changed since (by size, times and
    inode, which ``verified.json`` keeps).

    Args:
        path: the folder.
        verify: read all contents again, even those verified before.

    Raises:
        DataUnavailableError: there are no prepared data.
        UserError: a file is missing, of the wrong size or damaged, or the index does not fit.
    """
    folder = Path(path)
    index, where = read_index(folder), ("open_shards", f"{folder / TOKENIZER}")
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    except UserError as error:
        fail(*where, error.rule, error.value, _REPAIR)
    for name in ("kind", "vocab_size", "separator_id", "fingerprint"):
        found, wanted = getattr(tokenizer, name), index["tokenizer"][name]
        check(found == wanted, *where, f"have the {name} of {INDEX} ({wanted})", found)
    shards = ShardFolder(folder, index, tokenizer)
    state = {path.name: _state(path, size) for path, (size, _) in shards.files().items()}
    stamp = {"index": index["sha256"], "files": state}
    if verify or _read_stamp(folder) != stamp:
        _check_contents(shards)
        try:
            replace_text(folder / STAMP, json.dumps(stamp))
        except OSError as error:
            what = "%s cannot be written (%s): contents will be verified at each start"
            logger.info(what, STAMP, error.strerror)
    return shards


def read_index(folder: Path) -> dict[str, Any]:
    """Content of ``index.json``, each field of which is checked.

    Raises:
        DataUnavailableError: there are no prepared data.
        UserError: the preparation is not complete, or the file is not as it was written.
    """
    path = folder / INDEX
    where = ("open_shards", f"{path}")
    if not path.is_file():
        hint = "Give the same `nsa data prepare` again to complete it."
        is_interrupted = (folder / PROGRESS).exists()
        check(not is_interrupted, *where, "exist", "an interrupted preparation", hint)
        hint = "Make it with: nsa data prepare SOURCE --out FOLDER"
        raise DataUnavailableError(*where, "exist", "nothing", hint)
    index = read_json(path, _REPAIR)
    same = isinstance(index, dict) and index.get("sha256") == index_digest(index)
    check(same, *where, "hold what its own SHA-256 says", "other content", _REPAIR)
    found = index.get("format")
    check(repr(found) == repr(FORMAT), *where, f"be of format {FORMAT}", found)
    fault = fault_of_form(index, _FORM) or _fault_of_sides(index)
    check(not fault, *where, "have the fields that docs/data.md lists", fault, _REPAIR)
    return index


def read_json(path: Path, hint: str) -> Any:
    """Content of a JSON file.

    Raises:
        UserError: it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        fail("open_shards", f"{path}", "be JSON", "a damaged file", f"{error}. {hint}")


def fault_of_form(value: Any, form: Any, name: str = "") -> str:
    """Name and value of the first field that is not of its form; empty if there is none.

    Args:
        value: what was read from JSON.
        form: a type (of numbers, those that are not negative) or several; a list of one form for a
            list; a dictionary for an object with at least its fields.
        name: of the value.
    """
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return f"{name} {value!r:.60}"
        missing = form.keys() - value.keys()
        if missing:
            return f"no {'.'.join(filter(None, (name, min(missing))))}"
        fields = [(value[key], form[key], f"{name}.{key}".lstrip(".")) for key in form]
    elif isinstance(form, list):
        if not isinstance(value, list):
            return f"{name} {value!r:.60}"
        fields = [(item, form[0], f"{name}[{number}]") for number, item in enumerate(value)]
    else:
        fits = isinstance(value, form) and (form is bool or type(value) is not bool)
        fits = fits and (not isinstance(value, int | float) or value >= 0)
        return "" if fits else f"{name} {value!r:.60}"
    return next(filter(None, (fault_of_form(*field) for field in fields)), "")


def _fault_of_sides(index: dict[str, Any]) -> str:
    """First field that disagrees with another one; empty if all of them agree."""
    sides, dtype = index["sides"], token_dtype(index["tokenizer"]["vocab_size"]).name
    found = ", ".join(sides)
    if tuple(sides) not in (SIDES, SIDES[:2]):  # those of before 0.2 have no test side
        return f"sides {found}"
    if "test" in sides:
        form = {"request": {"test_fraction": float}, "sides": {"test": _SIDE}}
        if fault := fault_of_form(index, form):
            return fault
    for name, wanted in (("token_dtype", dtype), ("byte_order", "little")):
        if index[name] != wanted:
            return f"{name} {index[name]!r}"
    for side, fields in sides.items():
        for number, shard in enumerate(fields["shards"]):
            name = f"sides.{side}.shards[{number}]"
            if shard.keys() != _SHARD.keys():
                return f"{name} with {', '.join(sorted(shard))}"
            if shard["name"] != f"{side}-{number:05d}":
                return f"{name}.name {shard['name']!r}"
            if not 0 < shard["documents"] <= shard["tokens"]:
                return f"{name}.documents {shard['documents']}"
        for total in ("tokens", "documents"):
            if fields[total] != sum(shard[total] for shard in fields["shards"]):
                return f"sides.{side}.{total} {fields[total]}"
    return ""


def _state(path: Path, size: int) -> list[int]:
    """What changes when the file does, after a check of its size."""
    check(path.is_file(), "open_shards", str(path), "exist", "nothing", _REPAIR)
    found = path.stat()
    rule = f"have {size} bytes, as {INDEX} says"
    check(found.st_size == size, "open_shards", str(path), rule, found.st_size, _REPAIR)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _check_contents(folder: ShardFolder) -> None:
    files = folder.files()
    total = sum(size for size, _ in files.values()) / 1e9
    logger.info("verifying %d files of %s (%.2f GB)", len(files), folder.path, total)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing lets other threads run
        found = zip(files.items(), threads.map(file_digest, files), strict=True)
        damaged = [str(path) for (path, (_, sha256)), digest in found if digest != sha256]
    more = f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
    names, rule = ", ".join(damaged[:_SHOWN]) + more, f"have the SHA-256 of {INDEX}"
    check(not damaged, "open_shards", names, rule, "other content", _REPAIR)


def _read_stamp(folder: Path) -> Any:
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class ShardSource(TextSource):
    """Windows of the tokens of one side, all shards in a row.

    Args:
        folder: opened by :func:`open_shards`.
        side: ``train``, ``validation`` or ``test``.
    """

    def __init__(self, folder: ShardFolder, side: Side) -> None:
        self.separator_id = folder.tokenizer.separator_id
        self.token_bytes = folder.tokenizer.token_bytes
        dtype, shards = shard_dtype(len(self.token_bytes)), folder.index["sides"][side]["shards"]
        self._paths = [folder.path / shard["name"] for shard in shards]
        # Slices of a memmap cost three times as much as those of an array.
        arrays = (np.memmap(f"{path}.tokens", dtype=dtype, mode="r") for path in self._paths)
        self._shards = [array.view(np.ndarray) for array in arrays]
        *self._starts, self._end = itertools.accumulate(map(len, self._shards), initial=0)

    @property
    def num_tokens(self) -> int:
        """See :class:`TextSource`."""
        return self._end

    def read(self, start: int, stop: int) -> Tokens:
        """See :class:`TextSource`."""
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        pairs = zip(self._starts[first:last], self._shards[first:last], strict=True)
        return np.concatenate([shard[max(start - at, 0) : stop - at] for at, shard in pairs])

    def document_starts(self) -> Ids:
        """See :class:`TextSource`."""
        offsets = (np.fromfile(f"{path}.offsets", dtype=OFFSET_DTYPE) for path in self._paths)
        pairs = zip(self._starts, offsets, strict=True)
        return np.concatenate([start + of_shard.astype(np.int64) for start, of_shard in pairs])
