"""Prepared data: tokens in memory-mapped shards with an index. The format is described in docs/data.md.

Nothing here needs more than NumPy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.errors import UserError, check
from nsa.train.data.source import DataUnavailableError, check_window, most_sequences
from nsa.train.data.tokenise import SIDES, Side
from nsa.train.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from nsa.train.run_folder import replace_text

logger = logging.getLogger(__name__)

FORMAT = 1
INDEX, PROGRESS, TOKENIZER, STAMP = "index.json", "progress.json", "tokenizer.json", "verified.json"
OFFSET_DTYPE = np.dtype("<u8")
_SHOWN = 3
_REPAIR = "Copy the folder again, or remove it and prepare the data again."


class ShardError(UserError):
    """Prepared data that are incomplete or damaged; the message names the file."""


def shard_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of a token on disk: the smallest unsigned one, little-endian whatever the machine."""
    return token_dtype(vocab_size).newbyteorder("<")


def index_digest(index: Mapping[str, Any]) -> str:
    """SHA-256 of an index without its own ``sha256``."""
    fields = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Shard:
    """Entry of a shard in the index.

    Attributes:
        name: of its files, without ``.tokens`` and ``.offsets``.
        tokens: how many.
        documents: how many.
        tokens_sha256: of the file of tokens.
        offsets_sha256: of the file of offsets.
    """

    name: str
    tokens: int
    documents: int
    tokens_sha256: str
    offsets_sha256: str


@dataclass(frozen=True)
class ShardFolder:
    """A folder that ``nsa data prepare`` has completed; :func:`open_shards` makes it.

    Attributes:
        path: the folder.
        index: content of ``index.json``.
        shards: its entries of shards, by side.
        tokenizer: of all shards.
    """

    path: Path
    index: dict[str, Any]
    shards: dict[Side, tuple[Shard, ...]]
    tokenizer: Tokenizer

    def files(self) -> dict[str, tuple[int, str]]:
        """Size in bytes and SHA-256 of each shard file, by name, as the index says."""
        found: dict[str, tuple[int, str]] = {}
        token_size = shard_dtype(self.tokenizer.vocab_size).itemsize
        for shards in self.shards.values():
            for shard in shards:
                found[f"{shard.name}.tokens"] = (shard.tokens * token_size, shard.tokens_sha256)
                found[f"{shard.name}.offsets"] = (shard.documents * OFFSET_DTYPE.itemsize, shard.offsets_sha256)
        return found

    def source(self, side: Side) -> ShardSource:
        """Windows of one side."""
        return ShardSource(self, side)


def open_shards(path: str | Path, *, verify: bool = False) -> ShardFolder:
    """Open prepared data after a check of what is there.

    Sizes are checked every time. Contents are read and compared with their SHA-256 when the folder is opened for the first
    time, and again whenever a file has changed since (by size, times and inode, which ``verified.json`` keeps).

    Args:
        path: the folder.
        verify: read all contents again, whatever was verified before.

    Raises:
        DataUnavailableError: there are no prepared data.
        ShardError: a file is missing, of the wrong size or damaged, or the index does not fit.
    """
    folder = Path(path)
    index = _read_index(folder)
    entries = _entries(folder, index)
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    except UserError as error:
        raise ShardError("open_shards", str(folder / TOKENIZER), error.rule, error.value) from None
    wanted = index["tokenizer"]["fingerprint"]
    if tokenizer.fingerprint != wanted:
        rule = f"have the fingerprint of {INDEX} ({wanted})"
        raise ShardError("open_shards", str(folder / TOKENIZER), rule, tokenizer.fingerprint)
    shards = ShardFolder(folder, index, entries, tokenizer)
    _check_sizes(shards)
    state = {name: _state(folder / name) for name in shards.files()}
    if verify or _stamp(folder) != {"index": index["sha256"], "files": state}:
        _check_contents(shards)
        try:
            replace_text(folder / STAMP, json.dumps({"index": index["sha256"], "files": state}))
        except OSError as error:
            logger.info("%s cannot be written (%s): contents will be verified at each start", STAMP, error.strerror)
    return shards


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        if (folder / PROGRESS).exists():
            hint = "Give the same `nsa data prepare` again to complete it."
            raise ShardError("open_shards", str(path), "exist", "an interrupted preparation", hint)
        hint = "Make it with: nsa data prepare SOURCE --out FOLDER"
        raise DataUnavailableError("open_shards", str(path), "exist", "nothing", hint)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ShardError("open_shards", str(path), "be JSON", "a damaged file", f"{error}.") from None
    if not isinstance(index, dict) or index.get("sha256") != index_digest(index):
        raise ShardError("open_shards", str(path), "hold what its own SHA-256 says", "other content")
    if str(index.get("format")) != str(FORMAT):
        raise ShardError("open_shards", str(path), f"be of format {FORMAT}", index.get("format"))
    return index


def _entries(folder: Path, index: dict[str, Any]) -> dict[Side, tuple[Shard, ...]]:
    """The entries of shards, after a check that the index has the form that it must have."""
    try:
        found = {side: tuple(Shard(**entry) for entry in index["sides"][side]["shards"]) for side in SIDES}
        fits = isinstance(index["tokenizer"]["fingerprint"], str)
        fits &= index["source"].keys() >= {"name", "subset", "split", "revision", "licence"}
        fits &= type(index["request"]["validation_fraction"]) is float
        for side, shards in found.items():
            fits &= [shard.name for shard in shards] == [f"{side}-{number:05d}" for number in range(len(shards))]
            fits &= all(type(shard.tokens) is int and 0 < shard.documents <= shard.tokens for shard in shards)
            fits &= type(index["sides"][side]["text_bytes"]) is int
            for total in ("tokens", "documents"):
                fits &= index["sides"][side][total] == sum(getattr(shard, total) for shard in shards)
    except (AttributeError, KeyError, TypeError):
        fits = False
    if not fits:
        raise ShardError("open_shards", str(folder / INDEX), "have the fields that docs/data.md lists", "others")
    return found


def _check_sizes(shards: ShardFolder) -> None:
    for name, (size, _) in shards.files().items():
        path = shards.path / name
        if not path.is_file():
            raise ShardError("open_shards", str(path), "exist", "nothing", _REPAIR)
        found = path.stat().st_size
        if found != size:
            raise ShardError("open_shards", str(path), f"have {size} bytes, as {INDEX} says", found, _REPAIR)


def _check_contents(shards: ShardFolder) -> None:
    files = shards.files()
    total = sum(size for size, _ in files.values())
    logger.info("verifying %d files of %s (%.2f GB)", len(files), shards.path, total / 1e9)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing lets other threads run
        digests = list(threads.map(lambda name: _sha256(shards.path / name), files))
    damaged = [name for (name, (_, wanted)), digest in zip(files.items(), digests, strict=True) if digest != wanted]
    if damaged:
        more = f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
        names = ", ".join(str(shards.path / name) for name in damaged[:_SHOWN])
        raise ShardError("open_shards", names + more, f"have the SHA-256 of {INDEX}", "other content", _REPAIR)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _stamp(folder: Path) -> Any:
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class ShardSource:
    """Windows of the tokens of one side, all shards in a row; a :class:`nsa.train.data.source.TokenSource`.

    The windows are those of :class:`nsa.train.data.source.TextSource` over the same documents.

    Args:
        folder: opened by :func:`open_shards`.
        side: ``train`` or ``validation``.
    """

    def __init__(self, folder: ShardFolder, side: Side) -> None:
        tokenizer = folder.tokenizer
        self.separator_id = tokenizer.separator_id
        self.token_bytes = tokenizer.token_bytes
        self.num_tokens = 0
        self._starts: list[int] = []
        self._offsets: list[Path] = []
        self._shards: list[NDArray[Any]] = []
        for shard in folder.shards[side]:
            self._starts.append(self.num_tokens)
            self._offsets.append(folder.path / f"{shard.name}.offsets")
            mapped = np.memmap(folder.path / f"{shard.name}.tokens", dtype=shard_dtype(tokenizer.vocab_size), mode="r")
            self._shards.append(mapped.view(np.ndarray))  # slices of a memmap cost three times as much
            self.num_tokens += shard.tokens

    def num_windows(self, seq_len: int) -> int:
        """See :class:`nsa.train.data.source.TokenSource`."""
        check(seq_len > 0, "ShardSource.num_windows", "seq_len", "be positive", seq_len)
        return max(0, (self.num_tokens - 1) // seq_len)

    def window(self, seq_len: int, index: int) -> NDArray[np.int64]:
        """See :class:`nsa.train.data.source.TokenSource`."""
        check_window(self, seq_len, index)
        return self.tokens(index * seq_len, (index + 1) * seq_len + 1).astype(np.int64)

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_] | None:
        """See :class:`nsa.train.data.source.TokenSource`: every target counts."""
        return None

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """See :class:`nsa.train.data.source.TokenSource`; from the offsets of the documents."""
        return most_sequences(self, np.concatenate(list(self._document_starts())), seq_len, num_windows)

    def _document_starts(self) -> Iterator[NDArray[np.int64]]:
        """First token of each document, counted from the beginning of the side; shard by shard."""
        for first, path in zip(self._starts, self._offsets, strict=True):
            yield np.fromfile(path, dtype=OFFSET_DTYPE).astype(np.int64) + first

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens ``start`` to ``stop - 1`` of the side, as they are stored."""
        parts = list(self._parts(start, min(stop, self.num_tokens)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _parts(self, start: int, stop: int) -> Iterator[NDArray[Any]]:
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            shard, first = self._shards[number], self._starts[number]
            yield shard[start - first : stop - first]
            number, start = number + 1, first + len(shard)
