"""What ``nsa eval`` says about a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nsa.errors import check
from nsa.train.checkpoint import find_checkpoint, read_meta
from nsa.train.config import TrainConfig
from nsa.train.data import (
    DataBundle,
    ShardSource,
    TextSource,
    TokenSource,
    bigram_bits_per_byte,
    open_data,
    validation_batches,
)
from nsa.train.evaluation import RollingWindows, evaluate
from nsa.train.execution.precision import choose_device
from nsa.train.loss import NextTokenLoss
from nsa.train.run_folder import RunFolder
from nsa.train.runs.inference import load_model
from nsa.train.runs.texts import read_text

_BIGRAM_TOKENS = 1 << 24
_SAME_DATA = ("train_sha256", "validation_sha256", "tokenizer_fingerprint")


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
    text: str | None = None,
    device: str = "auto",
    num_windows: int | None = None,
    micro_batch: int | None = None,
) -> Iterator[Finding]:
    """Measure a checkpoint of a run on its validation data, or on any other text.

    Args:
        folder: the run.
        checkpoint: ``last``, ``best`` or a number of optimizer steps.
        text: file or folder of text, ``-`` for standard input; None takes the run's validation
            data.
        device: ``auto``, ``cpu`` or ``cuda``.
        num_windows: windows to measure, the first ones; None for all.
        micro_batch: windows computed at a time; None takes the run's.

    Yields:
        Findings, each as soon as it is known.

    Raises:
        ValueError: no such checkpoint, no such device, no text, or data that are no longer those of
            the run.
    """
    config = folder.load_config()
    check(num_windows is None or num_windows > 0, "eval", "--windows", "be positive", num_windows)
    size = config.micro_batch if micro_batch is None else micro_batch
    check(size > 0, "eval", "--micro-batch", "be positive", micro_batch)
    place, path = choose_device(device), find_checkpoint("eval", folder.checkpoints, checkpoint)
    # a mistyped path is refused first
    given = None if text is None else read_text("eval", folder, text)
    model, step = load_model(config.model, path, place)
    data = _open_data(folder, config, path) if given is None else None
    parameters = model.num_parameters()["total"]
    yield Finding(f"model: {model.parameter_summary()}", {"parameters": parameters})
    yield _finding(
        "checkpoint: step {step} of {run}, on {device} in {compute_dtype}",
        run=str(folder.path),
        step=step,
        device=place.type,
        compute_dtype=config.compute_dtype,
    )
    name: str
    if data is not None:
        kind, name = "validation", config.data.source
        available = data.validation.num_windows(config.seq_len)
        windows = min(num_windows or available, available)
        sizes, is_masked = (config.seq_len, size, windows), config.data.document_mask
        batches = validation_batches(data.validation, *sizes, document_mask=is_masked)
    else:
        assert given is not None
        kind, name = "text", "standard input" if text == "-" else str(text)
        rolling = RollingWindows(given, config.seq_len)
        available = len(rolling)
        windows = min(num_windows or available, available)
        batches = rolling.batches(size, windows)
    loss = NextTokenLoss(model, config.loss_chunk)
    result = evaluate(loss, batches, compute_dtype=config.compute_dtype)
    yield _finding(
        kind + ": {windows} of {windows_available} windows of {seq_len} tokens, "
        "{num_targets:,.0f} targets that spell {num_bytes:,.0f} bytes of {text}",
        text=name,
        windows=windows,
        windows_available=available,
        seq_len=config.seq_len,
        num_targets=result["num_targets"],
        num_bytes=result["num_bytes"],
    )
    yield _finding("loss: {loss_nats:.4f} nats per token", loss_nats=result["loss_nats"])
    bits = result["bits_per_byte"]
    yield _finding("bits per byte: {bits_per_byte:.4f}", bits_per_byte=bits)
    if data is not None:
        yield from _compared(data, bits, windows * config.seq_len)


# --- validation data ------------------------------------------------------------------------------
def _compared(data: DataBundle, figure: float, num_targets: int) -> Iterator[Finding]:
    """Baselines for the model's figure on the first ``num_targets`` targets."""
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
    train, validation = (_in_memory(source) for source in (data.train, data.validation))
    bigram = bigram_bits_per_byte(train, validation, num_targets=num_targets)
    is_part = train.num_tokens < data.description["train_tokens"]
    counted = f"{train.num_tokens:,} tokens of" if is_part else "the"
    yield _finding(
        "bigram baseline: {bigram_bits_per_byte:.4f} bits per byte, "
        f"counted on {counted} training text, measured on the same validation text",
        bigram_bits_per_byte=bigram,
    )
    difference = bigram - figure
    verdict = f"{abs(difference):.4f} bits per byte {'better' if difference > 0 else 'WORSE'}"
    yield Finding(f"the model is {verdict} than the bigram baseline", {})


def _in_memory(source: TokenSource) -> TextSource:
    """Text in memory; of shards only as much as a bigram model needs."""
    if isinstance(source, ShardSource):
        first = source.read(0, _BIGRAM_TOKENS)
        return TextSource([first], source.separator_id, source.token_bytes)
    assert isinstance(source, TextSource), "a source without text"
    return source


def _open_data(folder: RunFolder, config: TrainConfig, checkpoint: Path) -> DataBundle:
    """The data of the run; validation text that the model may have been trained on is refused."""
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
