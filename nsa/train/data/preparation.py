"""``nsa data prepare``: a data set becomes memory-mapped shards, once, and exactly the same however often it is interrupted."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nsa.errors import check, fail
from nsa.train.config import DataConfig
from nsa.train.data.processes import ChildDiedError, Workers
from nsa.train.data.shard_writer import ShardWriter
from nsa.train.data.shards import FORMAT, INDEX, PROGRESS, STAMP, TOKENIZER, index_digest, shard_dtype
from nsa.train.data.stream import Batch, DocumentReader, Found, Origin, Place
from nsa.train.data.tokenise import SIDES, Side, Texts, TokenBatch, Tokenise, is_text, side_of
from nsa.train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer
from nsa.train.distributed.launch import check_platform
from nsa.train.run_folder import replace_text

_LOCK = "prepare.lock"
_OURS = {INDEX, PROGRESS, STAMP, TOKENIZER, _LOCK}
_COMMIT_S = 5.0  # at most so much work is done twice after an interruption
_BPE_SAMPLE_BYTES = 64 << 20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare, and how.

    Attributes:
        origin: the data set.
        tokenizer: ``byte``, ``gpt2``, ``bpe`` (trained on the first 64 MiB of the training text) or ``file``.
        tokenizer_path: a ``tokenizers`` JSON file, for ``file``.
        bpe_vocab_size: vocabulary of ``bpe``, separator included.
        validation_fraction: share of the documents held out, by hash.
        max_tokens: end with the document that brings the training text to so many tokens; None takes everything.
        shard_tokens: a shard ends with the document that brings it to so many tokens.
        licence: of the text, where the hub does not state it.
    """

    origin: Origin
    tokenizer: Literal["byte", "gpt2", "bpe", "file"] = "gpt2"
    tokenizer_path: str | None = None
    bpe_vocab_size: int = 8192
    validation_fraction: float = 0.005
    max_tokens: int | None = None
    shard_tokens: int = 100_000_000
    licence: str | None = None

    def __post_init__(self) -> None:
        share = self.validation_fraction
        check(0 < share <= 0.5, "prepare", "--validation-fraction", "be above 0 and at most 0.5", share)
        check(self.max_tokens is None or self.max_tokens > 0, "prepare", "--max-tokens", "be positive", self.max_tokens)
        check(self.shard_tokens > 0, "prepare", "--shard-tokens", "be positive", self.shard_tokens)


@dataclass
class Progress:
    """How far a preparation has come; what is committed to ``progress.json`` is this, the open shards, and what was asked for.

    Attributes:
        place: next document to read.
        is_enough: whether ``max_tokens`` was reached.
        empty: rows without text so far.
        unreadable: rows whose text is not UTF-8 or holds a NUL byte.
        text_bytes: bytes of text, by side.
    """

    place: Place = field(default_factory=Place)
    is_enough: bool = False
    empty: int = 0
    unreadable: int = 0
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))


@dataclass(frozen=True)
class Report:
    """What a preparation says while it goes.

    Attributes:
        files: files done and files in all.
        documents: documents written so far, interrupted attempts included.
        tokens: their tokens.
        train_tokens: of these, training tokens.
        text_bytes: their text.
    """

    files: tuple[int, int]
    documents: int
    tokens: int
    train_tokens: int
    text_bytes: int


def prepare(
    config: PrepareConfig,
    out: str | Path,
    *,
    workers: int | None = None,
    time_limit_s: float = 300,
    on_progress: Callable[[Report], None] = lambda report: None,
) -> dict[str, Any]:
    """Tokenise a data set into shards.

    Ended at any moment, even by SIGKILL, it goes on when it is called again with the same configuration, and the files are then
    bit for bit those of a preparation that nobody disturbed. They do not depend on the number of workers either.

    Args:
        config: what to prepare.
        out: folder for the shards; new, empty, or that of an interrupted preparation.
        workers: processes that tokenise; None takes one for each core that this process may use. Bytes need none.
        time_limit_s: seconds without a document after which the source is given up.
        on_progress: called at the beginning and after each batch.

    Returns:
        The content of ``index.json``.

    Raises:
        DataUnavailableError: the source does not exist, cannot be reached, or stays silent.
        UserError: it cannot be read, ``out`` belongs to something else, or the disk is full.
    """
    check_platform("prepare")
    check(workers is None or workers > 0, "prepare", "--workers", "be positive", workers)
    folder = Path(out)
    with _room_on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            done = _read(folder / INDEX)
            saved = _read(folder / PROGRESS)
            if done is None and saved is not None and _nothing_read(saved) and saved["request"] != asdict(config):
                saved = None  # a first try that was mistaken, for example in the name of the column
                _remove_ours(folder)
            _check_folder(folder, config, done or saved)
            if done is None:
                done = _Preparation(config, folder, saved, time_limit_s, on_progress).run(workers or _num_cores())
    return done


class _Preparation:
    """One attempt at a preparation, from where the one before broke off."""

    def __init__(
        self,
        config: PrepareConfig,
        folder: Path,
        saved: dict[str, Any] | None,
        time_limit_s: float,
        on_progress: Callable[[Report], None],
    ) -> None:
        self._config, self._folder, self._time_limit_s, self._on_progress = config, folder, time_limit_s, on_progress
        self._saved = saved
        self._progress = Progress()
        self._origin = config.origin
        if saved is not None:
            self._progress = Progress(**{**saved["progress"], "place": Place(*saved["progress"]["place"])})
            self._origin = replace(config.origin, revision=saved["found"]["revision"])

    def run(self, workers: int) -> dict[str, Any]:
        """Read, tokenise and write everything that is left, then the index."""
        place, limit = self._progress.place, self._time_limit_s
        transform = self._tokenise() if self._is_read_as_tokens else _unchanged
        with DocumentReader(self._origin, transform, start=place, time_limit_s=limit) as reader, ExitStack() as files:
            self._begin(reader.found, files)
            committed = time.monotonic()
            with closing(self._tokenised(reader, workers)) as batches:
                for tokens, end in batches:
                    self._write(tokens, end)
                    if self._progress.is_enough:
                        break
                    if time.monotonic() - committed > _COMMIT_S:
                        self._commit()
                        committed = time.monotonic()
                    self._report()
            return self._finish()

    @property
    def _is_read_as_tokens(self) -> bool:
        """Bytes are tokens at once: to send them to another process would take longer."""
        return self._config.tokenizer == "byte"

    def _tokenise(self) -> Tokenise:
        tokenizer = ByteTokenizer() if self._is_read_as_tokens else self._tokenizer
        return Tokenise(tokenizer, self._config.validation_fraction)

    def _tokenised(self, reader: DocumentReader[Any], workers: int) -> Generator[tuple[TokenBatch, Place], None, None]:
        """Batches of tokens, each with the place after it."""
        if self._progress.is_enough:
            return
        if self._is_read_as_tokens:
            for batch in reader:
                yield batch.payload, batch.end
            return
        ends: deque[Place] = deque()
        with _workers(workers, self._tokenise()) as tokenisers:
            for tokens in tokenisers.map(_payloads(reader, ends)):
                yield tokens, ends.popleft()

    def _begin(self, found: Found, files: ExitStack) -> None:
        """Open everything, now that the source has answered; ``files`` closes what is open when it ends."""
        saved, source = self._saved, self._origin.source
        same = saved is None or saved["found"]["fingerprint"] == found.fingerprint
        rule = "hold the same files as before the interruption"
        check(same, "prepare", "SOURCE", rule, f"other files in {source}", "Remove --out to start anew.")
        self._found = found
        self._tokenizer = self._find_tokenizer(saved)
        dtype = shard_dtype(self._tokenizer.vocab_size)
        before = {side: None if saved is None else saved["sides"][side] for side in SIDES}
        size = self._config.shard_tokens
        self._writers: dict[Side, ShardWriter] = {}
        for side in SIDES:
            writer = ShardWriter(self._folder, side, dtype, size, before[side])
            self._writers[side] = files.enter_context(closing(writer))
        self._commit()
        self._report()

    def _find_tokenizer(self, saved: dict[str, Any] | None) -> Tokenizer:
        path = self._folder / TOKENIZER
        if saved is not None:
            tokenizer = load_tokenizer(path)
            wanted = saved["tokenizer_fingerprint"]
            check(
                tokenizer.fingerprint == wanted, "prepare", str(path), f"have the fingerprint {wanted}", tokenizer.fingerprint
            )
            return tokenizer
        config = self._config
        wanted = DataConfig(
            tokenizer=config.tokenizer, tokenizer_path=config.tokenizer_path, bpe_vocab_size=config.bpe_vocab_size
        )
        tokenizer = make_tokenizer(wanted, self._training_sample())
        unfinished = path.with_name(path.name + ".tmp")
        tokenizer.save(unfinished)
        unfinished.replace(path)
        return tokenizer

    def _training_sample(self) -> Iterator[bytes]:
        """Training text to learn a vocabulary from; only read if somebody asks."""
        size = 0
        with DocumentReader(self._config.origin, _unchanged, time_limit_s=self._time_limit_s) as reader:
            for batch in reader:
                for text in batch.payload:
                    if text and is_text(text) and side_of(text, self._config.validation_fraction) == "train":
                        yield text
                        size += len(text)
                if size >= _BPE_SAMPLE_BYTES:
                    return

    def _write(self, tokens: TokenBatch, end: Place) -> None:
        progress, limit = self._progress, self._config.max_tokens
        progress.place = end
        if limit is not None:
            reached = self._writers["train"].num_tokens + np.cumsum(np.where(tokens.held_out, 0, tokens.lengths))
            rows = int(np.searchsorted(reached, limit)) + 1
            progress.is_enough = rows <= len(reached)
            tokens = tokens.head(rows)
        progress.empty += int(tokens.empty.sum())
        progress.unreadable += int(tokens.unreadable.sum())
        for side, writer in self._writers.items():
            is_of_side = tokens.is_of(side)
            lengths = tokens.lengths[is_of_side]
            progress.text_bytes[side] += int(tokens.num_bytes[is_of_side].sum())
            writer.append(tokens.tokens[side], lengths[lengths > 0])

    def _commit(self) -> None:
        """Shards first, then the note of how far they go: whatever is interrupted, the note never says too much."""
        state = {
            "request": asdict(self._config),
            "found": {"fingerprint": self._found.fingerprint, "revision": self._found.revision},
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
            "progress": asdict(self._progress),
            "sides": {side: writer.commit() for side, writer in self._writers.items()},
        }
        replace_text(self._folder / PROGRESS, json.dumps(state))

    def _report(self) -> None:
        train, validation = (self._writers[side] for side in SIDES)
        self._on_progress(
            Report(
                files=(self._progress.place.file, len(self._found.files)),
                documents=train.num_documents + validation.num_documents,
                tokens=train.num_tokens + validation.num_tokens,
                train_tokens=train.num_tokens,
                text_bytes=sum(self._progress.text_bytes.values()),
            )
        )

    def _finish(self) -> dict[str, Any]:
        counts = {side: writer.num_documents for side, writer in self._writers.items()}
        if not all(counts.values()):  # the next try may take another share
            for writer in self._writers.values():
                writer.close()
            _remove_ours(self._folder)
            share = self._config.validation_fraction
            found = f"{share}, which leaves {counts['train']} documents for training and {counts['validation']} held out"
            hint = "Take another share or more documents."
            fail("prepare", "--validation-fraction", "leave documents on both sides", found, hint)
        index = _index(self._config, self._found, self._tokenizer, self._progress, self._writers)
        replace_text(self._folder / INDEX, json.dumps(index, indent=1) + "\n")
        (self._folder / PROGRESS).unlink()
        return index


def _index(
    config: PrepareConfig, found: Found, tokenizer: Tokenizer, progress: Progress, writers: dict[Side, ShardWriter]
) -> dict[str, Any]:
    """Content of ``index.json``; nothing in it depends on when or in how many attempts the data were prepared."""
    origin = config.origin
    index: dict[str, Any] = {
        "format": FORMAT,
        "request": asdict(config),
        "source": {
            "name": origin.source,
            "subset": origin.subset,
            "split": origin.split,
            "revision": found.revision,
            "format": found.format,
            "num_files": len(found.files),
            "licence": config.licence or found.licence,
        },
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "separator_id": tokenizer.separator_id,
            "fingerprint": tokenizer.fingerprint,
        },
        "token_dtype": shard_dtype(tokenizer.vocab_size).newbyteorder("=").name,
        "byte_order": "little",
        "left_out": {"empty": progress.empty, "unreadable": progress.unreadable},
        "sides": {
            side: {
                "tokens": writer.num_tokens,
                "documents": writer.num_documents,
                "text_bytes": progress.text_bytes[side],
                "shards": writer.finish(),
            }
            for side, writer in writers.items()
        },
    }
    return {**index, "sha256": index_digest(index)}


# --- folder ---------------------------------------------------------------------------------------------------------------
@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Keep a second preparation out of the folder; the lock goes with the process, however that ends."""
    import fcntl  # not on Windows, see check_platform

    path = folder / _LOCK
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail("prepare", "--out", "be a folder that no other process prepares data in", folder)
        try:
            yield
        finally:
            path.unlink()
            if not any(folder.iterdir()):  # nothing came of it
                folder.rmdir()


@contextmanager
def _room_on_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        hint = "Make room and give the same command again: it goes on where it stopped."
        fail("prepare", "--out", "have room for the shards", f"'{error.strerror}' in {folder}", hint)


def _check_folder(folder: Path, config: PrepareConfig, saved: dict[str, Any] | None) -> None:
    """Refuse a folder with other things in it, and one that was begun with another configuration."""
    if saved is None:
        names = {path.name.removesuffix(".tmp") for path in folder.iterdir()}
        others = sorted(names - _OURS)
        check(
            not others,
            "prepare",
            "--out",
            "be a new folder, or one that prepare has begun",
            f"one with {', '.join(others[:3])}",
        )
        return
    before, now = (dict(_flat(request)) for request in (saved["request"], asdict(config)))
    for name, value in now.items():
        hint = "Give another --out, or remove this one."
        check(before.get(name) == value, "prepare", name, f"be {before.get(name)} as in {folder} so far", value, hint)


def _nothing_read(saved: dict[str, Any]) -> bool:
    return Place(*saved["progress"]["place"]) == Place()


def _remove_ours(folder: Path) -> None:
    for path in (folder / PROGRESS, folder / TOKENIZER, *(path for side in SIDES for path in folder.glob(f"{side}-*"))):
        path.unlink(missing_ok=True)


def _flat(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield name, value


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fail("prepare", str(path), "be JSON", "a damaged file", f"{error}. Remove the folder to start anew.")
    if not isinstance(content, dict) or "request" not in content:
        fail("prepare", str(path), "be a file of a preparation", "other content", "Remove the folder to start anew.")
    return content


# --- processes ------------------------------------------------------------------------------------------------------------
def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _unchanged(texts: Texts) -> Texts:
    return texts


def _payloads(batches: Iterable[Batch[Texts]], ends: deque[Place]) -> Iterator[Texts]:
    """The texts of batches; the place after each goes to ``ends``."""
    for batch in batches:
        ends.append(batch.end)
        yield batch.payload


@contextmanager
def _workers(number: int, tokenise: Tokenise) -> Iterator[Workers[Texts, TokenBatch]]:
    workers = Workers[Texts, TokenBatch](number, tokenise)
    try:
        yield workers
    except ChildDiedError:
        hint = "Memory may have run out: give fewer --workers. The same command goes on where it stopped."
        fail("prepare", "--workers", "stay alive", "one that died", hint)
    finally:
        workers.close()
