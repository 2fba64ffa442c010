"""What ``nsa eval`` says about a run."""

from __future__ import annotations

from collections.abc import Iterator

from nsa.errors import check, fail
from nsa.eval.bits_per_byte import evaluate
from nsa.train.checkpoint import list_checkpoints, read_meta
from nsa.train.data import (
    DataBundle,
    ShardSource,
    StreamSource,
    TextSource,
    TokenSource,
    bigram_bits_per_byte,
    open_data,
    validation_batches,
)
from nsa.train.inference import load_model
from nsa.train.loss import NextTokenLoss
from nsa.train.precision import choose_device
from nsa.train.run_folder import RunFolder

_BIGRAM_TOKENS = 1 << 24
_SAME_DATA = ("train_sha256", "validation_sha256", "tokenizer_fingerprint")


def evaluate_run(
    folder: RunFolder,
    *,
    device: str = "auto",
    num_windows: int | None = None,
    micro_batch: int | None = None,
) -> Iterator[str]:
    """Measure the newest checkpoint of a run on its held-out data.

    Args:
        folder: the run.
        device: ``auto``, ``cpu`` or ``cuda``.
        num_windows: held-out windows to measure, the first ones; None for all.
        micro_batch: windows computed at a time; None takes the run's.

    Yields:
        Lines for the reader, each as soon as it is known.

    Raises:
        ValueError: no checkpoint, no such device, or data that are no longer those of the run.
    """
    config = folder.load_config()
    check(num_windows is None or num_windows > 0, "eval", "--windows", "be positive", num_windows)
    size = config.micro_batch if micro_batch is None else micro_batch
    check(size > 0, "eval", "--micro-batch", "be positive", micro_batch)
    model, step = load_model(config.model, folder, choose_device(device))  # first: without one there is nothing to measure
    data = open_data(config.data, seed=config.seed, seq_len=config.seq_len, run_folder_tokenizer=folder.tokenizer)
    _check_same_data(folder, data)
    available = data.validation.num_windows(config.seq_len)
    windows = min(num_windows or available, available)
    yield f"model: {model.parameter_summary()}"
    yield f"checkpoint: step {step} of {folder.path}, on {model.embedding.weight.device.type} in {config.compute_dtype}"
    held_out, masked = data.validation, config.data.document_mask
    batches = validation_batches(held_out, config.seq_len, size, windows, document_mask=masked)
    result = evaluate(NextTokenLoss(model, config.loss_chunk), batches, compute_dtype=config.compute_dtype)
    yield (
        f"held out: {windows} of {available} windows of {config.seq_len} tokens, {result['num_targets']:,.0f} targets that "
        f"spell {result['num_bytes']:,.0f} bytes of {config.data.source}"
    )
    yield f"loss: {result['loss_nats']:.4f} nats per token"
    yield f"bits per byte: {result['bits_per_byte']:.4f}"
    if data.description["synthetic"]:
        yield f"lowest possible loss: {data.description['ideal_loss_nats']:.4f} nats per token (synthetic task, no text)"
        return
    if isinstance(data.train, StreamSource):
        yield "no bigram baseline: a stream's training text is not kept (nsa data prepare makes shards of it)"
        return
    train, validation = (_text(source) for source in (data.train, data.validation))
    bigram = bigram_bits_per_byte(train, validation, num_targets=windows * config.seq_len)
    counted = f"{train.num_tokens:,} tokens of" if train.num_tokens < data.description["train_tokens"] else "the"
    yield f"bigram baseline: {bigram:.4f} bits per byte, counted on {counted} training text, measured on the same held-out text"
    difference = bigram - result["bits_per_byte"]
    yield f"the model is {abs(difference):.4f} bits per byte {'better' if difference > 0 else 'WORSE'} than the bigram baseline"


def _text(source: TokenSource) -> TextSource:
    """The text of one side in memory, of shards only as much as a bigram model needs."""
    if isinstance(source, ShardSource):
        separator_id = source.separator_id
        assert separator_id is not None, "shards without a separator"
        return TextSource([source.tokens(0, _BIGRAM_TOKENS)], separator_id, source.token_bytes)
    assert isinstance(source, TextSource), "neither shards nor text"
    return source


def _check_same_data(folder: RunFolder, data: DataBundle) -> None:
    """Held-out text is held out only while the data are those that the model was trained with."""
    recorded = read_meta(list_checkpoints(folder.checkpoints)[-1])["data"]
    for name in _SAME_DATA:
        if recorded.get(name) != data.description.get(name):
            hint = "The text or its division has changed since: what is held out now may have been trained on."
            fail("eval", f"data {name}", f"be that of the run ({recorded.get(name)})", data.description.get(name), hint)
