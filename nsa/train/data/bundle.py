"""One entry point: from a configuration to training and validation windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.errors import check, fail
from nsa.train.config import DataConfig
from nsa.train.data.documents import TextFiles, corpus_files, folder_files, stdlib_files
from nsa.train.data.source import TextSource, TokenSource
from nsa.train.data.split import Piece, Split, split_documents
from nsa.train.data.synthetic import TASKS, SyntheticSource
from nsa.train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer

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


def open_data(config: DataConfig, *, seed: int, seq_len: int, run_folder_tokenizer: str | Path | None = None) -> DataBundle:
    """Read, divide and tokenise the text that a configuration names, or set up the synthetic task that it names.

    Nothing stands in for text that cannot be read: that is an error.

    Args:
        config: see :class:`nsa.train.config.DataConfig`.
        seed: of synthetic tasks; text, its division and its tokenizer do not depend on it.
        seq_len: tokens of a window; both sides must have at least one window.
        run_folder_tokenizer: tokenizer file of an existing run, taken instead of making one.

    Raises:
        ValueError: a missing or unsuitable file, too little text for a window, or a tokenizer of another kind than configured.
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
        return _open_synthetic(config, seed, seq_len)
    files = _text_files(config)
    split = split_documents(files, config.validation_fraction)
    if tokenizer is None:
        tokenizer = make_tokenizer(config, (piece.text for piece in split.train))
    train, validation = (_text_source(pieces, tokenizer) for pieces in (split.train, split.validation))
    for side, source, pieces in (("training", train, split.train), ("validation", validation, split.validation)):
        if source.num_windows(seq_len) == 0:
            size = f"{len(source.tokens)} tokens of the {side} text ({sum(len(piece.text) for piece in pieces)} bytes)"
            hint = "Take more text, shorter windows, or another data.validation_fraction."
            fail("open_data", "seq_len", f"be below the {size}", seq_len, hint)
    description = _describe(config, files, split, tokenizer)
    for side, source in (("train", train), ("validation", validation)):
        description[f"{side}_tokens"] = len(source.tokens)
        description[f"{side}_windows"] = source.num_windows(seq_len)
    return DataBundle(train, validation, tokenizer, description)


def _open_synthetic(config: DataConfig, seed: int, seq_len: int) -> DataBundle:
    rule = f"be byte for the synthetic task {config.source}"
    check(config.tokenizer == "byte", "open_data", "data.tokenizer", rule, config.tokenizer)
    train, validation = (SyntheticSource(config.source, side, seed) for side in ("train", "validation"))
    tokenizer = ByteTokenizer(separator=False)
    description = {
        "source": config.source,
        "synthetic": True,
        "provenance": "Synthetic task, made from random numbers; no text.",
        "seed": seed,
        "ideal_loss_nats": train.ideal_loss,
        "train_windows": train.num_windows(seq_len),
        "validation_windows": validation.num_windows(seq_len),
        "tokenizer": tokenizer.kind,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }
    return DataBundle(train, validation, tokenizer, description)


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
        "tokenizer": tokenizer.kind,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }


def _sha256(pieces: Iterable[Piece]) -> str:
    """Hash of the pieces' hashes in order: it covers the text and where one document ends."""
    return hashlib.sha256("".join(piece.sha256 for piece in pieces).encode()).hexdigest()
