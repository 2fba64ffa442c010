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
_SHARD_FIELDS = {"name", "tokens", "documents", "tokens_sha256", "offsets_sha256"}
_SOURCE_FIELDS = {"name", "subset", "split", "revision", "licence"}


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
    index, where = _read_index(folder), ("open_shards", f"{folder / TOKENIZER}")
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    except UserError as error:
        fail(*where, error.rule, error.value)
    wanted = index["tokenizer"]["fingerprint"]
    rule = f"have the fingerprint of {INDEX} ({wanted})"
    check(tokenizer.fingerprint == wanted, *where, rule, tokenizer.fingerprint)
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


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    where = ("open_shards", f"{path}")
    if not path.is_file():
        hint = "Give the same `nsa data prepare` again to complete it."
        is_interrupted = (folder / PROGRESS).exists()
        check(not is_interrupted, *where, "exist", "an interrupted preparation", hint)
        hint = "Make it with: nsa data prepare SOURCE --out FOLDER"
        raise DataUnavailableError(*where, "exist", "nothing", hint)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        fail(*where, "be JSON", "a damaged file", f"{error}.")
    same = isinstance(index, dict) and index.get("sha256") == index_digest(index)
    check(same, *where, "hold what its own SHA-256 says", "other content")
    found = index.get("format")
    check(str(found) == str(FORMAT), *where, f"be of format {FORMAT}", found)
    try:
        is_whole = _is_whole(index)
    except (AttributeError, KeyError, TypeError):
        is_whole = False
    check(is_whole, *where, "have the fields that docs/data.md lists", "others")
    return index


def _is_whole(index: dict[str, Any]) -> bool:
    """Whether the fields that are used have the form that they must have."""
    fits = [
        isinstance(index["tokenizer"]["fingerprint"], str),
        index["source"].keys() >= _SOURCE_FIELDS,
        type(index["request"]["validation_fraction"]) is float,
    ]
    sides = index["sides"]
    fits.append(tuple(sides) in (SIDES, SIDES[:2]))  # those of before 0.2 have no test side
    for name, side in sides.items():
        fits.append(type(side["text_bytes"]) is int)
        for number, shard in enumerate(side["shards"]):
            fits.append(shard.keys() == _SHARD_FIELDS and shard["name"] == f"{name}-{number:05d}")
            fits.append(type(shard["tokens"]) is int and 0 < shard["documents"] <= shard["tokens"])
        for total in ("tokens", "documents"):
            fits.append(side[total] == sum(shard[total] for shard in side["shards"]))
    return all(fits)


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
