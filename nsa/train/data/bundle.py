"""One entry point: from a configuration to training and validation windows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa.errors import check, fail
from nsa.train.config import DataConfig
from nsa.train.data.documents import TextFiles, corpus_files, folder_files, stdlib_files
from nsa.train.data.sampler import Sampler
from nsa.train.data.shards import ShardSource, open_shards
from nsa.train.data.source import DataUnavailableError, TextSource, TokenSource
from nsa.train.data.split import Piece, Split, split_documents
from nsa.train.data.stream import Origin
from nsa.train.data.stream_source import StreamSampler, StreamSource, read_held_out
from nsa.train.data.synthetic import TASKS, SyntheticSource
from nsa.train.data.tokenise import SIDES
from nsa.train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 20


@dataclass(frozen=True)
class DataBundle:
    """What a run trains and validates on.

    Attributes:
        train: windows to train on.
        validation: windows held out; no text of theirs is in ``train``.
        tokenizer: of both.
        description: what the data are, for the log and the run folder; plain JSON types.
    """

    train: TokenSource
    validation: TokenSource
    tokenizer: Tokenizer
    description: dict[str, Any]

    def sampler(self, seq_len: int, seed: int) -> Sampler:
        """The order in which training takes the windows; a stream has its own."""
        if isinstance(self.train, StreamSource):
            return StreamSampler(self.train, seq_len)
        return Sampler(self.train.num_windows(seq_len), seed)


def open_data(config: DataConfig, *, seed: int, seq_len: int, run_folder_tokenizer: str | Path | None = None) -> DataBundle:
    """Open, divide and tokenise the text that a configuration names, or set up the synthetic task that it names.

    Nothing stands in for text that cannot be read: that is an error, unless the data are not there at all and
    ``config.synthetic_fallback`` asks for a task by name.

    Args:
        config: see :class:`nsa.train.config.DataConfig`.
        seed: of synthetic tasks; text, its division and its tokenizer do not depend on it.
        seq_len: tokens of a window; both sides must have at least one window.
        run_folder_tokenizer: tokenizer file of an existing run, taken instead of making one.

    Raises:
        DataUnavailableError: shards that do not exist, or a stream that cannot be reached.
        ValueError: a missing, damaged or unsuitable file, too little text for a window, or a tokenizer of another kind than
            configured.
    """
    tokenizer = None if run_folder_tokenizer is None else load_tokenizer(run_folder_tokenizer)
    if tokenizer is not None:
        check(
            tokenizer.kind == config.tokenizer,
            "open_data", "run_folder_tokenizer", f"be of the configured kind ({config.tokenizer})", tokenizer.kind,
        )  # fmt: skip
        check(
            (tokenizer.separator_id is None) == (config.source in TASKS),
            "open_data", "run_folder_tokenizer", "have a separator if and only if the data are text", run_folder_tokenizer,
        )  # fmt: skip
    if config.source in TASKS:
        rule = f"be byte for the synthetic task {config.source}"
        check(config.tokenizer == "byte", "open_data", "data.tokenizer", rule, config.tokenizer)
        return _synthetic_bundle(config.source, ByteTokenizer(separator=False), seed, seq_len)
    try:
        opened = _open_text(config, tokenizer)
    except DataUnavailableError as error:
        if config.synthetic_fallback == "none":
            raise
        logger.warning("SYNTHETIC DATA (%s) instead, as data.synthetic_fallback says: %s", config.synthetic_fallback, error)
        stand_in = make_tokenizer(config, ()) if tokenizer is None else tokenizer
        return _synthetic_bundle(config.synthetic_fallback, stand_in, seed, seq_len)
    return _with_windows(opened, seq_len)


def _open_text(config: DataConfig, tokenizer: Tokenizer | None) -> DataBundle:
    if config.source == "shards":
        return _open_shards(config, tokenizer)
    if config.source == "stream":
        return _open_stream(config, tokenizer)
    files = _text_files(config)
    split = split_documents(files, config.validation_fraction)
    if tokenizer is None:
        tokenizer = make_tokenizer(config, (piece.text for piece in split.train))
    train, validation = (_text_source(pieces, tokenizer) for pieces in (split.train, split.validation))
    return DataBundle(train, validation, tokenizer, _describe(config, files, split, tokenizer))


def _with_windows(data: DataBundle, seq_len: int) -> DataBundle:
    """The same with the numbers of windows in the description, after a check that there are any."""
    description = dict(data.description)
    for side, name, source in (("train", "training", data.train), ("validation", "validation", data.validation)):
        if isinstance(source, StreamSource):
            continue  # nobody knows how long it is
        assert isinstance(source, (TextSource, ShardSource)), "a source without text"
        if source.num_windows(seq_len) == 0:
            size = f"{source.num_tokens} tokens of the {name} text ({description[f'{side}_bytes']} bytes)"
            hint = "Take more text, shorter windows, or another share of validation text."
            fail("open_data", "seq_len", f"be below the {size}", seq_len, hint)
        description[f"{side}_tokens"] = source.num_tokens
        description[f"{side}_windows"] = source.num_windows(seq_len)
    return replace(data, description=description)


def _synthetic_bundle(task: str, tokenizer: Tokenizer, seed: int, seq_len: int) -> DataBundle:
    train, validation = (SyntheticSource(task, side, seed, tokenizer.vocab_size) for side in ("train", "validation"))
    description = {
        "source": task,
        "synthetic": True,
        "provenance": "Synthetic task, made from random numbers; no text.",
        "seed": seed,
        "ideal_loss_nats": train.ideal_loss,
        "train_windows": train.num_windows(seq_len),
        "validation_windows": validation.num_windows(seq_len),
        **_describe_tokenizer(tokenizer),
    }
    return DataBundle(train, validation, tokenizer, description)


def _open_shards(config: DataConfig, tokenizer: Tokenizer | None) -> DataBundle:
    folder = open_shards(str(config.path))
    ours, index = folder.tokenizer, folder.index
    check(ours.kind == config.tokenizer, "open_data", "data.tokenizer", f"be {ours.kind}, as the shards are", config.tokenizer)
    same = tokenizer is None or tokenizer.fingerprint == ours.fingerprint
    check(same, "open_data", "data.path", "hold shards of the run's tokenizer", config.path)
    description: dict[str, Any] = {
        "source": "shards",
        "synthetic": False,
        "provenance": _provenance(index["source"]),
        "split_rule": "hash",
        "validation_fraction": index["request"]["validation_fraction"],
    }
    for side in SIDES:
        of_side = index["sides"][side]
        hashes = "".join(shard.tokens_sha256 for shard in folder.shards[side])
        description[f"{side}_documents"] = of_side["documents"]
        description[f"{side}_bytes"] = of_side["text_bytes"]
        description[f"{side}_sha256"] = hashlib.sha256(hashes.encode()).hexdigest()
    train, validation = (folder.source(side) for side in SIDES)
    return DataBundle(train, validation, ours, {**description, **_describe_tokenizer(ours)})


def _open_stream(config: DataConfig, tokenizer: Tokenizer | None) -> DataBundle:
    tokenizer = make_tokenizer(config, ()) if tokenizer is None else tokenizer
    assert tokenizer.separator_id is not None  # checked for a tokenizer that was loaded; those made for text have one
    origin = Origin(str(config.path), config.subset, config.split, config.revision, config.text_field)
    share, time_limit_s = config.validation_fraction, config.time_limit_s
    held_out = read_held_out(origin, tokenizer, share, time_limit_s, config.validation_tokens)
    found = held_out.found
    origin = replace(origin, revision=found.revision)
    name = origin.source if found.revision else "Files on this machine"  # which may lie elsewhere when the run is resumed
    named = {"name": name, "subset": origin.subset, "split": origin.split}
    description = {
        "source": "stream",
        "synthetic": False,
        "provenance": _provenance({**named, "revision": found.revision, "licence": found.licence}),
        "split_rule": "hash",
        "validation_fraction": share,
        "revision": found.revision,
        "files_fingerprint": found.fingerprint,
        "validation_documents": held_out.num_documents,
        "validation_bytes": held_out.num_bytes,
        "validation_sha256": hashlib.sha256(held_out.tokens.tobytes()).hexdigest(),
        **_describe_tokenizer(tokenizer),
    }
    validation = TextSource([held_out.tokens[:-1]], tokenizer.separator_id, tokenizer.token_bytes)
    return DataBundle(StreamSource(origin, tokenizer, share, time_limit_s), validation, tokenizer, description)


def _provenance(source: Mapping[str, Any]) -> str:
    subset = f", {source['subset']}" if source["subset"] else ""
    revision = f", revision {source['revision']}" if source["revision"] else ""
    licence = source["licence"] or "not stated, the user knows it"
    return f"{source['name']}{subset}, split {source['split']}{revision}. Licence: {licence}."


def _text_files(config: DataConfig) -> TextFiles:
    if config.source == "corpus":
        return corpus_files()
    if config.source == "stdlib":
        return stdlib_files()
    return folder_files(str(config.path), config.pattern)


def _text_source(pieces: Iterable[Piece], tokenizer: Tokenizer) -> TextSource:
    separator_id = tokenizer.separator_id
    assert separator_id is not None  # checked for a tokenizer that was loaded; those made for text have one
    return TextSource(tokenizer.encode_batch([piece.text for piece in pieces]), separator_id, tokenizer.token_bytes)


def _describe(config: DataConfig, files: TextFiles, split: Split, tokenizer: Tokenizer) -> dict[str, Any]:
    hashes = {side: _sha256(pieces) for side, pieces in (("train", split.train), ("validation", split.validation))}
    return {
        "source": config.source,
        "synthetic": False,
        "provenance": files.provenance,
        "split_rule": split.rule,
        "validation_share": split.validation_share,
        "train_documents": len(split.train),
        "validation_documents": len(split.validation),
        "validation_names": [piece.name for piece in split.validation[:_NAMES_SHOWN]],
        "duplicates_left_out": split.num_duplicates,
        "unreadable_left_out": len(files.skipped),
        "train_bytes": sum(len(piece.text) for piece in split.train),
        "validation_bytes": sum(len(piece.text) for piece in split.validation),
        "train_sha256": hashes["train"],
        "validation_sha256": hashes["validation"],
        **_describe_tokenizer(tokenizer),
    }


def _describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer.kind,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }


def _sha256(pieces: Iterable[Piece]) -> str:
    """Hash of the pieces' hashes in order: it covers the text and where one document ends."""
    return hashlib.sha256("".join(piece.sha256 for piece in pieces).encode()).hexdigest()
