"""``nsa data prepare``: a data set becomes memory-mapped shards, once.

The result is exactly the same however often the preparation is interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nsa.errors import check, fail
from nsa.files import replace_text
from nsa.train.config import check_fractions
from nsa.train.data.documents import SIDES, Row, rows_of, tokenise
from nsa.train.data.local import Documents, Found, Origin, Place, find_files, is_local
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
from nsa.train.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, token_dtype
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
        check_fractions("prepare", *self.fractions, _OPTIONS)
        limit, size = self.max_tokens, self.shard_tokens
        check(limit is None or limit > 0, "prepare", "--max-tokens", "be positive", limit)
        check(size > 0, "prepare", "--shard-tokens", "be positive", size)
        path, rule = self.tokenizer_path, "be given with --tokenizer file and only then"
        is_wanted = self.tokenizer == "file"
        check((path is not None) == is_wanted, "prepare", "--tokenizer-path", rule, path)

    @property
    def fractions(self) -> tuple[float, float]:
        """Fractions of the documents for validation and test."""
        return self.validation_fraction, self.test_fraction


class Report(NamedTuple):
    """State of a preparation while it runs.

    Attributes:
        config: configuration.
        folder: folder of the shards.
        tokenizer: tokenizer.
        is_one: whether the data are a single local text, divided as source ``folder`` divides it.
        found: the data set.
        progress: JSON of what was done, interrupted attempts included: ``place`` of the next
            document, ``is_enough`` if ``max_tokens`` was reached, rows ``left_out``, and
            ``text_bytes`` by split.
        writers: writer of each split, which counts documents and tokens.
    """

    config: PrepareConfig
    folder: Path
    tokenizer: Tokenizer
    is_one: bool
    found: Found
    progress: dict[str, Any]
    writers: dict[str, ShardWriter]


def prepare(
    config: PrepareConfig,
    out: str | Path,
    *,
    workers: int | None = None,
    time_limit_s: float = 300,
    on_progress: Callable[[Report], None] = lambda report: None,
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
        on_progress: called at the beginning and after each batch.

    Returns:
        The content of ``index.json``.

    Raises:
        DataUnavailableError: the source does not exist, cannot be reached, or stays silent.
        UserError: it cannot be read, ``out`` belongs to something else, or the disk is full.
    """
    check_platform("prepare")
    fits, rule = workers is None or 0 < workers <= 1024, "be from 1 to 1024"
    check(fits, "prepare", "--workers", rule, workers)
    threads = 1 if config.tokenizer == "byte" else workers or os.cpu_count() or 1
    folder = Path(out)
    with _in_use(folder):
        if (folder / INDEX).exists():
            index = read_index(folder)
            _check_request(folder, config, index)
            return index
        saved = None
        if (folder / PROGRESS).exists():
            saved = read_digested(folder / PROGRESS, "Remove the folder to start again.")
            if saved["progress"]["place"] == [0, 0] and saved["request"] != asdict(config):
                _remove_ours(folder)  # nothing has been read, as after a mistyped column
                saved = None
            else:
                _check_request(folder, config, saved)
        else:
            others = sorted({path.name.removesuffix(".tmp") for path in folder.iterdir()} - _OURS)
            rule = "be a new folder, or one that prepare has begun"
            check(not others, "prepare", "--out", rule, f"one with {', '.join(others[:3])}")
        report, batches = _open(config, folder, saved, threads, time_limit_s)
        with closing(batches):
            _commit(report)
            on_progress(report)
            committed_s = time.monotonic()
            for batch in () if report.progress["is_enough"] else batches:
                report.progress["place"] = batch.end
                if _write(report, batch.payload):
                    break
                if time.monotonic() - committed_s > _COMMIT_S:
                    _commit(report)
                    committed_s = time.monotonic()
                on_progress(report)
        return _finish(report)


def _open(
    config: PrepareConfig,
    folder: Path,
    saved: dict[str, Any] | None,
    threads: int,
    time_limit_s: float,
) -> tuple[Report, Generator[Documents, None, None]]:
    """Start a preparation, or continue an interrupted one."""
    origin, shards, path = config.origin, dict[str, Any](), folder / TOKENIZER
    progress: dict[str, Any] = {
        "place": Place(),
        "is_enough": False,
        "left_out": {"empty": 0, "unreadable": 0},
        "text_bytes": dict.fromkeys(SIDES, 0),
    }
    local = find_files(origin) if is_local(origin) else None
    is_one = local is not None and local.format == "text" and len(local.files) == 1
    if saved is None:
        wants_text = config.tokenizer == "bpe"
        texts = _training_sample(config, is_one, time_limit_s) if wants_text else ()
        tokenizer = make_tokenizer(config, texts)
    else:
        origin = replace(origin, revision=saved["found"]["revision"])
        tokenizer, progress, shards = load_tokenizer(path), saved["progress"], saved["shards"]
    found, batches = read_documents(
        origin,
        partial(tokenise, tokenizer, config.fractions, SIDES, is_one),
        start=Place(*progress["place"]),
        time_limit_s=time_limit_s,
        threads=threads,
    )
    if saved is None:
        tokenizer.save(path)
    else:
        rule = "hold the same files as before the interruption"
        others, hint = f"other files in {origin.source}", "Remove --out to start again."
        same = saved["found"]["fingerprint"] == found.fingerprint
        check(same, "prepare", "SOURCE", rule, others, hint)
    sizes = (tokenizer.vocab_size, config.shard_tokens)
    writers: dict[str, ShardWriter] = {
        side: ShardWriter(folder, side, *sizes, shards.get(side, ()))
        for side in (SIDES if config.test_fraction else SIDES[:2])
    }
    return Report(config, folder, tokenizer, is_one, found, progress, writers), batches


def _training_sample(config: PrepareConfig, is_one: bool, time_limit_s: float) -> list[bytes]:
    """Training text to learn a vocabulary from."""
    texts, size = list[bytes](), 0
    rows = partial(rows_of, fractions=config.fractions, is_one=is_one)
    _, batches = read_documents(config.origin, rows, time_limit_s=time_limit_s)
    with closing(batches):
        for batch in batches:
            found = [text for kind, text in batch.payload if kind == "train"]
            texts += found
            size += sum(map(len, found))
            if size >= _BPE_SAMPLE_BYTES:
                break
    return texts


def _write(report: Report, rows: list[Row]) -> bool:
    """Append rows; returns whether there are enough tokens now."""
    progress, writers, limit = report.progress, report.writers, report.config.max_tokens
    for row in rows:
        if row.kind in progress["left_out"]:
            progress["left_out"][row.kind] += 1
            continue
        progress["text_bytes"][row.kind] += row.num_bytes
        writers[row.kind].append(row.tokens)
        if limit is not None and writers["train"].total("tokens") >= limit:
            progress["is_enough"] = True
            break
    return progress["is_enough"]


def _commit(report: Report) -> None:
    """Write the shards first and then their progress, so that the record is never ahead of them."""
    state = {
        "request": asdict(report.config),
        "found": {"fingerprint": report.found.fingerprint, "revision": report.found.revision},
        "tokenizer_fingerprint": report.tokenizer.fingerprint,
        "progress": report.progress,
        "shards": {side: writer.commit() for side, writer in report.writers.items()},
    }
    replace_text(report.folder / PROGRESS, json.dumps(with_digest(state)))


def _finish(report: Report) -> dict[str, Any]:
    """Write the index; nothing in it depends on when or in how many attempts data were prepared."""
    config, folder, tokenizer, is_one, found, progress, writers = report
    counts = {side: writer.total("documents") for side, writer in writers.items()}
    if not all(counts.values()):  # the next try may take another fraction
        _remove_ours(folder)
        rule, hint = "leave documents in every split", "Change the fraction or take more documents."
        is_test = bool(counts["train"] and counts["validation"])
        left = " and ".join(f"{count} for {side}" for side, count in counts.items())
        value = f"{config.fractions[is_test]}, which leaves {left}"
        fail("prepare", _OPTIONS[is_test], rule, value, hint)
    index = {
        "format": FORMAT,
        "request": asdict(config),
        "source": {
            "name": config.origin.source,
            "subset": config.origin.subset,
            "split": config.origin.split,
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
        "left_out": progress["left_out"],
        "split_rule": "tail" if is_one else "hash",
        "sides": {
            side: {
                "tokens": writer.total("tokens"),
                "documents": counts[side],
                "text_bytes": progress["text_bytes"][side],
                "shards": writer.finish(),
            }
            for side, writer in writers.items()
        },
    }
    index = with_digest(index)
    replace_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    (folder / PROGRESS).unlink()
    return index


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
        fail("prepare", "--out", "be a folder that no other process prepares data in", folder)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        hint = "Make room and give the same command again: it goes on where it stopped."
        found = f"'{error.strerror}' in {folder}"
        fail("prepare", "--out", "have room for the shards", found, hint)


def _check_request(folder: Path, config: PrepareConfig, saved: dict[str, Any]) -> None:
    """Refuse a folder that another configuration has begun."""
    before, now = (
        {"test_fraction": 0.0, **request, **request["origin"], "origin": None}
        for request in (saved["request"], asdict(config))
    )
    for name, value in now.items():
        rule = f"be {before.get(name)} as in {folder} so far"
        hint = "Give another --out, or remove this one."
        check(before.get(name) == value, "prepare", name, rule, value, hint)


def _remove_ours(folder: Path) -> None:
    shards = (path for side in SIDES for path in folder.glob(f"{side}-*"))
    for path in (folder / PROGRESS, folder / TOKENIZER, *shards):
        path.unlink(missing_ok=True)
