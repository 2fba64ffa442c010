"""``nsa data prepare``: a data set becomes memory-mapped shards, once.

The result is exactly the same however often the preparation is interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nsa.errors import check, fail
from nsa.files import replace_text
from nsa.train.config import check_fractions
from nsa.train.data.documents import SIDES, Side
from nsa.train.data.local import find_files, is_local
from nsa.train.data.origin import Found, Origin, Place
from nsa.train.data.reader import read_documents
from nsa.train.data.shard_writer import ShardWriter
from nsa.train.data.shards import (
    FORMAT,
    INDEX,
    PROGRESS,
    SHARD,
    STAMP,
    TOKENIZER,
    fault_of_form,
    index_digest,
    read_index,
    read_json,
)
from nsa.train.data.tokenise import Row, divided, kind_of, tokenise, tokenise_one
from nsa.train.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, token_dtype
from nsa.train.distributed.launch import check_platform

_LOCK = "prepare.lock"
_OURS = {INDEX, PROGRESS, STAMP, TOKENIZER, _LOCK}
_COMMIT_S = 5.0  # at most so much work is done twice after an interruption
_BPE_SAMPLE_BYTES = 64 << 20
_OPTIONS = ("--validation-fraction", "--test-fraction")
_PROGRESS: dict[str, Any] = {
    "request": {"origin": {}},
    "found": {"fingerprint": str, "revision": (str, type(None))},
    "tokenizer_fingerprint": str,
    "progress": {
        "place": [int],
        "is_enough": bool,
        "left_out": {"empty": int, "unreadable": int},
        "text_bytes": dict.fromkeys(SIDES, int),
    },
    "shards": {"train": [SHARD], "validation": [SHARD]},
}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare, and how.

    Attributes:
        origin: the data set.
        tokenizer: ``byte``, ``gpt2``, ``bpe`` (trained on the first 64 MiB of the training text) or
            ``file``.
        tokenizer_path: a ``tokenizers`` JSON file, for ``file``.
        bpe_vocab_size: vocabulary of ``bpe``, separator included.
        validation_fraction: share of the documents for validation, by hash.
        test_fraction: share of the documents for the test, by hash; 0 for none.
        max_tokens: end with the document that brings the training text to so many tokens; None
            takes everything.
        shard_tokens: a shard ends with the document that brings it to so many tokens.
        licence: of the text, where the hub does not state it.
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
        """Shares of the documents for validation and test."""
        return self.validation_fraction, self.test_fraction

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides that there are to be."""
        return SIDES if self.test_fraction else SIDES[:2]


@dataclass
class Progress:
    """How far a preparation has come.

    Attributes:
        place: next document to read.
        is_enough: whether ``max_tokens`` was reached.
        left_out: rows without document, see :class:`nsa.train.data.tokenise.Row`.
        text_bytes: bytes of text, by side.
    """

    place: Place = field(default_factory=Place)
    is_enough: bool = False
    left_out: dict[str, int] = field(default_factory=lambda: {"empty": 0, "unreadable": 0})
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))


class Report(NamedTuple):
    """What a preparation reports while it runs.

    Attributes:
        found: the data set.
        progress: how far it has come, interrupted attempts included.
        writers: of each side, with its documents and tokens.
    """

    found: Found
    progress: Progress
    writers: dict[Side, ShardWriter]


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
    check(
        workers is None or 0 < workers <= 1024, "prepare", "--workers", "be from 1 to 1024", workers
    )
    threads = 1 if config.tokenizer == "byte" else workers or _num_cores()
    folder = Path(out)
    with _in_use(folder):
        if (folder / INDEX).exists():
            index = read_index(folder)
            _check_request(folder, config, index)
            return index
        saved = _read_progress(folder / PROGRESS)
        if saved is None:
            others = sorted({path.name.removesuffix(".tmp") for path in folder.iterdir()} - _OURS)
            rule = "be a new folder, or one that prepare has begun"
            check(not others, "prepare", "--out", rule, f"one with {', '.join(others[:3])}")
        elif saved["progress"]["place"] == [0, 0] and saved["request"] != asdict(config):
            _remove_ours(folder)  # nothing has been read, as after a mistyped column
            saved = None
        else:
            _check_request(folder, config, saved)
        return _prepare(config, folder, saved, threads, time_limit_s, on_progress)


def _prepare(
    config: PrepareConfig,
    folder: Path,
    saved: dict[str, Any] | None,
    threads: int,
    time_limit_s: float,
    on_progress: Callable[[Report], None],
) -> dict[str, Any]:
    """Read, tokenise and write everything, or what an interrupted preparation has left."""
    origin, progress, path = config.origin, Progress(), folder / TOKENIZER
    if saved is None:
        texts = _training_sample(config, time_limit_s) if config.tokenizer == "bpe" else ()
        tokenizer = make_tokenizer(config, texts)
    else:
        origin = replace(origin, revision=saved["found"]["revision"])
        progress, tokenizer = Progress(**saved["progress"]), load_tokenizer(path)
        wanted = saved["tokenizer_fingerprint"]
        same = tokenizer.fingerprint == wanted
        check(same, "prepare", str(path), f"have the fingerprint {wanted}", tokenizer.fingerprint)
    to_rows: Callable[[list[bytes]], list[Row]]
    to_rows = partial(tokenise, tokenizer, config.fractions, SIDES)
    if _is_one_text(origin):
        to_rows = partial(tokenise_one, tokenizer, config.fractions)
    found, batches = read_documents(
        origin,
        to_rows,
        start=Place(*progress.place),
        time_limit_s=time_limit_s,
        threads=threads,
    )
    with closing(batches):
        if saved is None:
            tokenizer.save(path)
        else:
            rule = "hold the same files as before the interruption"
            others, hint = f"other files in {origin.source}", "Remove --out to start anew."
            same = saved["found"]["fingerprint"] == found.fingerprint
            check(same, "prepare", "SOURCE", rule, others, hint)
        sizes, shards = (tokenizer.vocab_size, config.shard_tokens), (saved or {}).get("shards", {})
        writers = {
            side: ShardWriter(folder, side, *sizes, shards.get(side, ())) for side in config.sides
        }
        report = Report(found, progress, writers)
        _commit(folder, config, tokenizer, report)
        on_progress(report)
        committed = time.monotonic()
        for batch in () if progress.is_enough else batches:
            progress.place = batch.end
            _write(batch.payload, progress, writers, config.max_tokens)
            if progress.is_enough:
                break
            if time.monotonic() - committed > _COMMIT_S:
                _commit(folder, config, tokenizer, report)
                committed = time.monotonic()
            on_progress(report)
    return _finish(folder, config, tokenizer, report)


def _is_one_text(origin: Origin) -> bool:
    """Whether all of the data are one local text, which is divided as source ``folder`` does."""
    found = find_files(origin) if is_local(origin) else None
    return found is not None and found.format == "text" and len(found.files) == 1


def _training_sample(config: PrepareConfig, time_limit_s: float) -> list[bytes]:
    """Training text to learn a vocabulary from."""
    texts, is_one = list[bytes](), _is_one_text(config.origin)
    _, batches = read_documents(config.origin, list, time_limit_s=time_limit_s)
    with closing(batches):
        for batch in batches:
            pairs = [(kind_of(text, config.fractions), text) for text in batch.payload]
            pairs = divided(batch.payload, config.fractions) if is_one else pairs
            texts += [text for kind, text in pairs if kind == "train"]
            if sum(map(len, texts)) >= _BPE_SAMPLE_BYTES:
                break
    return texts


def _write(
    rows: list[Row],
    progress: Progress,
    writers: dict[Side, ShardWriter],
    max_tokens: int | None,
) -> None:
    for row in rows:
        if row.kind == "empty" or row.kind == "unreadable":
            progress.left_out[row.kind] += 1
            continue
        progress.text_bytes[row.kind] += row.num_bytes
        writers[row.kind].append(row.tokens)
        if max_tokens is not None and writers["train"].total("tokens") >= max_tokens:
            progress.is_enough = True
            break


def _commit(folder: Path, config: PrepareConfig, tokenizer: Tokenizer, report: Report) -> None:
    """Write the shards first and then how far they go, so that the note is never ahead of them."""
    found = report.found
    state: dict[str, Any] = {
        "request": asdict(config),
        "found": {"fingerprint": found.fingerprint, "revision": found.revision},
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "progress": asdict(report.progress),
        "shards": {side: writer.commit() for side, writer in report.writers.items()},
    }
    state["sha256"] = index_digest(state)
    replace_text(folder / PROGRESS, json.dumps(state))


def _finish(
    folder: Path,
    config: PrepareConfig,
    tokenizer: Tokenizer,
    report: Report,
) -> dict[str, Any]:
    """Write the index; nothing in it depends on when or in how many attempts data were prepared."""
    origin, (found, progress, writers) = config.origin, report
    counts = {side: writer.total("documents") for side, writer in writers.items()}
    if not all(counts.values()):  # the next try may take another share
        _remove_ours(folder)
        rule, hint = "leave documents on every side", "Take another share or more documents."
        is_test = counts["train"] and counts["validation"]
        name, share = list(zip(_OPTIONS, config.fractions, strict=True))[bool(is_test)]
        left = " and ".join(f"{count} for {side}" for side, count in counts.items())
        fail("prepare", name, rule, f"{share}, which leaves {left}", hint)
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
            "num_skipped": len(found.skipped),
            "licence": config.licence or found.licence,
        },
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "separator_id": tokenizer.separator_id,
            "fingerprint": tokenizer.fingerprint,
        },
        "token_dtype": token_dtype(tokenizer.vocab_size).name,
        "byte_order": "little",
        "left_out": progress.left_out,
        "split_rule": "tail" if found.format == "text" and len(found.files) == 1 else "hash",
        "sides": {
            side: {
                "tokens": writer.total("tokens"),
                "documents": writer.total("documents"),
                "text_bytes": progress.text_bytes[side],
                "shards": writer.finish(),
            }
            for side, writer in writers.items()
        },
    }
    index["sha256"] = index_digest(index)
    replace_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    (folder / PROGRESS).unlink()
    return index


# --- folder ---------------------------------------------------------------------------------------
@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Make the folder and keep a second preparation out of it; name it when the disk is full.

    The lock ends with the process.
    """
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
                    folder.rmdir()  # if nothing came of it
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


def _read_progress(path: Path) -> dict[str, Any] | None:
    """State of an interrupted preparation, with every field checked; None if there is none."""
    if not path.exists():
        return None
    hint = "Remove the folder to start anew."
    content = read_json(path, hint)
    fault = fault_of_form(content, _PROGRESS)
    if not fault and len(content["progress"]["place"]) != len(Place()):
        fault = f"progress.place {content['progress']['place']}"
    check(not fault, "prepare", str(path), "be as a preparation left it", fault, hint)
    same = content.get("sha256", index_digest(content)) == index_digest(content)
    check(same, "prepare", str(path), "hold what its own SHA-256 says", "other content", hint)
    for side, shards in content["shards"].items():
        names = [shard["name"] for shard in shards]
        fits = names == [f"{side}-{number:05d}" for number in range(len(names))]
        rule = "have the shards of each side in order"
        check(fits and side in SIDES, "prepare", str(path), rule, ", ".join(names[:3]), hint)
    return content


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
