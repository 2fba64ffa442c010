"""``nsa data prepare``: a data set becomes memory-mapped shards, once.

The result is exactly the same however often the preparation is interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nsa.errors import check, fail
from nsa.files import replace_text
from nsa.train.config import check_fractions
from nsa.train.data.documents import SIDES, Row, rows_of, tokenise
from nsa.train.data.local import (
    Documents,
    Origin,
    Place,
    find_files,
    is_local,
    warn_of_skipped,
)
from nsa.train.data.reader import read_documents
from nsa.train.data.shards import (
    FORMAT,
    INDEX,
    PROGRESS,
    STAMP,
    TOKENIZER,
    ShardWriter,
    read_digested,
    read_index,
    with_digest,
)
from nsa.train.data.tokenizer import load_tokenizer, make_tokenizer, token_dtype
from nsa.train.distributed.launch import check_platform

_LOCK = "prepare.lock"
_OURS = {INDEX, PROGRESS, STAMP, TOKENIZER, _LOCK}
_COMMIT_S = 5.0  # at most so much work is done twice after an interruption
_BPE_SAMPLE_BYTES = 64 << 20
_OPTIONS = ("--validation-fraction", "--test-fraction")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class PrepareConfig:
    """Settings of the preparation.

    Attributes:
        origin: the data set.
        tokenizer: ``byte``, ``gpt2``, ``bpe`` (trained on the first 64 MiB of the training text) or
            ``file``.
        tokenizer_path: a ``tokenizers`` JSON file, for ``file``.
        bpe_vocab_size: vocabulary of ``bpe``, separator included.
        validation_fraction: fraction of the documents for validation, by hash.
        test_fraction: fraction of the documents for the test, by hash; 0 for none.
        max_tokens: end with the document that brings the training text to so many tokens; None
            takes everything.
        shard_tokens: a shard ends with the document that brings it to so many tokens.
        licence: licence of the text, if the hub does not state it.
    """

    origin: Origin
    tokenizer: Literal["byte", "gpt2", "bpe", "file"] = "gpt2"
    tokenizer_path: str | None = None
    bpe_vocab_size: int = 8192
    validation_fraction: float = 0.005
    test_fraction: float = 0.0
    max_tokens: int | None = None
    shard_tokens: int = 100_000_000
    licence: str | None = None

    def __post_init__(self) -> None:
        check_fractions(*self.fractions, _OPTIONS)
        limit, size = self.max_tokens, self.shard_tokens
        check(limit is None or limit > 0, "--max-tokens", "be positive", limit)
        check(size > 0, "--shard-tokens", "be positive", size)
        path, rule = self.tokenizer_path, "be given with --tokenizer file and only then"
        is_wanted = self.tokenizer == "file"
        check((path is not None) == is_wanted, "--tokenizer-path", rule, path)

    @property
    def fractions(self) -> tuple[float, float]:
        """Fractions of the documents for validation and test."""
        return self.validation_fraction, self.test_fraction


def prepare(
    config: PrepareConfig,
    out: str | Path,
    *,
    workers: int | None = None,
    time_limit_s: float = 300,
    on_progress: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Tokenise a data set into shards.

    Ended at any moment, even by SIGKILL, it continues when it is called again with the same
    configuration, and the files are then bit for bit those of a preparation without interruption.
    They do not depend on the number of workers either.

    Args:
        config: what to prepare.
        out: folder for the shards; new, empty, or that of an interrupted preparation.
        workers: threads that tokenise; None takes one for each core that this process may use.
            Bytes need one.
        time_limit_s: seconds without a document after which the source is given up.
        on_progress: called with a line about the progress after each batch.

    Returns:
        The content of ``index.json``.

    Raises:
        DataUnavailableError: the source does not exist, cannot be reached, or stays silent.
        UserError: it cannot be read, ``out`` belongs to something else, or the disk is full.
    """
    check_platform()
    check(workers is None or workers > 0, "--workers", "be positive", workers)
    threads = 1 if config.tokenizer == "byte" else workers or os.cpu_count() or 1
    folder = Path(out)
    with _in_use(folder):
        if (folder / INDEX).exists():
            index = read_index(folder)
            _check_request(folder, config, index)
            return index
        preparation = _Preparation(config, folder, _saved(config, folder), time_limit_s)
        preparation.run(threads, on_progress)
        return preparation.finish()


class _Preparation:
    """A preparation that starts, or continues from the content of ``progress.json``.

    Attributes:
        is_one: whether the data are a single local text, divided as source ``folder`` divides it.
        progress: JSON of what was done, interrupted attempts included: ``place`` of the next
            document, rows ``left_out``, and ``text_bytes`` by split.
    """

    def __init__(
        self,
        config: PrepareConfig,
        folder: Path,
        saved: dict[str, Any] | None,
        time_limit_s: float,
    ) -> None:
        self.config, self.folder = config, folder
        origin, shards = config.origin, dict[str, Any]()
        local = find_files(origin) if is_local(origin) else None
        self.is_one = local is not None and local.format == "text" and len(local.files) == 1
        if saved is None:
            wants_text = config.tokenizer == "bpe"
            texts = list(self._training_sample(time_limit_s)) if wants_text else ()
            self.tokenizer = make_tokenizer(config, texts)
            self.progress: dict[str, Any] = {
                "place": Place(),
                "left_out": {"empty": 0, "unreadable": 0},
                "text_bytes": dict.fromkeys(SIDES, 0),
            }
        else:
            origin = replace(origin, revision=saved["found"]["revision"])
            self.tokenizer = load_tokenizer(folder / TOKENIZER)
            self.progress, shards = saved["progress"], saved["shards"]
        start = Place(*self.progress["place"])
        self.found, self._batches = read_documents(origin, start=start, time_limit_s=time_limit_s)
        warn_of_skipped(self.found.skipped)
        if saved is None:
            self.tokenizer.save(folder / TOKENIZER)
        else:
            rule = "contain the same files as before the interruption"
            others, hint = f"other files in {origin.source}", "Remove --out to start again."
            same = saved["found"]["fingerprint"] == self.found.fingerprint
            check(same, "SOURCE", rule, others, hint)
        sizes = (self.tokenizer.vocab_size, config.shard_tokens)
        self.writers: dict[str, ShardWriter] = {
            side: ShardWriter(folder, side, *sizes, shards.get(side, ()))
            for side in (SIDES if config.test_fraction else SIDES[:2])
        }

    def _training_sample(self, time_limit_s: float) -> Iterator[bytes]:
        """Training text to learn a vocabulary from."""
        size = 0
        _, batches = read_documents(self.config.origin, time_limit_s=time_limit_s)
        with closing(batches):
            for batch in batches:
                for kind, text in rows_of(batch.texts, self.config.fractions, self.is_one):
                    if kind == "train":
                        yield text
                        size += len(text)
                if size >= _BPE_SAMPLE_BYTES:
                    return

    def run(self, threads: int, on_progress: Callable[[str], object]) -> None:
        """Write shards, and commit them every few seconds."""
        tokenised = partial(tokenise, self.tokenizer, self.config.fractions, SIDES, self.is_one)
        begin_s = committed_s = time.monotonic()
        before = sum(self.progress["text_bytes"].values())
        with closing(self._batches):
            self._commit()
            batches = _in_threads(tokenised, self._batches, threads)
            while not self._is_enough() and (batch := next(batches, None)):
                self.progress["place"], rows = batch
                self._write(rows)
                now = time.monotonic()
                if now - committed_s > _COMMIT_S:
                    self._commit()
                    committed_s = now
                on_progress(self._line(before, now - begin_s))

    def _is_enough(self) -> bool:
        limit = self.config.max_tokens
        return limit is not None and self.writers["train"].total("tokens") >= limit

    def _line(self, before: int, seconds: float) -> str:
        """Progress in one line; the speed is that since ``before`` bytes of text."""
        size = sum(self.progress["text_bytes"].values())
        tokens, documents = (
            sum(writer.total(what) for writer in self.writers.values())
            for what in ("tokens", "documents")
        )
        file, files = self.progress["place"][0] + 1, len(self.found.files)
        return (
            f"{(size - before) / 1e6 / max(seconds, 1e-9):.1f} MB/s | {size / 1e9:.2f} GB of text "
            f"| {tokens:,} tokens | {documents:,} documents | file {file} of {files}"
        )

    def _write(self, rows: list[Row]) -> None:
        """Append rows until there are enough tokens."""
        for row in rows:
            if row.kind in self.writers:
                self.progress["text_bytes"][row.kind] += row.num_bytes
                self.writers[row.kind].append(row.tokens)
                if self._is_enough():
                    return
            else:
                self.progress["left_out"][row.kind] += 1

    def _commit(self) -> None:
        """Write the shards first and then their progress, so that it is never ahead of them."""
        state = {
            "request": asdict(self.config),
            "found": {"fingerprint": self.found.fingerprint, "revision": self.found.revision},
            "progress": self.progress,
            "shards": {side: writer.commit() for side, writer in self.writers.items()},
        }
        replace_text(self.folder / PROGRESS, json.dumps(with_digest(state)))

    def finish(self) -> dict[str, Any]:
        """Write and return the index, which depends on the options and the documents alone."""
        config, folder, found, tokenizer = self.config, self.folder, self.found, self.tokenizer
        counts = {side: writer.total("documents") for side, writer in self.writers.items()}
        if not all(counts.values()):  # the next try may take another fraction
            _remove_ours(folder)
            rule = "leave documents in every split"
            hint = "Change the fraction or take more documents."
            is_test = bool(counts["train"] and counts["validation"])
            left = " and ".join(f"{count} for {side}" for side, count in counts.items())
            value = f"{config.fractions[is_test]}, which leaves {left}"
            fail(_OPTIONS[is_test], rule, value, hint)
        request = asdict(config)
        origin, text_bytes = request["origin"], self.progress["text_bytes"]
        index = {
            "format": FORMAT,
            "request": request,
            "source": {
                "name": origin["source"],
                "subset": origin["subset"],
                "split": origin["split"],
                "revision": found.revision,
                "format": found.format,
                "num_files": len(found.files),
                "num_skipped": len(found.skipped),
                "licence": config.licence or found.licence,
            },
            "tokenizer": {
                name: getattr(tokenizer, name)
                for name in ("kind", "vocab_size", "separator_id", "fingerprint")
            },
            "token_dtype": token_dtype(tokenizer.vocab_size).name,
            "byte_order": "little",
            "left_out": self.progress["left_out"],
            "split_rule": "tail" if self.is_one else "hash",
            "sides": {
                side: {
                    "tokens": writer.total("tokens"),
                    "documents": counts[side],
                    "text_bytes": text_bytes[side],
                    "shards": writer.finish(),
                }
                for side, writer in self.writers.items()
            },
        }
        index = with_digest(index)
        replace_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
        (folder / PROGRESS).unlink()
        return index


def _in_threads(
    transform: Callable[[list[bytes]], list[Row]], batches: Iterable[Documents], threads: int
) -> Iterator[tuple[Place, list[Row]]]:
    """Transformed texts of each batch in order, with the position after it."""
    waiting = deque[tuple[Place, Future[list[Row]]]]()
    with ThreadPoolExecutor(threads) as pool:
        for batch in batches:
            waiting.append((batch.end, pool.submit(transform, batch.texts)))
            if len(waiting) >= threads:  # one thread: a read that hangs delays nothing
                end, rows = waiting.popleft()
                yield end, rows.result()
        for end, rows in waiting:
            yield end, rows.result()


# --- folder ---------------------------------------------------------------------------------------
@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Context manager: make the folder, lock it for this process, and name it on a full disk."""
    import fcntl  # not on Windows, see check_platform

    path = folder / _LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield
            finally:
                path.unlink()
                with suppress(OSError):
                    folder.rmdir()  # if it is empty
    except BlockingIOError:
        fail("--out", "be a folder that no other process prepares data in", folder)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        hint = "Make room and give the same command again: it goes on where it stopped."
        found = f"'{error.strerror}' in {folder}"
        fail("--out", "have room for the shards", found, hint)


def _saved(config: PrepareConfig, folder: Path) -> dict[str, Any] | None:
    """Content of ``progress.json``; None for a new preparation."""
    if not (folder / PROGRESS).exists():
        others = sorted({path.name.removesuffix(".tmp") for path in folder.iterdir()} - _OURS)
        rule = "be a new folder, or one that prepare has begun"
        check(not others, "--out", rule, f"one with {', '.join(others[:3])}")
        return None
    saved = read_digested(folder / PROGRESS, "Remove the folder to start again.")
    if saved["progress"]["place"] == [0, 0] and saved["request"] != asdict(config):
        _remove_ours(folder)  # nothing has been read, as after a mistyped column
        return None
    _check_request(folder, config, saved)
    return saved


def _check_request(folder: Path, config: PrepareConfig, saved: dict[str, Any]) -> None:
    """Refuse a folder that another configuration has begun."""
    before, now = (
        {"test_fraction": 0.0, **request, **request["origin"], "origin": None}
        for request in (saved["request"], asdict(config))
    )
    for name, value in now.items():
        rule = f"be {before.get(name)} as in {folder} so far"
        hint = "Give another --out, or remove this one."
        check(before.get(name) == value, name, rule, value, hint)


def _remove_ours(folder: Path) -> None:
    shards = (path for side in SIDES for path in folder.glob(f"{side}-*"))
    for path in (folder / PROGRESS, folder / TOKENIZER, *shards):
        path.unlink(missing_ok=True)
