"""Evaluation of a run (``nsa eval``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from nsa.errors import check, check_output, fail
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import SUMS, find_checkpoint, read_meta
from nsa.train.config import TrainConfig
from nsa.train.data import (
    DataBundle,
    ShardSource,
    TextSource,
    TokenSource,
    bigram_bits_per_byte,
    open_data,
    spread,
)
from nsa.train.data.tokenizer import Ids
from nsa.train.evaluation import (
    EvaluationText,
    Measurement,
    RollingSequences,
    SplitSequences,
    in_words,
    measure,
    paired_difference,
    repeated_passages,
)
from nsa.train.execution.precision import choose_device
from nsa.train.loss import NextTokenLoss
from nsa.train.measurements import save_measurement
from nsa.train.run_folder import RunFolder
from nsa.train.runs.inputs import load_model, read_text

_BIGRAM_TOKENS = 1 << 24
_SAME_DATA = ("train_sha256", "validation_sha256", "test_sha256", "tokenizer_fingerprint")
Split = Literal["validation", "test"]


class Finding(NamedTuple):
    """A line for the reader, and its figures by name as JSON has them."""

    line: str
    figures: dict[str, Any]


def _finding(line: str, **figures: Any) -> Finding:
    return Finding(line.format(**figures), figures)


def evaluate_run(
    folder: RunFolder,
    *,
    checkpoint: str = "last",
    against: RunFolder | None = None,
    split: Split = "validation",
    text: str | None = None,
    seq_len: int | None = None,
    device: str = "auto",
    num_sequences: int | None = None,
    micro_batch: int | None = None,
    save: Path | None = None,
    repeat: int | None = None,
) -> Iterator[Finding]:
    """Measure a checkpoint of a run on a split of its data or on any other text.

    Args:
        folder: the run.
        checkpoint: ``last``, ``best`` or a number of optimizer steps.
        against: another run, measured on the same windows and compared document by document.
        split: ``validation`` or ``test``.
        text: file or folder of text, ``-`` for standard input; None takes the split.
        seq_len: tokens of a window; None takes the run's.
        device: ``auto``, ``cpu`` or ``cuda``.
        num_sequences: windows to measure, spread over all of the text; None for all.
        micro_batch: windows computed at a time; None takes the run's.
        save: new file for the sums by document and position, see :mod:`nsa.train.measurements`.
        repeat: tokens of a passage that the model has to repeat, see
            :func:`nsa.train.evaluation.repeated_passages`.

    Yields:
        Findings, each as soon as it is known.

    Raises:
        ValueError: no such checkpoint, no such split, no such device, no text, data that are no
            longer those of the run, or a run on other data to compare with.
    """
    config = folder.load_config()
    seq_len = config.seq_len if seq_len is None else seq_len
    size = config.micro_batch if micro_batch is None else micro_batch
    _check_sizes({"windows": num_sequences, "micro-batch": size, "seq-len": seq_len})
    check_output("eval", "--save", save, is_new=True)
    if text is not None:
        check(split == "validation", "eval", "--split", "be left out with --text", split)
        check(repeat is None, "eval", "--repeat", "be left out with --text", repeat)
    place, path = choose_device(device), find_checkpoint("eval", folder.checkpoints, checkpoint)
    if against is not None:
        other = find_checkpoint("eval", against.checkpoints, checkpoint)
        _check_comparable(path, other, split if text is None else None)
    part = _text(folder, config, path, split, text, seq_len)
    passages = [] if repeat is None else repeated_passages(part.source, seq_len, repeat)
    number = min(num_sequences or len(part.windows), len(part.windows))

    def measured(loss: NextTokenLoss, windows: EvaluationText) -> Measurement:
        return measure(loss, windows, size, number, compute_dtype=config.compute_dtype)

    def repeats(name: str, loss: NextTokenLoss) -> Iterator[Finding]:
        found = [one.figures(measured(loss, one.sequences(seq_len))) for one in passages]
        yield from _repeats(name, found)

    model, step = load_model(config.model, path, place)
    yield from _model(model, folder, step, place.type, config.compute_dtype)
    loss = NextTokenLoss(model, config.loss_chunk)
    result = measured(loss, part.windows)
    yield from _totals(result, part, number)
    if save is not None:
        about = {"run": str(folder.path), "step": step, "split": part.kind, "text": part.name}
        about |= {"seq_len": seq_len, "windows": number, **_identity(path, config, part)}
        save_measurement(save, result, about)
        yield _finding("sums of documents and positions: {saved}", saved=str(save))
    if part.data is not None:
        bits, chosen = result.figures()["bits_per_byte"], spread(number, len(part.windows))
        yield from _compared(part.data, part.source, bits, seq_len, chosen)
    yield from repeats("repeats", loss)
    if against is not None:
        del model, loss
        second = against.load_config()
        model, step = load_model(second.model, other, place)
        loss = NextTokenLoss(model, second.loss_chunk)
        yield from _paired(against, step, result, measured(loss, part.windows))
        yield from repeats("against_repeats", loss)


def _check_sizes(sizes: dict[str, int | None]) -> None:
    for name, value in sizes.items():
        check(value is None or value > 0, "eval", f"--{name}", "be positive", value)


def _model(
    model: LanguageModel, folder: RunFolder, step: int, device: str, compute_dtype: str
) -> Iterator[Finding]:
    parameters = model.num_parameters()["total"]
    yield Finding(f"model: {model.parameter_summary()}", {"parameters": parameters})
    line = "checkpoint: step {step} of {run}, on {device} in {compute_dtype}"
    run = str(folder.path)
    yield _finding(line, run=run, step=step, device=device, compute_dtype=compute_dtype)


class _Text(NamedTuple):
    """Text to evaluate: ``kind`` is the split or ``text``; ``data`` of the run for a split."""

    kind: str
    name: str
    source: TokenSource
    windows: EvaluationText
    data: DataBundle | None


def _text(
    folder: RunFolder,
    config: TrainConfig,
    checkpoint: Path,
    split: Split,
    text: str | None,
    seq_len: int,
) -> _Text:
    if text is not None:
        whole = read_text("eval", folder, text)
        name = "standard input" if text == "-" else text
        return _Text("text", name, whole, RollingSequences(whole, seq_len), None)
    data = _open_data(folder, config, checkpoint)
    source = _split_of(data, split, seq_len)
    windows = SplitSequences(source, seq_len, document_mask=config.data.document_mask)
    return _Text(split, config.data.source, source, windows, data)


def _identity(checkpoint: Path, config: TrainConfig, part: _Text) -> dict[str, Any]:
    """Identity of the model and the text, for :func:`save_measurement`."""
    data, sums = read_meta(checkpoint)["data"], (checkpoint / SUMS).read_bytes()
    found = {
        "tokenizer": data["tokenizer_fingerprint"],
        "seed": config.seed,
        "checkpoint_sha256": hashlib.sha256(sums).hexdigest(),
    }
    if part.data is None:  # each window is from one document, whatever the mask
        assert isinstance(part.source, TextSource)
        return {**found, "text_sha256": hashlib.sha256(part.source.tokens.tobytes()).hexdigest()}
    found |= {"text_sha256": data.get(f"{part.kind}_sha256"), "data_seed": data.get("seed")}
    return {**found, "document_mask": config.data.document_mask}


def _totals(result: Measurement, part: _Text, number: int) -> Iterator[Finding]:
    figures = result.figures()
    yield _finding(
        part.kind + ": {windows} of {windows_available} windows of {seq_len} tokens, "
        "{num_targets:,.0f} targets that spell {num_bytes:,.0f} bytes of {text}",
        split=None if part.data is None else part.kind,
        text=part.name,
        windows=number,
        windows_available=len(part.windows),
        seq_len=part.windows.seq_len,
        num_targets=figures["num_targets"],
        num_bytes=figures["num_bytes"],
    )
    yield _finding("loss: {loss_nats:.4f} nats per token", loss_nats=figures["loss_nats"])
    yield _finding("bits per byte: {bits_per_byte:.4f}", bits_per_byte=figures["bits_per_byte"])
    bins = result.by_position()
    shown = ", ".join(f"{bin['first']:.0f}: {bin['loss_nats']:.3f}" for bin in bins)
    yield Finding(f"nats per token by tokens of context, from: {shown}", {"positions": bins})


def _repeats(name: str, found: list[dict[str, Any]]) -> Iterator[Finding]:
    """Loss of repeated passages by the distance back to the first occurrence."""
    shown = (
        f"{one['distance']}: {one['loss_nats']:.3f} (first {one['first_loss_nats']:.3f})"
        for one in found
    )
    line = "nats per token of a repeated passage, by tokens back to it: " + ", ".join(shown)
    if found:
        yield Finding(line, {name: found})


# --- another run ----------------------------------------------------------------------------------
def _check_comparable(first: Path, second: Path, split: Split | None) -> None:
    """Raise an error for another tokenizer, or a run that may have been trained on the split."""
    ours, theirs = (read_meta(path)["data"] for path in (first, second))
    names = ["tokenizer_fingerprint"]
    if split is not None:
        names += ["source", "seed"] if ours.get("synthetic") else [f"{split}_sha256"]
    for name in names:
        old, new = ours.get(name), theirs.get(name)
        rule = f"be a run whose data have the same {name} ({old})"
        check(old == new, "eval", "--against", rule, new)


def _paired(
    against: RunFolder, step: int, first: Measurement, second: Measurement
) -> Iterator[Finding]:
    figures = second.figures()
    found = _finding(
        "against step {against_step} of {against}: {against_bits_per_byte:.4f} bits per byte",
        against=str(against.path),
        against_step=step,
        against_loss_nats=figures["loss_nats"],
        against_bits_per_byte=figures["bits_per_byte"],
    )
    positions = second.by_position()
    yield Finding(found.line, found.figures | {"against_positions": positions})
    difference = paired_difference([first], [second])
    yield Finding(in_words(difference), difference)


# --- data of the run ------------------------------------------------------------------------------
def _split_of(data: DataBundle, split: Split, seq_len: int) -> TokenSource:
    source = data.test if split == "test" else data.validation
    if source is None:
        hint = "Set data.test_fraction, or prepare shards with --test-fraction, for new runs."
        fail("eval", "--split", "be validation for this run, whose data have no test", split, hint)
    if source.num_sequences(seq_len) == 0:
        assert isinstance(source, TextSource)
        rule = f"be below the {source.num_tokens} tokens of the {split} text"
        fail("eval", "--seq-len", rule, seq_len)
    return source


def _compared(
    data: DataBundle, source: TokenSource, figure: float, seq_len: int, windows: list[int]
) -> Iterator[Finding]:
    """Baselines for the model's bits per byte on windows of a split."""
    if data.description["synthetic"]:
        line = (
            "lowest possible loss: {ideal_loss_nats:.4f} nats per token (synthetic task, no text)"
        )
        yield _finding(line, ideal_loss_nats=data.description["ideal_loss_nats"])
        return
    if not isinstance(data.train, TextSource):
        why = (
            "the source does not keep its training text (nsa data prepare makes shards of a stream)"
        )
        yield Finding(f"no bigram baseline: {why}", {})
        return
    train = _in_memory(data.train)
    assert isinstance(source, TextSource), "a split without text"
    tokens: Ids = np.stack([source.sequence(seq_len, index) for index in windows])
    bigram = bigram_bits_per_byte(train, source, sequences=tokens)
    is_part = train.num_tokens < data.description["train_tokens"]
    counted = f"{train.num_tokens:,} tokens of" if is_part else "the"
    yield _finding(
        "bigram baseline: {bigram_bits_per_byte:.4f} bits per byte, "
        f"counted on {counted} training text, measured on the same windows",
        bigram_bits_per_byte=bigram,
    )
    difference = bigram - figure
    verdict = f"{abs(difference):.4f} bits per byte {'better' if difference > 0 else 'WORSE'}"
    yield Finding(f"the model is {verdict} than the bigram baseline", {})


def _in_memory(source: TextSource) -> TextSource:
    """Return a text in memory; of shards only as much as a bigram model needs."""
    if isinstance(source, ShardSource):
        first = source.read(0, _BIGRAM_TOKENS)
        return TextSource([first], source.separator_id, source.token_bytes)
    return source


def _open_data(folder: RunFolder, config: TrainConfig, checkpoint: Path) -> DataBundle:
    """Open the data of the run; raise an error if the model may have been trained on the split."""
    data = open_data(
        config.data,
        seed=config.seed,
        seq_len=config.seq_len,
        run_folder_tokenizer=folder.tokenizer,
    )
    before, now = read_meta(checkpoint)["data"], data.description
    for name in _SAME_DATA:
        old, new = before.get(name), now.get(name)
        hint = "The text or its division has changed: the model may have been trained on this part."
        check(old == new, "eval", f"data {name}", f"be that of the run ({old})", new, hint)
    return data
