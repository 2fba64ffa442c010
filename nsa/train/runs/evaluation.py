"""Evaluation of a run (``nsa eval``)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from nsa.errors import UserError, check, check_output, fail
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import SUMS, find_checkpoint, load_tensors, read_meta, step_of
from nsa.train.config import RecallConfig, TrainConfig
from nsa.train.data import (
    DataBundle,
    Document,
    ShardSource,
    TextSource,
    TokenSource,
    bigram_bits_per_byte,
    fault_of_text,
    folder_files,
    load_tokenizer,
    open_data,
    spread,
)
from nsa.train.data.recall import RecallSource
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
from nsa.train.needles import Answers, NeedleConfig, Needles, find_needles, find_values, row_of
from nsa.train.run_folder import RunFolder
from nsa.train.state import weights

_BIGRAM_TOKENS = 1 << 24
_SAME_DATA = ("train_sha256", "validation_sha256", "test_sha256", "tokenizer_fingerprint")
Split = Literal["validation", "test"]


# --- model and text -------------------------------------------------------------------------------
def load_model(
    config: LMConfig,
    checkpoint: Path,
    device: torch.device,
) -> tuple[LanguageModel, int]:
    """Load the model of a checkpoint, with its fp32 weights.

    Args:
        config: configuration of the model.
        checkpoint: folder of the checkpoint.
        device: device of the model.

    Returns:
        The model in evaluation mode, and its optimizer steps.

    Raises:
        ValueError: the checkpoint is damaged or contains another model.
    """
    model = LanguageModel(config).to(device)
    load_tensors(checkpoint, weights(model))
    return model.eval(), step_of(checkpoint)


def with_scores(model: LanguageModel, config: LMConfig, scores: Any) -> LanguageModel:
    """Model with the weights of ``model`` that selects blocks by other scores.

    Args:
        model: the trained model.
        config: its configuration.
        scores: see :class:`nsa.NSAConfig`.

    Raises:
        UserError: the model selects no blocks, or lacks parameters that compress keys.
    """
    selects = config.attention == "nsa" and "slc" in config.nsa.branches
    check(selects, "--scores", "be left out for a model that selects no blocks", scores)
    changed = replace(config, nsa=replace(config.nsa, scores=scores))
    other = LanguageModel(changed).to(model.embedding.weight.device)
    missing, _ = other.load_state_dict(model.state_dict(), strict=False)
    hint = f"They have no {''.join(missing[:1])}."
    check(not missing, "--scores", "need no more weights than the trained ones", scores, hint)
    return other.eval()


def read_text(folder: RunFolder, text: str) -> TextSource:
    """Read all tokens of a file, a folder or standard input; one document is one file.

    Args:
        folder: the run, which has the tokenizer.
        text: file or folder, ``-`` for standard input.

    Raises:
        UserError: the content is not text, or has no document of two tokens.
    """
    tokenizer = load_tokenizer(folder.tokenizer)
    separator_id, hint = tokenizer.separator_id, "Its synthetic task has no text."
    check(separator_id is not None, "--text", "be left out for this run", text, hint)
    assert separator_id is not None
    try:
        documents = [_standard_input()] if text == "-" else folder_files(text).documents
    except UserError as error:
        raise UserError("--text", error.rule, error.value) from None
    tokens = tokenizer.encode_documents([document.text for document in documents])
    longest = max((len(document) - 1 for document in tokens), default=0)
    check(longest > 1, "--text", "contain a document of at least two tokens", longest)
    return TextSource(tokens, separator_id, tokenizer.token_bytes)


def open_run_data(folder: RunFolder, config: TrainConfig) -> DataBundle:
    """Open the data of a run with its tokenizer."""
    return open_data(
        config.data,
        seed=config.seed,
        seq_len=config.seq_len,
        run_folder_tokenizer=folder.tokenizer,
    )


def _standard_input() -> Document:
    content = sys.stdin.buffer.read()
    fault = fault_of_text(content)
    check(not fault, "--text", "be text", f"{fault} of standard input")
    return Document("standard input", content)


# --- evaluation -----------------------------------------------------------------------------------
class Finding(NamedTuple):
    """A line for the reader, and its values by name as in the JSON."""

    line: str
    figures: dict[str, Any]


# Findings, and at the end the rows of the needles.
Retrieval = Generator[Finding, None, list[dict[str, Any]]]


class _Text(NamedTuple):
    """Text to evaluate: ``kind`` is the split or ``text``; ``data`` of the run for a split."""

    kind: str
    name: str
    source: TokenSource
    windows: EvaluationText
    data: DataBundle | None


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
    needle: NeedleConfig | None = None,
    recall: bool = False,
    scores: str | None = None,
) -> Iterator[Finding]:
    """Measure a checkpoint of a run on a split of its data or on any other text.

    Args:
        folder: the run.
        checkpoint: ``last``, ``best`` or a number of optimizer steps.
        against: another run, measured on the same sequences and compared document by document.
        split: ``validation`` or ``test``.
        text: file or folder of text, ``-`` for standard input; None takes the split.
        seq_len: tokens of a sequence; None takes the run's.
        device: ``auto``, ``cpu`` or ``cuda``.
        num_sequences: sequences to measure, evenly spaced in the text; None for all.
        micro_batch: sequences computed at a time; None takes the run's.
        save: new file for the sums by document and position, see :mod:`nsa.train.measurements`.
        repeat: tokens of a passage that the model has to repeat, see
            :func:`nsa.train.evaluation.repeated_passages`.
        needle: contexts with a needle that the model has to find; None for none.
        recall: whether repeated lines are measured, see :func:`nsa.train.needles.find_values`.
        scores: scores by which the run's model selects blocks, see :func:`with_scores`; None takes
            the trained ones. The model of ``against`` keeps its own.

    Yields:
        Findings, each as soon as it is known.

    Raises:
        UserError: no such checkpoint, no such split, no such device, no text, data that are no
            longer those of the run, or a run on other data to compare with.
    """
    config = folder.load_config()
    numbers = {"windows": num_sequences, "micro-batch": micro_batch, "seq-len": seq_len}
    _check_options(numbers, split, text, repeat, save)
    seq_len, size = seq_len or config.seq_len, micro_batch or config.micro_batch
    on, path = choose_device(device), find_checkpoint(folder.checkpoints, checkpoint)
    if against is not None:
        other = find_checkpoint(against.checkpoints, checkpoint)
        _check_comparable(path, other, split if text is None else None)
    part = _text(folder, config, path, split, text, seq_len)
    passages = [] if repeat is None else repeated_passages(part.source, seq_len, repeat)
    needles = _open_needles(needle, folder, part.source, seq_len, size * seq_len)
    number = min(num_sequences or len(part.windows), len(part.windows))
    inserted = _open_recall(recall, folder, part.source)
    dtype = config.compute_dtype
    measured = partial(measure, micro_batch=size, num_sequences=number, compute_dtype=dtype)

    def retrieval(prefix: str, loss: NextTokenLoss) -> Retrieval:
        found = [one.figures(measured(loss, one.sequences(seq_len))) for one in passages]
        yield from _repeats(f"{prefix}repeats", found)
        yield from _recall(prefix, loss.model, inserted, seq_len, number, dtype)
        return (yield from _needles(prefix, loss.model, needles, dtype))

    model, step = load_model(config.model, path, on)
    about: dict[str, Any] = {"run": str(folder.path), "step": step, "device": on.type}
    if scores is not None:
        model, about["scores"] = with_scores(model, config.model, scores), scores
    yield from _model(model, {**about, "compute_dtype": dtype})
    loss = NextTokenLoss(model, config.loss_chunk)
    result = measured(loss, part.windows)
    yield from _totals(result, part, number)
    rows = yield from retrieval("", loss)
    if save is not None:
        about |= {"seq_len": seq_len, "windows": number, "needles": rows}
        save_measurement(save, result, _identity(path, config, part) | about)
        yield Finding(f"sums of documents and positions: {save}", {"saved": str(save)})
    yield from _baseline(part, result, number)
    if against is not None:
        del model, loss
        second = against.load_config()
        model, step = load_model(second.model, other, on)
        loss = NextTokenLoss(model, second.loss_chunk)
        yield from _paired(against, step, result, measured(loss, part.windows))
        yield from retrieval("against_", loss)


def _check_options(
    numbers: dict[str, int | None],
    split: Split,
    text: str | None,
    repeat: int | None,
    save: Path | None,
) -> None:
    check_output("--save", save, is_new=True)
    for name, value in numbers.items():
        check(value is None or value > 0, f"--{name}", "be positive", value)
    if text is not None:
        check(split == "validation", "--split", "be left out with --text", split)
        check(repeat is None, "--repeat", "be left out with --text", repeat)


def _model(model: LanguageModel, about: dict[str, Any]) -> Iterator[Finding]:
    parameters = model.num_parameters()["total"]
    yield Finding(f"model: {model.parameter_summary()}", {"parameters": parameters})
    line = "checkpoint: step {step} of {run}, on {device} in {compute_dtype}"
    instead = "; blocks selected by scores {scores}" if "scores" in about else ""
    yield Finding(f"{line}{instead}".format(**about), about)


def _text(
    folder: RunFolder,
    config: TrainConfig,
    checkpoint: Path,
    split: Split,
    text: str | None,
    seq_len: int,
) -> _Text:
    """Open the text; raise an error if the model may have been trained on the split."""
    if text is not None:
        whole = read_text(folder, text)
        name = "standard input" if text == "-" else text
        return _Text("text", name, whole, RollingSequences(whole, seq_len), None)
    data = open_run_data(folder, config)
    before, now = read_meta(checkpoint)["data"], data.description
    for name in _SAME_DATA:
        old, new = before.get(name), now.get(name)
        hint = "The text or its division has changed: the model may have been trained on this part."
        check(old == new, f"data {name}", f"be that of the run ({old})", new, hint)
    source = data.test if split == "test" else data.validation
    if source is None:
        hint = "Set data.test_fraction, or prepare shards with --test-fraction, for new runs."
        fail("--split", "be validation for this run, whose data have no test", split, hint)
    if source.num_sequences(seq_len) == 0:
        assert isinstance(source, TextSource)
        rule = f"be below the {source.num_tokens} tokens of the {split} text"
        fail("--seq-len", rule, seq_len)
    windows = SplitSequences(source, seq_len, document_mask=config.data.document_mask)
    return _Text(split, config.data.source, source, windows, data)


def _identity(checkpoint: Path, config: TrainConfig, part: _Text) -> dict[str, Any]:
    """Identity of the model and the text, for :func:`save_measurement`."""
    data, sums = read_meta(checkpoint)["data"], (checkpoint / SUMS).read_bytes()
    found = {
        "split": part.kind,
        "text": part.name,
        "tokenizer": data["tokenizer_fingerprint"],
        "seed": config.seed,
        "checkpoint_sha256": hashlib.sha256(sums).hexdigest(),
    }
    if part.data is None:  # each sequence is from one document, whatever the mask
        assert isinstance(part.source, TextSource)
        return {**found, "text_sha256": hashlib.sha256(part.source.tokens.tobytes()).hexdigest()}
    found |= {"text_sha256": data.get(f"{part.kind}_sha256"), "data_seed": data.get("seed")}
    return {**found, "document_mask": config.data.document_mask}


def _repeats(name: str, found: list[dict[str, Any]]) -> Iterator[Finding]:
    """Loss of repeated passages by the distance back to their first occurrence."""
    shown = (
        f"{one['distance']}: {one['loss_nats']:.3f} (first {one['first_loss_nats']:.3f})"
        for one in found
    )
    line = "nats per token of a repeated passage, by tokens back to it: " + ", ".join(shown)
    yield from [Finding(line, {name: found})] if found else []


def _open_recall(is_wanted: bool, folder: RunFolder, source: TokenSource) -> RecallSource | None:
    """The text with lines of words that training does not contain, the same for every run."""
    if not is_wanted:
        return None
    given = "a run without text"
    check(source.text is not None, "--recall", "be left out for a synthetic task", given)
    tokenizer = load_tokenizer(folder.tokenizer)
    return RecallSource(source, tokenizer, RecallConfig(), seed=0, held_out=True)


def _recall(
    prefix: str,
    model: LanguageModel,
    source: RecallSource | None,
    seq_len: int,
    number: int,
    compute_dtype: str,
) -> Iterator[Finding]:
    """Exact matches of repeated lines by the distance back to them."""
    if source is None:
        return
    chosen = spread(number, source.num_sequences(seq_len))
    rows = find_values(model, source, seq_len, chosen, compute_dtype)
    *by_distance, total = rows
    shown = ", ".join(f"{row['first']}: {row['exact_match']:.1%}" for row in by_distance)
    exact = f"{total['exact_match']:.1%} exact matches{_interval(total)}"
    line = f"recall: {exact}; by tokens back to the line, from: {shown}"
    yield Finding(line, {f"{prefix}recall": rows})


def _open_needles(
    config: NeedleConfig | None, folder: RunFolder, source: TokenSource, *sizes: int
) -> Needles | None:
    """Contexts of a configuration; ``sizes`` are the last arguments of :class:`Needles`."""
    if config is None:
        return None
    return Needles(config, load_tokenizer(folder.tokenizer), source, *sizes)


def _needles(
    prefix: str, model: LanguageModel, needles: Needles | None, compute_dtype: str
) -> Retrieval:
    """Two lines for each length, exact matches and log-probabilities by depth; then the total.

    Returns:
        Rows as in the JSON; none without needles.
    """
    rows, found = list[dict[str, Any]](), list[Answers]()
    if needles is None:
        return rows
    config, name = needles.config, f"{prefix}needles"

    def line(label: str, kind: str, values: Iterable[str], end: str = "") -> str:
        return f"{label:>8} {kind:<5} " + "".join(f"{value:>7}" for value in values) + end

    def row(answers: Answers, length: int | None, depth: float | None) -> dict[str, Any]:
        about: dict[str, Any] = {"length": length, "depth": depth}
        about["distractors"] = config.distractors
        about |= {"passage": config.passage} if config.passage else {}
        about |= {"style": config.style} if config.style != "ruler" else {}
        rows.append(row_of(answers, **about, seed=config.seed))
        return rows[-1]

    yield Finding("needles: exact matches and log-probability of the value (nats), by depth", {})
    yield Finding(line("tokens", "", (f"{depth:.0%}" for depth in needles.depths), "    all"), {})
    for length in needles.lengths:
        found.append(find_needles(model, needles, length, compute_dtype))
        at = [row(x, length, depth) for x, depth in zip(found[-1], needles.depths, strict=True)]
        at.append(row(found[-1], length, None))
        shares = line(
            f"{length}", "exact", (f"{x['exact_match']:.1%}" for x in at), _interval(at[-1])
        )
        nats = line("", "nats", (f"{x['log_prob_nats']:.2f}" for x in at))
        yield Finding(f"{shares}\n{nats}", {name: rows})
    total = row(np.stack(found), None, None)
    exact = f"{total['exact_match']:.1%} exact matches{_interval(total)}"
    yield Finding(f"needles: {exact}, {total['log_prob_nats']:.2f} nats", {name: rows})
    return rows


def _interval(row: dict[str, Any]) -> str:
    return f" (95% interval {row['exact_low']:.1%} to {row['exact_high']:.1%})"


def _totals(result: Measurement, part: _Text, number: int) -> Iterator[Finding]:
    figures, bins = result.figures(), result.by_position()
    about = {
        "split": None if part.data is None else part.kind,
        "text": part.name,
        "windows": number,
        "windows_available": len(part.windows),
        "seq_len": part.windows.seq_len,
        "num_targets": figures["num_targets"],
        "num_bytes": figures["num_bytes"],
    }
    line = (
        "{windows} of {windows_available} sequences of {seq_len} tokens, "
        "{num_targets:,.0f} targets, {num_bytes:,.0f} bytes of {text}"
    )
    yield Finding(f"{part.kind}: {line.format(**about)}", about)
    for name, line in (
        ("loss_nats", "loss: {:.4f} nats per token"),
        ("bits_per_byte", "bits per byte: {:.4f}"),
    ):
        yield Finding(line.format(figures[name]), {name: figures[name]})
    shown = ", ".join(f"{bin['first']:.0f}: {bin['loss_nats']:.3f}" for bin in bins)
    yield Finding(f"nats per token by tokens of context, from: {shown}", {"positions": bins})
    if part.data is not None and part.data.description["synthetic"]:
        ideal = part.data.description["ideal_loss_nats"]
        line = f"lowest possible loss: {ideal:.4f} nats per token (synthetic task, no text)"
        yield Finding(line, {"ideal_loss_nats": ideal})


def _baseline(part: _Text, result: Measurement, number: int) -> Iterator[Finding]:
    """Loss that a model must be compared with on sequences of a split."""
    data, source, seq_len = part.data, part.source, part.windows.seq_len
    if data is None or data.description["synthetic"]:
        return
    train = data.train.text
    if train is None:
        how = "nsa data prepare makes shards of a stream"
        line = f"no bigram baseline: the source does not keep its training text ({how})"
        yield Finding(line, {})
        return
    if isinstance(train, ShardSource):  # in memory, only as much as a bigram model needs
        first = train.read(0, _BIGRAM_TOKENS)
        train = TextSource([first], train.separator_id, train.token_bytes)
    assert isinstance(source, TextSource), "a split without text"
    chosen = spread(number, len(part.windows))
    tokens: Ids = np.stack([source.sequence(seq_len, index) for index in chosen])
    bigram = bigram_bits_per_byte(train, source, sequences=tokens)
    is_part = train.num_tokens < data.description["train_tokens"]
    counted = f"{train.num_tokens:,} tokens of" if is_part else "the"
    line = f"bigram baseline: {bigram:.4f} bits per byte, counted on {counted} training text"
    yield Finding(f"{line}, measured on the same sequences", {"bigram_bits_per_byte": bigram})
    difference = bigram - result.figures()["bits_per_byte"]
    verdict = f"{abs(difference):.4f} bits per byte {'better' if difference > 0 else 'WORSE'}"
    yield Finding(f"the model is {verdict} than the bigram baseline", {})


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
        check(old == new, "--against", rule, new)


def _paired(
    against: RunFolder, step: int, first: Measurement, second: Measurement
) -> Iterator[Finding]:
    figures = second.figures()
    bits = figures["bits_per_byte"]
    found = {
        "against": str(against.path),
        "against_step": step,
        "against_loss_nats": figures["loss_nats"],
        "against_bits_per_byte": bits,
        "against_positions": second.by_position(),
    }
    yield Finding(f"against step {step} of {against.path}: {bits:.4f} bits per byte", found)
    difference = paired_difference([first], [second])
    yield Finding(in_words(difference), difference)
