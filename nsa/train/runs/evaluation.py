"""What ``nsa eval`` says about a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa.errors import UserError, check, fail
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import find_checkpoint, read_run_meta
from nsa.train.config import TrainConfig
from nsa.train.data import (
    Batch,
    DataBundle,
    Document,
    ShardSource,
    StreamSource,
    TextSource,
    TokenSource,
    bigram_bits_per_byte,
    collate,
    fault_of_text,
    folder_files,
    load_tokenizer,
    open_data,
    validation_batches,
)
from nsa.train.evaluation import evaluate
from nsa.train.execution.precision import choose_device
from nsa.train.loss import NextTokenLoss
from nsa.train.run_folder import RunFolder
from nsa.train.runs.inference import load_model

_BIGRAM_TOKENS = 1 << 24
_SAME_DATA = ("train_sha256", "validation_sha256", "tokenizer_fingerprint")


class Finding(NamedTuple):
    """Something that an evaluation found.

    Attributes:
        line: for the reader.
        figures: the same by name, in plain JSON types.
    """

    line: str
    figures: dict[str, Any]


def evaluate_run(
    folder: RunFolder,
    *,
    checkpoint: str = "last",
    text: str | None = None,
    device: str = "auto",
    num_windows: int | None = None,
    micro_batch: int | None = None,
) -> Iterator[Finding]:
    """Measure a checkpoint of a run on its held-out data, or on any other text.

    Args:
        folder: the run.
        checkpoint: ``last``, ``best`` or a number of optimizer steps.
        text: file or folder of text, ``-`` for standard input; None takes the run's held-out data.
        device: ``auto``, ``cpu`` or ``cuda``.
        num_windows: windows to measure, the first ones; None for all.
        micro_batch: windows computed at a time; None takes the run's.

    Yields:
        Findings, each as soon as it is known.

    Raises:
        ValueError: no such checkpoint, no such device, no text, or data that are no longer those of the run.
    """
    config = folder.load_config()
    check(num_windows is None or num_windows > 0, "eval", "--windows", "be positive", num_windows)
    size = config.micro_batch if micro_batch is None else micro_batch
    check(size > 0, "eval", "--micro-batch", "be positive", micro_batch)
    place, path = choose_device(device), find_checkpoint("eval", folder.checkpoints, checkpoint)
    given = None if text is None else _read_text(folder, text)  # what is mistyped is refused before anything is loaded
    model, step = load_model(config.model, path, place)
    if given is not None:
        yield from _describe(model, folder, step, place, config)
        yield from _measure_text(model, config, given, str(text), num_windows, size)
        return
    data = open_data(config.data, seed=config.seed, seq_len=config.seq_len, run_folder_tokenizer=folder.tokenizer)
    _check_same_data(path, data)
    yield from _describe(model, folder, step, place, config)
    available = data.validation.num_windows(config.seq_len)
    windows = min(num_windows or available, available)
    batches = validation_batches(
        data.validation, config.seq_len, size, windows, document_mask=config.data.document_mask
    )  # fmt: skip
    result = evaluate(NextTokenLoss(model, config.loss_chunk), batches, compute_dtype=config.compute_dtype)
    yield from _figures(result, config, windows, available, "held out", config.data.source)
    yield from _compared(data, result["bits_per_byte"], windows * config.seq_len)


def _describe(
    model: LanguageModel, folder: RunFolder, step: int, device: torch.device, config: TrainConfig
) -> Iterator[Finding]:
    yield Finding(f"model: {model.parameter_summary()}", {"parameters": model.num_parameters()["total"]})
    yield Finding(
        f"checkpoint: step {step} of {folder.path}, on {device.type} in {config.compute_dtype}",
        {"run": str(folder.path), "step": step, "device": device.type, "compute_dtype": config.compute_dtype},
    )


def _figures(
    result: dict[str, float], config: TrainConfig, windows: int, available: int, what: str, name: str
) -> Iterator[Finding]:
    measured = (
        f"{windows} of {available} windows of {config.seq_len} tokens, {result['num_targets']:,.0f} targets that "
        f"spell {result['num_bytes']:,.0f} bytes of {name}"
    )
    counts = {"windows": windows, "windows_available": available, "seq_len": config.seq_len}
    yield Finding(
        f"{what}: {measured}",
        {"text": name, **counts, "num_targets": result["num_targets"], "num_bytes": result["num_bytes"]},
    )
    yield Finding(f"loss: {result['loss_nats']:.4f} nats per token", {"loss_nats": result["loss_nats"]})
    yield Finding(f"bits per byte: {result['bits_per_byte']:.4f}", {"bits_per_byte": result["bits_per_byte"]})


# --- held-out data --------------------------------------------------------------------------------------------------------
def _compared(data: DataBundle, figure: float, num_targets: int) -> Iterator[Finding]:
    """What the figure of the model on the first ``num_targets`` of the held-out targets is to be compared with."""
    if data.description["synthetic"]:
        ideal = data.description["ideal_loss_nats"]
        line = f"lowest possible loss: {ideal:.4f} nats per token (synthetic task, no text)"
        yield Finding(line, {"ideal_loss_nats": ideal})
        return
    if isinstance(data.train, StreamSource):
        yield Finding("no bigram baseline: a stream's training text is not kept (nsa data prepare makes shards of it)", {})
        return
    train, validation = (_text(source) for source in (data.train, data.validation))
    bigram = bigram_bits_per_byte(train, validation, num_targets=num_targets)
    counted = f"{train.num_tokens:,} tokens of" if train.num_tokens < data.description["train_tokens"] else "the"
    yield Finding(
        f"bigram baseline: {bigram:.4f} bits per byte, counted on {counted} training text, measured on the same held-out text",
        {"bigram_bits_per_byte": bigram},
    )
    difference = bigram - figure
    verdict = "better" if difference > 0 else "WORSE"
    yield Finding(f"the model is {abs(difference):.4f} bits per byte {verdict} than the bigram baseline", {})


def _text(source: TokenSource) -> TextSource:
    """The text of one side in memory, of shards only as much as a bigram model needs."""
    if isinstance(source, ShardSource):
        first = source.read(0, _BIGRAM_TOKENS)
        return TextSource([first], source.separator_id, source.token_bytes)
    assert isinstance(source, TextSource), "neither shards nor text"
    return source


def _check_same_data(checkpoint: Path, data: DataBundle) -> None:
    """Held-out text is held out only while the data are those that the model was trained with."""
    recorded = read_run_meta(checkpoint)["data"]
    for name in _SAME_DATA:
        if recorded.get(name) != data.description.get(name):
            hint = "The text or its division has changed since: what is held out now may have been trained on."
            fail("eval", f"data {name}", f"be that of the run ({recorded.get(name)})", data.description.get(name), hint)


# --- any text -------------------------------------------------------------------------------------------------------------
def _read_text(folder: RunFolder, text: str) -> TextSource:
    """All tokens of a file, a folder or standard input, in the run's vocabulary; one document is one file."""
    tokenizer = load_tokenizer(folder.tokenizer)
    separator_id, hint = tokenizer.separator_id, "Its synthetic task knows no text."
    check(separator_id is not None, "eval", "--text", "be left out for this run", text, hint)
    assert separator_id is not None
    try:
        documents = [_standard_input()] if text == "-" else folder_files(text).documents
    except UserError as error:
        raise UserError("eval", "--text", error.rule, error.value) from None
    tokens = tokenizer.encode_batch([document.text for document in documents])
    longest = max((len(document) for document in tokens), default=0)
    check(longest > 1, "eval", "--text", "hold a document of at least two tokens", longest)
    return TextSource(tokens, separator_id, tokenizer.token_bytes)


def _standard_input() -> Document:
    content = sys.stdin.buffer.read()
    fault = fault_of_text(content)
    check(not fault, "eval", "--text", "be text", f"{fault} of standard input")
    return Document("standard input", content)


def _measure_text(
    model: LanguageModel, config: TrainConfig, source: TextSource, name: str, num_windows: int | None, size: int
) -> Iterator[Finding]:
    """The whole text, to its last token: the last window may be shorter than the others."""
    whole, masked = source.num_windows(config.seq_len), config.data.document_mask
    rest = source.tokens[whole * config.seq_len :]
    available = whole + (len(rest) > 1)
    windows = min(num_windows or available, available)

    def batches() -> Iterator[Batch]:
        if whole:
            yield from validation_batches(source, config.seq_len, size, min(windows, whole), document_mask=masked)
        if windows > whole:
            assert source.separator_id is not None
            last = TextSource([rest[:-1]], source.separator_id, source.token_bytes)
            yield collate(last, [0], len(rest) - 1, document_mask=masked)

    result = evaluate(NextTokenLoss(model, config.loss_chunk), batches(), compute_dtype=config.compute_dtype)
    yield from _figures(result, config, windows, available, "text", "standard input" if name == "-" else name)
