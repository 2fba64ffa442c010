"""Writing the shards of one side, so that what was committed survives the end of the process at any moment."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.train.data.shards import OFFSET_DTYPE, ShardError
from nsa.train.data.tokenise import Side

_CHUNK = 1 << 20


class _AppendedFile:
    """A file that grows, with the SHA-256 of its content; nothing of it waits in a buffer of this process."""

    def __init__(self, path: Path, committed: int) -> None:
        self._file = FileIO(path, "r+" if committed else "w+")
        found = os.fstat(self._file.fileno()).st_size
        if found < committed:
            self._file.close()
            raise ShardError("prepare", str(path), f"have the {committed} bytes written before the interruption", found)
        self._file.truncate(committed)  # what came after the last commit is written again
        self._digest = hashlib.sha256()
        while chunk := self._file.read(_CHUNK):
            self._digest.update(chunk)

    def append(self, array: NDArray[Any]) -> None:
        left = np.ascontiguousarray(array).view(np.uint8).data
        self._digest.update(left)
        while left:
            left = left[self._file.write(left) :]

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> str:
        self._file.close()
        return self._digest.hexdigest()


class ShardWriter:
    """Shards of one side: ``<side>-00000.tokens`` with ``<side>-00000.offsets``, and so on.

    A shard ends with the document that brings it to ``shard_tokens`` or beyond, so the files depend on the documents alone and
    not on the batches in which they come.

    Attributes:
        num_tokens: tokens of all shards.
        num_documents: their documents.

    Args:
        folder: where the files go.
        side: ``train`` or ``validation``.
        dtype: type of a token on disk.
        shard_tokens: see above.
        committed: what :meth:`commit` returned before an interruption; everything after it is removed. None starts anew.

    Raises:
        ShardError: a file lacks what was committed.
    """

    def __init__(
        self, folder: Path, side: Side, dtype: np.dtype[Any], shard_tokens: int, committed: Mapping[str, Any] | None
    ) -> None:
        self._folder, self._side, self._dtype, self._shard_tokens = folder, side, dtype, shard_tokens
        self._shards: list[dict[str, Any]] = [] if committed is None else list(committed["shards"])
        self._open_tokens = self._open_documents = 0
        self._tokens: _AppendedFile | None = None
        self._offsets: _AppendedFile | None = None
        for shard in self._shards:
            self._check_closed(shard)
        if committed is not None and committed["open_tokens"]:
            self._open_tokens, self._open_documents = committed["open_tokens"], committed["open_documents"]
            self._open()
        self.num_tokens = self._open_tokens + sum(shard["tokens"] for shard in self._shards)
        self.num_documents = self._open_documents + sum(shard["documents"] for shard in self._shards)
        self._remove_uncommitted()

    def append(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Add documents.

        Args:
            tokens: of all documents in order.
            lengths: tokens of each document, at least 1.
        """
        ends = np.cumsum(lengths)
        first = start = 0
        while first < len(lengths):
            room = self._shard_tokens - self._open_tokens
            last = min(int(np.searchsorted(ends, start + room)), len(lengths) - 1)
            stop = int(ends[last])
            self._write(tokens[start:stop], lengths[first : last + 1])
            first, start = last + 1, stop
            if self._open_tokens >= self._shard_tokens:
                self._close()

    def commit(self) -> dict[str, Any]:
        """Bring everything to the disk; the result lets a later writer continue from here."""
        for file in (self._tokens, self._offsets):
            if file is not None:
                file.flush()
        return {"shards": list(self._shards), "open_tokens": self._open_tokens, "open_documents": self._open_documents}

    def finish(self) -> list[dict[str, Any]]:
        """End the last shard; entries of all shards for the index."""
        if self._open_tokens:
            self._close()
        return self._shards

    def close(self) -> None:
        """Close the files as they are; what was committed stays."""
        for file in (self._tokens, self._offsets):
            if file is not None:
                file.close()
        self._tokens = self._offsets = None

    @property
    def _name(self) -> str:
        return f"{self._side}-{len(self._shards):05d}"

    def _open(self) -> None:
        sizes = (self._open_tokens * self._dtype.itemsize, self._open_documents * OFFSET_DTYPE.itemsize)
        try:
            self._tokens = _AppendedFile(self._folder / f"{self._name}.tokens", sizes[0])
            self._offsets = _AppendedFile(self._folder / f"{self._name}.offsets", sizes[1])
        except (OSError, ShardError):
            self.close()
            raise

    def _write(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        if self._tokens is None:
            self._open()
        assert self._tokens is not None and self._offsets is not None, "no open shard"
        starts = self._open_tokens + np.cumsum(lengths) - lengths
        self._tokens.append(tokens.astype(self._dtype, copy=False))
        self._offsets.append(starts.astype(OFFSET_DTYPE))
        self._open_tokens += len(tokens)
        self._open_documents += len(lengths)
        self.num_tokens += len(tokens)
        self.num_documents += len(lengths)

    def _close(self) -> None:
        assert self._tokens is not None and self._offsets is not None, "no open shard"
        self._tokens.flush()
        self._offsets.flush()
        shard = {
            "name": self._name,
            "tokens": self._open_tokens,
            "documents": self._open_documents,
            "tokens_sha256": self._tokens.close(),
            "offsets_sha256": self._offsets.close(),
        }
        self._shards.append(shard)
        self._tokens = self._offsets = None
        self._open_tokens = self._open_documents = 0

    def _check_closed(self, shard: Mapping[str, Any]) -> None:
        sizes = {"tokens": shard["tokens"] * self._dtype.itemsize, "offsets": shard["documents"] * OFFSET_DTYPE.itemsize}
        for suffix, size in sizes.items():
            path = self._folder / f"{shard['name']}.{suffix}"
            if not path.is_file() or path.stat().st_size != size:
                found = path.stat().st_size if path.is_file() else "nothing"
                raise ShardError("prepare", str(path), f"have the {size} bytes written before the interruption", found)

    def _remove_uncommitted(self) -> None:
        known = {shard["name"] for shard in self._shards} | ({self._name} if self._open_tokens else set())
        for path in self._folder.glob(f"{self._side}-*"):
            if path.stem not in known:
                path.unlink()
