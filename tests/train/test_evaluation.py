"""Bits per byte of validation text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa.lm.model import LanguageModel
from nsa.train.data import IGNORED_TARGET, TextSource, validation_batches
from nsa.train.data.synthetic import SyntheticSource
from nsa.train.evaluation import (
    Measurement,
    RepeatedPassages,
    RollingSequences,
    SplitSequences,
    evaluate,
    figures_of,
    in_words,
    measure,
    paired_difference,
    repeated_passages,
    student_t,
)
from nsa.train.loss import NextTokenLoss
from tests.train.cases import MODEL


def make_model(attention: str = "nsa") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(dataclasses.replace(MODEL, attention=attention))  # type: ignore[arg-type]


def source(token_bytes: int = 1, sizes: Sequence[int] = (40, 3, 90, 200, 61)) -> TextSource:
    generator = np.random.default_rng(0)
    documents = [np.append(generator.integers(1, 256, size=size), 0) for size in sizes]
    spelled = np.full(256, token_bytes, dtype=np.int64)
    spelled[0] = 0  # the separator
    return TextSource(documents, 0, spelled)


def test_uniform_model_needs_eight_bits():
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


def test_leaves_no_trace():
    """Not even when it fails."""
    model, modes = make_model().train(), []
    model.norm.register_forward_hook(lambda module, *_: modes.append(module.training))

    def failing():
        yield from validation_batches(source(), 64, 2, 4, document_mask=True)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        evaluate(NextTokenLoss(model), failing())
    assert modes == [False, False]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# --- by document and by position ------------------------------------------------------------------
@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_sums_are_those_of_each_target_by_itself(attention, document_mask):
    """Sequence by sequence without packing; at another length than any in training, too."""
    model, text, seq_len = make_model(attention).double(), source(2), 96
    tokens = text.tokens.astype(np.int64)
    document = np.cumsum(np.append(0, tokens[:-1] == 0))  # of each token, with its separator
    documents, late, positions = np.zeros((5, 3)), np.zeros((5, 3)), np.zeros((seq_len, 3))
    for begin in range(0, (len(tokens) - 1) // seq_len * seq_len, seq_len):
        sequence = np.arange(begin, begin + seq_len)
        starts = np.flatnonzero(tokens[sequence[:-1]] == 0) + 1
        for part in np.split(sequence, starts if document_mask else starts[:0]):
            with torch.no_grad():
                hidden = model.hidden_states(torch.from_numpy(tokens[part]))
                logs = (hidden @ model.head.weight.T).log_softmax(-1).numpy()
            for position, index in enumerate(part):
                target = tokens[index + 1]
                if not (document_mask and tokens[index] == 0):
                    row = (-logs[position, target], 1, 2 * (target != 0))
                    documents[document[index + 1]] += row
                    late[document[index + 1]] += np.multiply(row, position >= 31)
                    positions[position] += row
    loss = NextTokenLoss(model, 10)
    sequences = SplitSequences(text, seq_len, document_mask=document_mask)
    found = measure(loss, sequences, 3, 100)
    np.testing.assert_allclose(found.documents, documents, rtol=1e-10)
    np.testing.assert_allclose(found.positions, positions, rtol=1e-10)
    np.testing.assert_allclose(found.beyond(32).documents, late, rtol=1e-10)
    np.testing.assert_allclose(found.beyond(32).positions[31:], positions[31:], rtol=1e-10)
    assert not found.beyond(32).positions[:31].any()
    batches = validation_batches(text, seq_len, 2, 100, document_mask=document_mask)
    assert found.figures() == pytest.approx(evaluate(loss, batches), rel=1e-10)


def test_sequences_of_a_task_count_as_documents():
    text = SplitSequences(SyntheticSource("copy", "validation", 1), 16, document_mask=True)
    result = measure(NextTokenLoss(make_model()), text, 2, 3)
    assert result.documents[:, 1].nonzero()[0].tolist() == [0, len(text) // 3, 8192 // 3]
    assert result.figures()["num_targets"] == 3 * 8


def test_bins_contain_each_position_once():
    """1, 2 to 3, 4 to 7 and so on, in tokens of context; bins without targets are left out."""
    counts, context = np.array([2, 0, 3, 0, 0, 0, 0, 1, 4]), np.arange(1, 10)
    sums = np.column_stack((counts * context / 2, counts, 2 * counts))
    assert Measurement(sums[:1], sums).by_position() == [
        {"first": first, "last": last, **figures_of(nats, number, 2 * number)}
        for first, last, nats, number in ((1, 1, 1.0, 2), (2, 3, 4.5, 3), (8, 9, 22.0, 5))
    ]


# --- paired ---------------------------------------------------------------------------------------
def of_documents(bits: np.ndarray, num_bytes: np.ndarray) -> Measurement:
    sums = np.column_stack((bits * math.log(2), num_bytes, num_bytes))
    return Measurement(sums, np.zeros((1, 3)))


def test_interval_is_that_of_paired_differences():
    """Documents differ far more than models: 1.96 standard errors of the mean difference."""
    rng, number = np.random.default_rng(0), 400
    sizes = np.full(number, 100.0)
    bits = rng.uniform(50, 500, number)
    difference = rng.normal(1.0, 3.0, number)
    found = paired_difference([of_documents(bits + difference, sizes)], [of_documents(bits, sizes)])
    mean, error = difference.mean() / 100, difference.std() / 100 / number**0.5
    assert found["difference_bits_per_byte"] == pytest.approx(mean, rel=1e-12)
    assert found["difference_low"] == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert found["difference_high"] == pytest.approx(mean + 1.96 * error, abs=0.1 * error)
    assert found["num_documents"] == number


def test_documents_weigh_by_their_bytes():
    """A model that is worse by the same in every byte is so in every draw."""
    sizes = np.array([1.0, 10, 100, 1000, 0])  # nothing of the last one was measured
    bits = 3 * sizes
    found = paired_difference([of_documents(bits + sizes / 4, sizes)], [of_documents(bits, sizes)])
    names = ("difference_bits_per_byte", "difference_low", "difference_high")
    assert [found[name] for name in names] == pytest.approx([0.25] * 3, rel=1e-12)
    assert found["num_documents"] == 4


def test_seeds_have_an_interval_of_their_own():
    """Student's t over the pairs, whose documents all have the same difference."""
    sizes = np.full(50, 10.0)
    second = [of_documents(np.full(50, 20.0), sizes)] * 3
    first = [of_documents(np.full(50, 20.0 + more), sizes) for more in (0.1, 0.2, 0.6)]
    found = paired_difference(first, second)
    assert found["differences"] == pytest.approx([0.01, 0.02, 0.06])
    intervals = [found[f"difference_{name}"] for name in ("low", "bits_per_byte", "high")]
    assert intervals == pytest.approx([0.03] * 3)
    for name in ("seeds", "both"):  # documents add nothing
        known = found[f"{name}_low"], found[f"{name}_high"]
        assert known == pytest.approx((-0.03572, 0.09572), abs=1e-4)
    assert in_words(found) == (
        "difference: +0.0300 bits per byte, 95% interval +0.0300 to +0.0300 over 50 documents, "
        "-0.0357 to +0.0957 over 3 seeds, -0.0357 to +0.0957 over both"
    )


def test_equal_seeds_leave_the_documents():
    sizes = np.full(40, 10.0)
    first = [of_documents(np.random.default_rng(0).normal(0, 1, 40), sizes)] * 3
    found = paired_difference(first, [of_documents(np.zeros(40), sizes)] * 3)
    assert found["seeds_low"] == pytest.approx(found["seeds_high"])
    widths = [found[f"{name}_high"] - found[f"{name}_low"] for name in ("both", "difference")]
    assert 1 < widths[0] / widths[1] < 1.1


@pytest.mark.parametrize("freedom", [1, 1.5, 9, 9.5, 40])
def test_student_t(freedom):
    """The distribution beyond the quantile, integrated over reciprocals."""
    factor = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    u = np.linspace(1e-9, 1 / student_t(freedom), 100_001)
    density = factor * (1 + 1 / (u * u * freedom)) ** (-(freedom + 1) / 2) / (u * u)
    assert 0.0235 < np.trapezoid(density, u) < 0.0255


def test_what_cannot_be_compared():
    two, other = of_documents(np.ones(2), np.ones(2)), of_documents(np.ones(2), np.arange(2.0))
    with pytest.raises(ValueError, match="second must have the targets of the first in each doc"):
        paired_difference([two], [other])
    loss, rule = NextTokenLoss(make_model()), "must contain targets that spell at least one byte of"
    empty = SplitSequences(source(), 10**6, document_mask=True)
    with pytest.raises(ValueError, match=f"text {rule}"):
        measure(loss, empty, 1, 1)
    with pytest.raises(ValueError, match=f"batches {rule} text, got 0 targets of 0 bytes"):
        evaluate(loss, [])
    one, other = (of_documents(np.array([x, 0.0]), np.array([10.0, 0])) for x in (12.0, 10.0))
    found = paired_difference([one], [other])
    assert (found["difference_low"], found["difference_high"]) == (None, None)
    assert in_words(found) == "difference: +0.2000 bits per byte, no interval: one document"


DOCUMENTS = st.lists(st.lists(st.integers(1, 255), max_size=30), min_size=1, max_size=4)


@given(DOCUMENTS, st.integers(1, 12), st.integers(1, 3))
def test_rolling_sequences_predict_each_token_once(documents, seq_len, micro_batch):
    """In order, from as many tokens of its document as fit, the first one from the separator."""
    spelled = np.append(0, np.full(255, 2))
    source = TextSource([np.array([*text, 0]) for text in documents], 0, spelled)
    rolling, predicted, whole = RollingSequences(source, seq_len), list[int](), list[int]()
    assert len(rolling) == sum(-(-len(text) // seq_len) for text in documents)
    for batch, document in rolling.batches(micro_batch, len(rolling)):
        counted = batch.targets != IGNORED_TARGET
        whole += document[counted.numpy()].tolist()
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
    assert whole == [number for number, text in enumerate(documents) for _ in text]
    assert rolling.num_documents == len(documents)


# --- passages to repeat ---------------------------------------------------------------------------
@given(st.integers(4, 40), st.data())
def test_the_end_of_a_sequence_repeats_earlier_tokens(seq_len, data):
    """Sequences are those of the text without the end of a document."""
    sizes = data.draw(st.lists(st.integers(2, 150), min_size=1, max_size=4))
    length = data.draw(st.integers(2, seq_len // 2))
    distance = data.draw(st.integers(length, seq_len - length))
    text, half = source(sizes=[size - 1 for size in sizes]), length // 2
    whole = [text.sequence(seq_len, index) for index in range(text.num_sequences(seq_len))]
    whole = [sequence for sequence in whole if 0 not in sequence]
    found = RepeatedPassages(text, seq_len, length, distance)
    assert found.num_sequences(seq_len) == len(whole)
    for index, before in enumerate(whole):
        sequence, counted = found.sequence(seq_len, index), found.target_mask(seq_len, index)
        assert sequence[:-length].tolist() == before[:-length].tolist()
        passage = before[seq_len + 1 - length - distance :][:length]
        assert sequence[-length:].tolist() == passage.tolist()
        assert counted.sum() == 2 * half
        # The second half of the passage is counted twice: at its end, and where it first occurs.
        targets = sequence[1:][counted].tolist()
        assert targets == [*passage[length - half :]] * 2
        assert found.sequence(seq_len, index).tolist() == sequence.tolist(), (
            "reading changes nothing"
        )


def test_figures_of_the_repetition_and_the_first_occurrence():
    """Of hand-made sums: each of 2 targets in row p costs p + 1 nats, and one spells nothing."""
    passages = repeated_passages(source(sizes=[99]), 32, 8)[1]
    rows = np.array([[2 * (p + 1), 2, 1] for p in range(32)], dtype=np.float64)
    again, first = (29 + 30 + 31 + 32) / 4, (13 + 14 + 15 + 16) / 4
    assert passages.figures(Measurement(np.zeros((1, 3)), rows)) == {
        "distance": 16,
        "loss_nats": again,
        "bits_per_byte": pytest.approx(2 * again / math.log(2)),
        "num_targets": 8,
        "num_bytes": 4,
        "first_loss_nats": first,
        "first_bits_per_byte": pytest.approx(2 * first / math.log(2)),
    }


def test_distances_double_up_to_the_whole_sequence():
    def distances(seq_len, length):
        measured = Measurement(np.zeros((1, 3)), np.ones((seq_len, 3)))
        found = repeated_passages(source(sizes=[999]), seq_len, length)
        return [int(one.figures(measured)["distance"]) for one in found]

    assert distances(256, 16) == [16, 32, 64, 128, 240]
    assert distances(48, 16) == [16, 32]
    assert distances(32, 16) == [16]
    batch, _ = next(repeated_passages(source(sizes=[999]), 32, 8)[0].sequences(32).batches(2, 9))
    assert batch.num_targets == 2 * 2 * 4


@pytest.mark.parametrize(
    ("text", "length", "rule"),
    [
        (source(sizes=[99]), 1, "--repeat must be from 2 to 16, half of a sequence, got 1"),
        (source(sizes=[99]), 17, "--repeat must be from 2 to 16"),
        (SyntheticSource("copy", "validation", 0), 8, "be left out for a synthetic task"),
        (source(sizes=[19] * 9), 8, "no document of the text has a whole sequence of 32 tokens"),
    ],
)
def test_what_cannot_be_repeated_is_refused(text, length, rule):
    with pytest.raises(ValueError, match=rule):
        repeated_passages(text, 32, length)
