"""From a configuration to training, validation and test sequences."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nsa.errors import check
from nsa.train.config import DataConfig
from nsa.train.data.batch import DataUnavailableError, Sampler, TextSource, TokenSource
from nsa.train.data.documents import (
    SIDES,
    corpus_files,
    folder_files,
    num_bytes,
    split_documents,
    stdlib_files,
)
from nsa.train.data.local import Origin, warn_of_skipped
from nsa.train.data.mixture import MixtureSource
from nsa.train.data.recall import RecallSource
from nsa.train.data.shards import ShardSource, open_shards
from nsa.train.data.stream import StreamSource, read_held_out
from nsa.train.data.synthetic import TASKS, SyntheticSource
from nsa.train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 20


@dataclass(frozen=True)
class DataBundle:
    """Data of a run. No text is in two of the sources.

    Attributes:
        tokenizer: tokenizer of all documents.
        description: description for the log and the run folder; plain JSON types.
        train: sequences to train on.
        validation: sequences by which choices are made.
        test: sequences on which results are reported; None without a test split.
    """

    tokenizer: Tokenizer
    description: dict[str, Any]
    train: TokenSource
    validation: TokenSource
    test: TokenSource | None = None

    def sampler(self, seq_len: int, seed: int) -> Sampler:
        """The order in which training takes the sequences."""
        return self.train.sampler(seq_len, seed)


def open_data(
    config: DataConfig,
    *,
    seed: int,
    seq_len: int,
    run_folder_tokenizer: str | Path | None = None,
) -> DataBundle:
    """Open, split and tokenise the text of a configuration, or set up its synthetic task.

    Nothing replaces text that cannot be read: that is an error, unless the data are not there at
    all and ``config.synthetic_fallback`` asks for a task by name.

    Args:
        config: see :class:`nsa.train.config.DataConfig`.
        seed: seed of synthetic tasks; text, its split and its tokenizer do not depend on it.
        seq_len: tokens of a sequence; all sources must have at least one sequence.
        run_folder_tokenizer: tokenizer file of an existing run, taken instead of making one.

    Raises:
        DataUnavailableError: shards that do not exist, or a stream that cannot be reached.
        ValueError: a missing, damaged or unsuitable file, too little text for a sequence, or a
            tokenizer of another kind than configured.
    """
    tokenizer, is_task = None, config.source in TASKS
    if run_folder_tokenizer is not None:
        tokenizer, where = load_tokenizer(run_folder_tokenizer), "run_folder_tokenizer"
        rule = f"be of the configured kind ({config.tokenizer})"
        check(tokenizer.kind == config.tokenizer, where, rule, tokenizer.kind)
        rule = "have a separator if and only if the data are text"
        check((tokenizer.separator_id is None) == is_task, where, rule, run_folder_tokenizer)
    if is_task:
        rule = f"be byte for the synthetic task {config.source}"
        is_byte = config.tokenizer == "byte"
        check(is_byte, "data.tokenizer", rule, config.tokenizer)
        data = _open_task(config.source, ByteTokenizer(separator=False), seed)
        _describe_sequences(data, seq_len)
        return data
    parts = list[DataBundle]()
    for part in config.parts:
        parts.append(_open_text(part, tokenizer, seed, seq_len))
        tokenizer = parts[0].tokenizer
    data = parts[0]
    if config.mixture:
        weights = [part.weight for part in config.mixture]
        data = replace(data, train=MixtureSource([part.train for part in parts], weights))
        data.description["mixture"] = [part.description for part in parts[1:]]
        data.description["synthetic"] = any(part.description["synthetic"] for part in parts)
    return data


def _open_text(
    config: DataConfig, tokenizer: Tokenizer | None, seed: int, seq_len: int
) -> DataBundle:
    """Open one source of text, or the task that replaces it."""
    openers = {"shards": _open_shards, "stream": _open_stream}
    try:
        data = openers.get(config.source, _open_files)(config, tokenizer)
        data.description.update(source=config.source, synthetic=False)
    except DataUnavailableError as error:
        task = config.synthetic_fallback
        if task == "none":
            raise
        what = "SYNTHETIC DATA (%s) instead, as data.synthetic_fallback says: %s"
        logger.warning(what, task, error)
        data = _open_task(task, tokenizer or make_tokenizer(config, ()), seed)
    _describe_sequences(data, seq_len)
    if config.recall is None or data.description["synthetic"]:
        return data
    train = RecallSource(data.train, data.tokenizer, config.recall, seed)
    return replace(data, train=train)


def _describe_sequences(data: DataBundle, seq_len: int) -> None:
    """Add the number of sequences of each split, which may not be 0, and of tokens."""
    description = data.description
    for split in SIDES:
        source = getattr(data, split)
        if source is None or isinstance(source, StreamSource):
            continue  # the length of a stream is not known
        number = description[f"{split}_windows"] = source.num_sequences(seq_len)
        if isinstance(source, TextSource):
            tokens = description[f"{split}_tokens"] = source.num_tokens
            size = description[f"{split}_bytes"]
            rule = f"be below the {tokens} tokens of the {split} text ({size} bytes)"
            hint = "Take more text, shorter sequences, or another fraction for validation and test."
            check(number > 0, "seq_len", rule, seq_len, hint)


def _bundle(
    tokenizer: Tokenizer, description: dict[str, Any], sources: Mapping[str, TokenSource]
) -> DataBundle:
    description["tokenizer"] = tokenizer.kind
    description["tokenizer_fingerprint"] = tokenizer.fingerprint
    description["vocab_size"] = tokenizer.vocab_size
    return DataBundle(tokenizer, description, **sources)


def _text_description(
    split: str, documents: int, size: int, digested: Iterable[bytes]
) -> dict[str, Any]:
    """Fields that are checked when a run is resumed."""
    sha256 = hashlib.sha256(b"".join(digested)).hexdigest()
    return {f"{split}_documents": documents, f"{split}_bytes": size, f"{split}_sha256": sha256}


def _open_task(task: str, tokenizer: Tokenizer, seed: int) -> DataBundle:
    train, validation = (
        SyntheticSource(task, split, seed, tokenizer.vocab_size) for split in SIDES[:2]
    )
    description = {
        "source": task,
        "synthetic": True,
        "provenance": "Synthetic task, made from random numbers; no text.",
        "seed": seed,
        "ideal_loss_nats": train.ideal_loss,
    }
    return _bundle(tokenizer, description, {"train": train, "validation": validation})


def _open_files(config: DataConfig, tokenizer: Tokenizer | None) -> DataBundle:
    if config.source == "folder":
        files = folder_files(str(config.path), config.pattern)
        warn_of_skipped(files.skipped, ": `nsa data prepare` reads their rows")
    else:
        files = corpus_files() if config.source == "corpus" else stdlib_files()
    split = split_documents(files.documents, *config.fractions)
    if tokenizer is None:
        tokenizer = make_tokenizer(config, (document.text for document in split.train))
    size = num_bytes(split.validation)
    description: dict[str, Any] = {
        "provenance": files.provenance,
        "split_rule": split.rule,
        "validation_share": size / sum(map(num_bytes, split[:3])),
        "validation_names": [document.name for document in split.validation[:_NAMES_SHOWN]],
        "duplicates_left_out": split.num_duplicates,
        "files_left_out": len(files.skipped),
    }
    sources = dict[str, TokenSource]()
    for name, documents in zip(SIDES, split[:3], strict=True):
        if documents:
            # The hash covers the text and where one document ends.
            hashes = (document.sha256.encode() for document in documents)
            description |= _text_description(name, len(documents), num_bytes(documents), hashes)
            tokens = tokenizer.encode_documents([document.text for document in documents])
            sources[name] = TextSource(tokens, tokenizer.separator_id, tokenizer.token_bytes)
    return _bundle(tokenizer, description, sources)


def _open_shards(config: DataConfig, tokenizer: Tokenizer | None) -> DataBundle:
    folder = open_shards(str(config.path))
    ours, index = folder.tokenizer, folder.index
    rule = f"be {ours.kind}, as the shards are"
    check(config.tokenizer == ours.kind, "data.tokenizer", rule, config.tokenizer)
    same = tokenizer is None or tokenizer.fingerprint == ours.fingerprint
    check(same, "data.path", "contain shards of the run's tokenizer", config.path)
    description = _hash_split(index["source"], index["request"])
    description["split_rule"] = index.get("split_rule", "hash")
    for split, found in index["sides"].items():
        hashes = (shard["tokens_sha256"].encode() for shard in found["shards"])
        counts = (found["documents"], found["text_bytes"])
        description |= _text_description(split, *counts, hashes)
    return _bundle(
        ours, description, {split: ShardSource(folder, split) for split in index["sides"]}
    )


def _open_stream(config: DataConfig, tokenizer: Tokenizer | None) -> DataBundle:
    tokenizer = tokenizer or make_tokenizer(config, ())
    pattern = None if config.pattern == "*" else config.pattern
    names = (config.subset, config.split, config.revision, config.text_field, pattern)
    origin = Origin(str(config.path), *names)
    found, held_out = read_held_out(origin, tokenizer, config)
    warn_of_skipped(found.skipped)
    origin = replace(origin, revision=found.revision)
    # Local files may be in another folder when the run is resumed.
    name = origin.source if found.revision else "Files on this machine"
    source = {**asdict(origin), "name": name, "licence": found.licence}
    description = _hash_split(source, asdict(config))
    description |= {"revision": found.revision, "files_fingerprint": found.fingerprint}
    sources: dict[str, TokenSource] = {"train": StreamSource(origin, tokenizer, config)}
    for split, rows in held_out.items():
        tokens = [row.tokens for row in rows]
        text = TextSource(tokens, tokenizer.separator_id, tokenizer.token_bytes)
        size = sum(row.num_bytes for row in rows)
        description |= _text_description(split, len(rows), size, [text.tokens.tobytes()])
        sources[split] = text
    return _bundle(tokenizer, description, sources)


def _hash_split(source: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Description of a data set whose documents are split by hash."""
    subset = f", {source['subset']}" if source["subset"] else ""
    revision = f", revision {source['revision']}" if source["revision"] else ""
    licence = source["licence"] or "not stated, the user knows it"
    name = f"{source['name']}{subset}, split {source['split']}{revision}"
    fractions = ("validation_fraction", "test_fraction")
    return {
        "provenance": f"{name}. Licence: {licence}.",
        "split_rule": "hash",
        **{name: options[name] for name in fractions if options.get(name)},
    }
