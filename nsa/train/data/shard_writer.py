"""Writing shards so that what was committed survives the end of the process at any moment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nsa.errors import check
from nsa.train.data.documents import Side
from nsa.train.data.shards import OFFSET_DTYPE, file_digest, shard_dtype, shard_files
from nsa.train.data.tokenizer import Tokens


class ShardWriter:
    """Shards of one side: ``<side>-00000.tokens`` with ``<side>-00000.offsets``, and so on.

    A shard ends with the document that brings it to ``shard_tokens`` or beyond, so the files depend
    on the documents alone and not on when they are written: at each commit, and when a shard ends.

    Args:
        folder: where the files go.
        side: ``train``, ``validation`` or ``test``.
        vocab_size: of the tokens.
        shard_tokens: see above.
        committed: what :meth:`commit` returned before an interruption; everything written after it
            is removed.

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
        self._shards = [dict(shard) for shard in committed]  # the last one is open
        self._documents: list[Tokens] = []  # of the open shard, not yet written
        if not committed:
            self._add_shard()
        sizes = {path: size for shard in self._shards for path, size in self._files(shard).items()}
        for path in folder.glob(f"{side}-*"):
            if not sizes.get(path):
                path.unlink()
        for path, size in sizes.items():
            found = path.stat().st_size if path.is_file() else 0
            rule = f"have the {size} bytes written before the interruption"
            check(found >= size, "prepare", str(path), rule, found or "nothing")
            if size:
                os.truncate(path, size)  # what came after the last commit is written again

    def total(self, what: Literal["tokens", "documents"]) -> int:
        """Tokens or documents of all shards."""
        return sum(shard[what] for shard in self._shards)

    def append(self, document: Tokens) -> None:
        """Add a document of at least one token."""
        shard = self._shards[-1]
        shard["tokens"] += len(document)
        shard["documents"] += 1
        self._documents.append(document)
        if shard["tokens"] >= self._shard_tokens:
            self._close()

    def commit(self) -> list[dict[str, Any]]:
        """Bring everything to the disk; the result lets a later writer continue from here."""
        if self._documents:
            lengths = [len(document) for document in self._documents]
            begin = self._shards[-1]["tokens"] - sum(lengths)
            starts = begin + np.cumsum([0, *lengths[:-1]])
            tokens = np.concatenate(self._documents)
            arrays = (tokens.astype(shard_dtype(self._vocab_size)), starts.astype(OFFSET_DTYPE))
            for path, array in zip(self._files(self._shards[-1]), arrays, strict=True):
                with path.open("ab") as file:
                    file.write(array.tobytes())
                    file.flush()
                    os.fsync(file.fileno())
            self._documents = []
        return self._shards

    def finish(self) -> list[dict[str, Any]]:
        """End the last shard; entries of all shards for the index."""
        if self._shards[-1]["tokens"]:
            self._close()
        return self._shards[:-1]

    def _add_shard(self) -> None:
        name = f"{self._side}-{len(self._shards):05d}"
        self._shards.append({"name": name, "tokens": 0, "documents": 0})

    def _files(self, shard: Mapping[str, Any]) -> dict[Path, int]:
        files = shard_files(self._folder, shard, self._vocab_size)
        return {path: size for path, (size, _) in files.items()}

    def _close(self) -> None:
        """End the open shard with its hashes, and begin the next one."""
        *_, shard = self.commit()
        tokens, offsets = map(file_digest, self._files(shard))
        shard |= {"tokens_sha256": tokens, "offsets_sha256": offsets}
        self._add_shard()
