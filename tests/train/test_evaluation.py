"""Bits per byte of validation text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa.lm.model import LanguageModel
from nsa.train.data import IGNORED_TARGET, Batch, TextSource, validation_batches
from nsa.train.evaluation import RollingWindows, evaluate
from nsa.train.loss import NextTokenLoss
from tests.train.cases import MODEL


def make_model(attention: str = "nsa") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(dataclasses.replace(MODEL, attention=attention))  # type: ignore[arg-type]


def source(token_bytes: int = 1) -> TextSource:
    generator = np.random.default_rng(0)
    sizes = (40, 3, 90, 200, 61)
    documents = [np.append(generator.integers(1, 256, size=size), 0) for size in sizes]
    spelled = np.full(256, token_bytes, dtype=np.int64)
    spelled[0] = 0  # the separator
    return TextSource(documents, 0, spelled)


def test_uniform_model_needs_eight_bits() -> None:
    """Separators have to be predicted but spell nothing; bytes count and not tokens."""
    model = make_model()
    with torch.no_grad():
        model.head.weight.zero_()
    one, three = (
        evaluate(NextTokenLoss(model), validation_batches(text, 64, 2, 5, document_mask=False))
        for text in (source(1), source(3))
    )
    assert one["num_targets"] == 320 > one["num_bytes"]
    assert one["loss_nats"] == pytest.approx(math.log(256), rel=1e-6)
    assert one["bits_per_byte"] == pytest.approx(8 * 320 / one["num_bytes"], rel=1e-6)
    assert three["loss_nats"] == one["loss_nats"]
    assert three["bits_per_byte"] == pytest.approx(one["bits_per_byte"] / 3, rel=1e-12)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_batching_and_chunks_change_nothing(attention: str) -> None:
    model = make_model(attention).double()

    def batches(micro_batch: int) -> Iterator[Batch]:
        return validation_batches(source(), 64, micro_batch, 5, document_mask=True)

    expected = evaluate(NextTokenLoss(model), batches(1))
    assert evaluate(NextTokenLoss(model), batches(5)) == pytest.approx(expected, rel=1e-9)
    assert evaluate(NextTokenLoss(model, 10), batches(2)) == pytest.approx(expected, rel=1e-9)


def test_leaves_no_trace() -> None:
    """Not even when it fails."""
    model, modes = make_model().train(), []
    model.norm.register_forward_hook(lambda module, *_: modes.append(module.training))

    def failing() -> Iterator[Batch]:
        yield from validation_batches(source(), 64, 2, 4, document_mask=True)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        evaluate(NextTokenLoss(model), failing())
    assert modes == [False, False]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_evaluate() -> None:
    with pytest.raises(ValueError, match="evaluate: batches must hold at least one target, got 0"):
        evaluate(NextTokenLoss(make_model()), [])


DOCUMENTS = st.lists(st.lists(st.integers(1, 255), max_size=30), min_size=1, max_size=4)


@given(DOCUMENTS, st.integers(1, 12), st.integers(1, 3))
def test_rolling_windows_predict_each_token_once(
    documents: list[list[int]], seq_len: int, micro_batch: int
) -> None:
    """In order, from as many tokens of its document as fit, the first one from the separator."""
    spelled = np.append(0, np.full(255, 2))
    source = TextSource([np.array([*text, 0]) for text in documents], 0, spelled)
    rolling, predicted = RollingWindows(source, seq_len), list[int]()
    assert len(rolling) == sum(-(-len(text) // seq_len) for text in documents)
    for batch in rolling.batches(micro_batch, len(rolling)):
        assert batch.num_sequences <= micro_batch
        assert batch.num_bytes == 2 * batch.num_targets
        ends = batch.cu_seqlens[1:-1].tolist()
        pairs = (x.tensor_split(ends) for x in (batch.tokens, batch.targets))
        for tokens, targets in zip(*pairs, strict=True):
            new = int((targets != IGNORED_TARGET).sum())
            assert (targets[:-new] == IGNORED_TARGET).all()
            assert torch.equal(targets[-new:-1], tokens[1:][len(tokens) - new :])
            assert len(tokens) == seq_len or tokens[0] == 0 == (tokens[1:] == 0).sum()
            assert new <= len(tokens) <= seq_len
            predicted += targets[-new:].tolist()
    assert predicted == [token for text in documents for token in text]
