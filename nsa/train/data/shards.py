"""Prepared data: tokens in memory-mapped shards with an index. docs/data.md describes the format.

Nothing here needs more than NumPy.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa.errors import check
from nsa.files import file_digest, replace_text
from nsa.train.data.batch import DataUnavailableError, TextSource
from nsa.train.data.documents import Side
from nsa.train.data.tokenizer import (
    Ids,
    Tokenizer,
    Tokens,
    fingerprint_of,
    load_tokenizer,
    token_dtype,
)

logger = logging.getLogger(__name__)

FORMAT = 1
INDEX, PROGRESS, TOKENIZER = "index.json", "progress.json", "tokenizer.json"
STAMP = "verified.json"
OFFSET_DTYPE = np.dtype("<u8")
_SHOWN = 3
_REPAIR = "Copy the folder again, or remove it and prepare the data again."


def shard_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of a token on disk: the smallest unsigned one, little-endian on every machine."""
    return token_dtype(vocab_size).newbyteorder("<")


def shard_files(
    folder: Path, shard: Mapping[str, Any], vocab_size: int
) -> dict[Path, tuple[int, str]]:
    """Size in bytes and SHA-256 of the two files of a shard, from its entry in the index.

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


# --- the index, and the note of an interrupted preparation ----------------------------------------
def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with ``sha256``, the SHA-256 of all others."""
    fields = {name: value for name, value in content.items() if name != "sha256"}
    return {**fields, "sha256": fingerprint_of(fields)}


def read_digested(path: Path, hint: str) -> dict[str, Any]:
    """Content of a JSON file that was written with its own SHA-256.

    Raises:
        UserError: the file is not as it was written.
    """
    content: Any = None
    rule = "be JSON with the SHA-256 that it says"
    with suppress(ValueError, RecursionError):
        content = json.loads(path.read_bytes())
    same = isinstance(content, dict) and content == with_digest(content)
    check(same, f"{path}", rule, "a damaged file", hint)
    return content


def read_index(folder: Path) -> dict[str, Any]:
    """Content of ``index.json``.

    Raises:
        DataUnavailableError: there are no prepared data.
        UserError: the preparation is not complete, or the file is not as it was written.
    """
    path = folder / INDEX
    where = f"{path}"
    if not path.is_file():
        hint = "Give the same `nsa data prepare` again to complete it."
        is_interrupted = (folder / PROGRESS).exists()
        check(not is_interrupted, where, "exist", "an interrupted preparation", hint)
        hint = "Make it with: nsa data prepare SOURCE --out FOLDER"
        raise DataUnavailableError(where, "exist", "nothing", hint)
    index = read_digested(path, _REPAIR)
    found = index.get("format")
    check(found == FORMAT, where, f"be of format {FORMAT}", found)
    return index


# --- reading --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ShardFolder:
    """A folder that ``nsa data prepare`` has completed, see :func:`open_shards`.

    Attributes:
        path: the folder.
        index: content of ``index.json``.
        tokenizer: tokenizer of all shards.
    """

    path: Path
    index: dict[str, Any]
    tokenizer: Tokenizer

    def files(self) -> dict[Path, tuple[int, str]]:
        """Size in bytes and SHA-256 of each shard file, from the index."""
        found: dict[Path, tuple[int, str]] = {}
        for side in self.index["sides"].values():
            for shard in side["shards"]:
                found |= shard_files(self.path, shard, self.tokenizer.vocab_size)
        return found


def open_shards(path: str | Path, *, verify: bool = False) -> ShardFolder:
    """Open prepared data after a check of its files.

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
    index, path = read_index(folder), folder / TOKENIZER
    tokenizer, wanted = load_tokenizer(path), index["tokenizer"]["fingerprint"]
    rule = f"have the fingerprint of {INDEX} ({wanted})"
    check(tokenizer.fingerprint == wanted, f"{path}", rule, tokenizer.fingerprint)
    shards = ShardFolder(folder, index, tokenizer)
    state = {path.name: _state(path, size) for path, (size, _) in shards.files().items()}
    stamp = json.dumps({"index": index["sha256"], "files": state}).encode()
    path = folder / STAMP
    if verify or not path.is_file() or path.read_bytes() != stamp:
        _check_contents(shards)
        try:
            replace_text(path, stamp)
        except OSError as error:
            what = "%s cannot be written (%s): contents will be verified at each start"
            logger.info(what, STAMP, error.strerror)
    return shards


def _state(path: Path, size: int) -> list[int]:
    """Numbers that change with the file, after a check of its size."""
    rule = f"have {size} bytes, as {INDEX} says"
    check(path.is_file(), str(path), rule, "nothing", _REPAIR)
    found = path.stat()
    check(found.st_size == size, str(path), rule, found.st_size, _REPAIR)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _check_contents(folder: ShardFolder) -> None:
    files = folder.files()
    total = sum(size for size, _ in files.values()) / 1e9
    logger.info("verifying %d files of %s (%.2f GB)", len(files), folder.path, total)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing lets other threads run
        found = zip(files.items(), threads.map(file_digest, files), strict=True)
        damaged = [str(path) for (path, (_, sha256)), digest in found if digest != sha256]
    names, rule = ", ".join(damaged[:_SHOWN]), f"have the SHA-256 of {INDEX}"
    check(not damaged, names, rule, "other content", _REPAIR)


class ShardSource(TextSource):
    """Sequences of one split of prepared data, through all shards in a row.

    Args:
        folder: opened by :func:`open_shards`.
        side: ``train``, ``validation`` or ``test``.
    """

    def __init__(self, folder: ShardFolder, side: Side) -> None:
        self.separator_id = folder.tokenizer.separator_id
        self.token_bytes = folder.tokenizer.token_bytes
        dtype, shards = shard_dtype(len(self.token_bytes)), folder.index["sides"][side]["shards"]
        self._paths = [folder.path / shard["name"] for shard in shards]
        # Slicing a memmap costs three times as much as slicing an array.
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


# --- writing --------------------------------------------------------------------------------------
class ShardWriter:
    """Shards of one split: ``<side>-00000.tokens`` with ``<side>-00000.offsets``, and so on.

    A shard ends with the document that brings it to ``shard_tokens`` or beyond, so the files depend
    on the documents alone and not on when they are written: at each commit, and when a shard ends.
    What was committed survives the end of the process at any moment.

    Args:
        folder: folder of the files.
        side: ``train``, ``validation`` or ``test``.
        vocab_size: size of the vocabulary.
        shard_tokens: see above.
        committed: result of :meth:`commit` before an interruption; everything written after it is
            removed.

    Raises:
        UserError: a file lacks what was committed.
    """

    def __init__(
        self,
        folder: Path,
        side: Side,
        vocab_size: int,
        shard_tokens: int,
        committed: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._folder, self._side = folder, side
        self._vocab_size, self._shard_tokens = vocab_size, shard_tokens
        self._shards = [dict(shard) for shard in committed]
        self._documents: list[Tokens] = []  # of the open shard, not yet written
        if not committed:
            self._add_shard()
        sizes = {path: size for shard in self._shards for path, size in self._files(shard)}
        for path in folder.glob(f"{side}-*"):
            if not sizes.get(path):
                path.unlink()
        for path, size in sizes.items():
            found = path.stat().st_size if path.is_file() else 0
            rule = f"have the {size} bytes written before the interruption"
            check(found >= size, str(path), rule, found or "nothing")
            if size:
                os.truncate(path, size)  # what came after the last commit is written again

    def total(self, what: str) -> int:
        """Number of ``tokens`` or ``documents`` of all shards."""
        return sum(shard[what] for shard in self._shards)

    def append(self, document: Tokens) -> None:
        """Append a document of at least one token."""
        shard = self._shards[-1]
        shard["tokens"] += len(document)
        shard["documents"] += 1
        self._documents.append(document)
        if shard["tokens"] >= self._shard_tokens:
            self._close()

    def commit(self) -> list[dict[str, Any]]:
        """Write everything to the disk; a later writer can continue from the result."""
        if self._documents:
            lengths = [len(document) for document in self._documents]
            begin = self._shards[-1]["tokens"] - sum(lengths)
            starts = begin + np.cumsum([0, *lengths[:-1]])
            tokens = np.concatenate(self._documents)
            arrays = (tokens.astype(shard_dtype(self._vocab_size)), starts.astype(OFFSET_DTYPE))
            for (path, _), array in zip(self._files(self._shards[-1]), arrays, strict=True):
                with path.open("ab") as file:
                    file.write(array.tobytes())
                    file.flush()
                    os.fsync(file.fileno())
            self._documents = []
        return self._shards

    def finish(self) -> list[dict[str, Any]]:
        """End the last shard; returns the entries of all shards for the index."""
        if self._shards[-1]["tokens"]:
            self._close()
        return self._shards[:-1]

    def _add_shard(self) -> None:
        name = f"{self._side}-{len(self._shards):05d}"
        self._shards.append({"name": name, "tokens": 0, "documents": 0})

    def _files(self, shard: Mapping[str, Any]) -> list[tuple[Path, int]]:
        files = shard_files(self._folder, shard, self._vocab_size)
        return [(path, size) for path, (size, _) in files.items()]

    def _close(self) -> None:
        """End the open shard with its hashes, and begin the next one."""
        *_, shard = self.commit()
        tokens, offsets = (file_digest(path) for path, _ in self._files(shard))
        shard |= {"tokens_sha256": tokens, "offsets_sha256": offsets}
        self._add_shard()
