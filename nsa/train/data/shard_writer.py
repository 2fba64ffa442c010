"""Writing shards so that what was committed survives the end of the process at any moment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nsa.train.data.documents import Side
from nsa.train.data.shards import OFFSET_DTYPE, ShardError, file_digest, shard_dtype, shard_files
from nsa.train.data.tokenizer import Tokens
from nsa.train.run_folder import AppendedFile

NOTHING: dict[str, Any] = {"shards": [], "open_tokens": 0, "open_documents": 0}


class ShardWriter:
    """Shards of one side: ``<side>-00000.tokens`` with ``<side>-00000.offsets``, and so on.

    A shard ends with the document that brings it to ``shard_tokens`` or beyond, so the files depend
    on the documents alone and not on the batches in which they come.

    Args:
        folder: where the files go.
        side: ``train`` or ``validation``.
        vocab_size: of the tokens.
        shard_tokens: see above.
        committed: what :meth:`commit` returned before an interruption; everything after it is
            removed.

    Raises:
        ShardError: a file lacks what was committed.
    """

    def __init__(
        self,
        folder: Path,
        side: Side,
        vocab_size: int,
        shard_tokens: int,
        committed: Mapping[str, Any] = NOTHING,
    ) -> None:
        self._folder, self._side = folder, side
        self._vocab_size, self._shard_tokens = vocab_size, shard_tokens
        self._shards: list[dict[str, Any]] = list(committed["shards"])  # the last one is open
        self._add_shard(committed["open_tokens"], committed["open_documents"])
        files = {path: size for shard in self._shards for path, size in self._files(shard).items()}
        for path in folder.glob(f"{side}-*"):
            if not files.get(path):
                path.unlink()
        for path, size in files.items():
            found = path.stat().st_size if path.is_file() else 0
            if found < size:
                rule = f"have the {size} bytes written before the interruption"
                raise ShardError("prepare", str(path), rule, found or "nothing")
            if size:
                os.truncate(path, size)  # what came after the last commit is written again

    def total(self, what: Literal["tokens", "documents"]) -> int:
        """Tokens or documents of all shards."""
        return sum(shard[what] for shard in self._shards)

    def append(self, documents: Sequence[Tokens]) -> None:
        """Add documents, of at least one token each."""
        part: list[Tokens] = []
        size = self._shards[-1]["tokens"]
        for document in documents:
            part.append(document)
            size += len(document)
            if size >= self._shard_tokens:
                self._write(part)
                self._close()
                part, size = [], 0
        if part:
            self._write(part)

    def commit(self) -> dict[str, Any]:
        """Bring everything to the disk; the result lets a later writer continue from here."""
        *closed, last = self._shards
        if last["tokens"]:
            self._flush()
        tokens, documents = last["tokens"], last["documents"]
        return {"shards": closed, "open_tokens": tokens, "open_documents": documents}

    def finish(self) -> list[dict[str, Any]]:
        """End the last shard; entries of all shards for the index."""
        if self._shards[-1]["tokens"]:
            self._close()
        return self._shards[:-1]

    def _add_shard(self, tokens: int = 0, documents: int = 0) -> None:
        name = f"{self._side}-{len(self._shards):05d}"
        self._shards.append({"name": name, "tokens": tokens, "documents": documents})

    def _files(self, shard: Mapping[str, Any]) -> dict[Path, int]:
        files = shard_files(self._folder, shard, self._vocab_size)
        return {path: size for path, (size, _) in files.items()}

    def _write(self, documents: Sequence[Tokens]) -> None:
        shard = self._shards[-1]
        ends = shard["tokens"] + np.cumsum([len(document) for document in documents])
        starts = np.array([shard["tokens"], *ends[:-1]], dtype=OFFSET_DTYPE)
        stored = np.concatenate(documents).astype(shard_dtype(self._vocab_size))
        for path, array in zip(self._files(shard), (stored, starts), strict=True):
            AppendedFile(path).append(array.tobytes())
        shard["tokens"] = int(ends[-1])
        shard["documents"] += len(documents)

    def _close(self) -> None:
        tokens, offsets = self._flush()
        self._shards[-1] |= {
            "tokens_sha256": file_digest(tokens),
            "offsets_sha256": file_digest(offsets),
        }
        self._add_shard()

    def _flush(self) -> list[Path]:
        paths = list(self._files(self._shards[-1]))
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return paths
