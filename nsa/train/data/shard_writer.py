"""Writing shards so that what was committed survives the end of the process at any moment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        self._shards: list[dict[str, Any]] = list(committed["shards"])
        self._open = self._new_shard(committed["open_tokens"], committed["open_documents"])
        sizes = {
            path: size for shard in (*self._shards, self._open) if shard["tokens"] for path, size in self._files(shard).items()
        }
        for path in {*folder.glob(f"{side}-*")} - sizes.keys():
            path.unlink()
        for path, size in sizes.items():
            found = path.stat().st_size if path.is_file() else -1
            if found < size:
                rule = f"have the {size} bytes written before the interruption"
                raise ShardError("prepare", str(path), rule, "nothing" if found < 0 else found)
            os.truncate(path, size)  # what came after the last commit is written again

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard["tokens"] for shard in (*self._shards, self._open))

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return sum(shard["documents"] for shard in (*self._shards, self._open))

    def append(self, documents: Sequence[Tokens]) -> None:
        """Add documents, of at least one token each."""
        part: list[Tokens] = []
        size = self._open["tokens"]
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
        tokens, documents = self._open["tokens"], self._open["documents"]
        if tokens:
            self._flush()
        return {"shards": self._shards, "open_tokens": tokens, "open_documents": documents}

    def finish(self) -> list[dict[str, Any]]:
        """End the last shard; entries of all shards for the index."""
        if self._open["tokens"]:
            self._close()
        return self._shards

    def _new_shard(self, tokens: int = 0, documents: int = 0) -> dict[str, Any]:
        name = f"{self._side}-{len(self._shards):05d}"
        return {"name": name, "tokens": tokens, "documents": documents}

    def _files(self, shard: Mapping[str, Any]) -> dict[Path, int]:
        files = shard_files(shard, self._vocab_size)
        return {self._folder / name: size for name, size in files.items()}

    def _write(self, documents: Sequence[Tokens]) -> None:
        shard = self._open
        tokens, offsets = map(AppendedFile, self._files(shard))
        ends = shard["tokens"] + np.cumsum([len(document) for document in documents])
        starts = np.array([shard["tokens"], *ends[:-1]], dtype=OFFSET_DTYPE)
        stored = np.concatenate(documents).astype(shard_dtype(self._vocab_size))
        tokens.append(stored.tobytes())
        offsets.append(starts.tobytes())
        shard["tokens"] = int(ends[-1])
        shard["documents"] += len(documents)

    def _close(self) -> None:
        tokens, offsets = self._flush()
        digests = {"tokens_sha256": file_digest(tokens), "offsets_sha256": file_digest(offsets)}
        self._shards.append({**self._open, **digests})
        self._open = self._new_shard()

    def _flush(self) -> list[Path]:
        paths = list(self._files(self._open))
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return paths
