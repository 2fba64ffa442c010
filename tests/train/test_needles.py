"""Needles in a haystack: contexts, answers through the decode cache, and intervals."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nsa.lm.model import LanguageModel
from nsa.train.config import DataConfig, RecallConfig
from nsa.train.data import ByteTokenizer, TextSource, Tokenizer, make_tokenizer
from nsa.train.data.recall import RecallSource
from nsa.train.data.synthetic import SyntheticSource
from nsa.train.needles import (
    Case,
    NeedleConfig,
    Needles,
    find_needles,
    find_values,
    row_of,
    wilson,
)
from tests.train.cases import MODEL

QUESTION = rb"\nOne of the special magic words for (\w+) is:"
NEEDLE = QUESTION + rb"( [a-z]+)\.\n"
TEXT = [b"It is a truth universally acknowledged. " * 20, b"Call me Ishmael. " * 30, b"Once. "]


def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte":
        return ByteTokenizer()
    syllables = " ".join(map("".join, itertools.product("bdfgklm", "aeiou"))).encode()
    return make_tokenizer(DataConfig(tokenizer="bpe", bpe_vocab_size=300), [*TEXT, syllables * 99])


def make_needles(
    tokenizer: Tokenizer | None = None,
    num_tokens: int = 1536,
    texts: list[bytes] = TEXT,
    **settings: Any,
) -> Needles:
    tokenizer = tokenizer or ByteTokenizer()
    documents = tokenizer.encode_documents(texts)
    source = TextSource(documents, tokenizer.separator_id, tokenizer.token_bytes)
    return Needles(NeedleConfig(**settings), tokenizer, source, 512, num_tokens)


# --- contexts -------------------------------------------------------------------------------------
@pytest.mark.parametrize("distractors", [0, 3])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_needles_are_at_their_depths(kind, distractors):
    """The rest is a passage of the text, which is repeated if it is too short."""
    tokenizer = tokenizer_of(kind)
    needles = make_needles(tokenizer, depths=5, cases=2, distractors=distractors)
    for length, place in itertools.product((512, 4096), range(5)):
        case = needles.case(length, place, 1)
        assert len(case.prompt) + len(case.value) == length
        text, value = map(tokenizer.decode, (case.prompt, case.value))
        body, key, end = re.split(QUESTION + b"$", text)
        assert end == b""
        assert re.fullmatch(b" [a-z]{6}", value)
        hidden = dict(re.findall(NEEDLE, body))
        assert len(hidden) == distractors + 1
        assert hidden[key] == value
        passage, before = (
            re.sub(NEEDLE, b"", part)
            for part in (body, body[: body.index(b"for " + key)].rpartition(b"\n")[0])
        )
        slack = 0.5 if kind == "byte" else 0.1 * len(passage)  # tokens spell unequal numbers
        assert len(before) == pytest.approx(place / 4 * len(passage), abs=slack)
        assert kind == "bpe" or passage in b"".join(TEXT) * 6


@pytest.mark.parametrize("distractors", [0, 2])
def test_passages_are_at_their_depths(distractors):
    """The text repeats nothing else."""
    letters = random.Random(0).choices(range(97, 123), k=400_000)
    needles = make_needles(
        texts=[bytes(letters)], depths=5, cases=4, passage=48, distractors=distractors
    )
    for place in range(5):
        case = needles.case(512, place, 1)
        passage = [*case.prompt[-40:], *case.value]
        body, words = bytes(case.prompt[:-40]), bytes(passage)
        assert (len(passage), len(case.prompt) + len(case.value)) == (48, 512)
        assert (body.count(words), bytes(letters).count(words)) == (1, 1)
        if not distractors:
            assert body.index(words) == round(place / 4 * len(body) - place / 4 * 48)
    with pytest.raises(ValueError, match="--passage must be at least 16 tokens, got 15"):
        NeedleConfig(passage=15)


def test_contexts_follow_from_the_seed():
    first = make_needles(cases=3).case(512, 4, 2)
    assert make_needles(cases=50).case(512, 4, 2) == first
    others = [make_needles(seed=1).case(512, 4, 2), make_needles().case(512, 4, 1)]
    assert first.value not in [case.value for case in others]


def test_what_has_no_room_or_text_is_refused():
    for settings, rule in (
        ({"lengths": (200, 107)}, "--lengths must be at least 108 tokens, .* got 107"),
        ({"distractors": 9}, "--lengths must be at least 603 tokens, .* got 512"),
        ({"distractors": -1}, "--distractors must be at least 0, got -1"),
        ({"cases": 0}, "--cases must be positive, got 0"),
        ({"depths": -3}, "--depths must be positive, got -3"),
    ):
        with pytest.raises(ValueError, match=rule):
            make_needles(**settings)
    shortest = make_needles(lengths=(108,)).case(108, 0, 0)
    assert bytes(shortest.prompt).count(b"\n") == 3
    with pytest.raises(ValueError, match="--needle must be left out for a synthetic task"):
        Needles(NeedleConfig(), ByteTokenizer(), SyntheticSource("copy", "validation", 0), 512, 1)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_needles_in_the_style_of_recall(kind):
    """The same line once, at its depth, and again up to its value."""
    tokenizer = tokenizer_of(kind)
    needles = make_needles(tokenizer, depths=3, style="recall", distractors=1)
    questions = set()
    for place, number in np.ndindex(3, 8):
        case = needles.case(512, place, number)
        assert len(case.prompt) + len(case.value) == 512
        text, value = map(tokenizer.decode, (case.prompt, case.value))
        body, newline, question = text.rpartition(b"\n")
        assert body.count(newline + question + value + b".\n") == 1
        assert re.fullmatch(rb" (\d|[a-z]){5,7}", value)
        before = body.index(newline + question) / (len(body) - 2 * len(question + value))
        assert before == pytest.approx(place / 2, abs=0.1)
        questions.add(re.sub(rb"[a-z]{5,7}(?= is|:)", b"KEY", question))
    assert questions == {b"The number of KEY is", b"The word for KEY is", b"KEY:"}
    with pytest.raises(ValueError, match="--passage must be left out with --style recall, got 16"):
        make_needles(style="recall", passage=16)


class NearCopier(nn.Module):
    """Continues a line as where it occurred in the latest ``reach`` bytes."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.embedding, self.head, self.reach = nn.Embedding(1, 1), nn.Identity(), reach

    def hidden_states(self, tokens: Tensor) -> Tensor:
        (text,) = map(bytes, tokens.tolist())
        logits = torch.zeros(1, len(text), 256)
        for end in range(len(text)):
            line = text[text.rfind(b"\n", 0, end + 1) : end + 1]
            at = text.rfind(line, max(end + 1 - self.reach - len(line), 0), end)
            logits[0, end, text[at + len(line)] if at >= 0 else 0] = 50.0
        return logits


def test_repeated_lines_are_found_as_far_as_a_model_reaches():
    tokenizer = ByteTokenizer()
    text = TextSource([np.frombuffer(b"".join(TEXT) * 4, np.uint8)], 0, tokenizer.token_bytes)
    source = RecallSource(text, tokenizer, RecallConfig(), 0, held_out=True)
    model: Any = NearCopier(reach=511)
    *rows, total = find_values(model, source, 2048, [0, 1], "fp32")
    queries = [query for index in (0, 1) for query in source.queries(2048, index)]
    assert [row["exact_match"] for row in rows] == [float(row["last"] <= 511) for row in rows]
    assert {(row["first"], row["last"]) for row in rows} >= {
        (2**n, 2 ** (n + 1) - 1) for n in (6, 10)
    }
    for row in rows:
        near = [q for q in queries if row["first"] <= q.distance <= row["last"]]
        assert row["cases"] == len(near)
        assert (row["exact_low"], row["exact_high"]) == wilson(
            row["exact_match"] * len(near), len(near)
        )
        assert (row["log_prob_nats"] > -1e-9) == (row["exact_match"] == 1)
    found = sum(query.distance <= 511 for query in queries)
    assert (total["cases"], total["exact_match"]) == (len(queries), found / len(queries))
    numbers = [len(source.queries(128, index)) for index in range(20)]
    assert min(numbers) == 0 < max(numbers)
    assert find_values(model, source, 128, range(20), "fp32")[-1]["cases"] == sum(numbers)
    with pytest.raises(ValueError, match="--recall must be given for sequences with a repeated"):
        find_values(model, source, 2048, [], "fp32")


# --- answers --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("attention", "kind"), [("nsa", "byte"), ("nsa", "bpe"), ("dense", "bpe")])
def test_answers_are_those_of_the_model_without_a_cache(attention, kind, monkeypatch):
    """Of one context at a time, in pieces, and of several; half of the values are the model's."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of(kind)
    config = dataclasses.replace(MODEL, attention=attention, vocab_size=tokenizer.vocab_size)
    model = LanguageModel(config).double().eval()
    needles, wanted = make_needles(tokenizer, depths=2, cases=2), np.zeros((2, 2, 2))
    cases = dict[tuple[int, int], Case]()
    with torch.no_grad():
        for place, number in np.ndindex(2, 2):
            case, drawn = needles.case(150, place, number), list[int]()
            while len(drawn) < 7:
                drawn.append(int(model(torch.tensor(case.prompt + drawn))[-1].argmax()))
            if (place + number) % 2:
                case = Case(case.prompt, drawn[: len(case.value)])
            logs = model(torch.tensor(case.prompt + case.value)).log_softmax(-1)
            at = len(case.prompt) - 1 + np.arange(len(case.value))
            is_found = tokenizer.decode(drawn).startswith(tokenizer.decode(case.value))
            wanted[place, number] = is_found, logs[at, case.value].sum()
            cases[place, number] = case
    assert wanted[..., 0].sum() == 2
    assert (len({len(case.value) for case in cases.values()}) > 1) == (kind == "bpe")
    monkeypatch.setattr(needles, "case", lambda _, *index: cases[index])
    for num_tokens in (40, 450):  # 450: three contexts, and then one
        needles.num_tokens = num_tokens
        found = find_needles(model, needles, 150, "fp32")
        np.testing.assert_array_equal(found[..., 0], wanted[..., 0])
        np.testing.assert_allclose(found[..., 1], wanted[..., 1], rtol=1e-9)


# --- intervals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("hits", "number"), [(0, 10), (1, 3), (50, 100), (1100, 1100)])
def test_ends_of_the_interval_are_shares_that_are_just_rejected(hits, number):
    """The score test that Wilson's interval inverts."""
    z = NormalDist().inv_cdf(0.975)
    for end in wilson(hits, number):
        square = z * z * end * (1 - end) / number
        assert (hits / number - end) ** 2 == pytest.approx(square, abs=1e-12)
    assert wilson(0, 10) == pytest.approx((0, 0.277533), abs=1e-6)


def test_figures_of_a_row():
    answers = np.array([[[1, -1.0], [0, -3.0]], [[0, -5.0], [0, -7.0]]])
    low, high = wilson(1, 4)
    assert row_of(answers, length=9) == {
        "length": 9,
        "cases": 4,
        "exact_match": 0.25,
        "exact_low": low,
        "exact_high": high,
        "log_prob_nats": -4.0,
    }
