"""Generation: sampling, streaming, batches, the end of a text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from nsa.lm.model import LanguageModel
from nsa.train.data import ByteTokenizer
from nsa.train.generation import Sampling, generate
from tests.train.cases import MODEL

TOKENIZER = ByteTokenizer()
PROMPTS = ["a", "some longer prompt than the others, over a few blocks", "\u00e9t\u00e9"]
ATTENTION = pytest.mark.parametrize("attention", ["nsa", "dense"])


def complete(*args: Any, **options: Any) -> list[bytes]:
    """The pieces of each text joined."""
    return [b"".join(pieces) for pieces in zip(*generate(*args, **options), strict=True)]


def make_model(attention: str = "nsa", scale: float = 20.0) -> LanguageModel:
    """An untrained model with a head so large that it has opinions; in fp64, so that rounding
    decides nothing.
    """
    torch.manual_seed(1)
    config = dataclasses.replace(MODEL, attention=attention)  # type: ignore[arg-type]
    model = LanguageModel(config).double()
    with torch.no_grad():
        model.head.weight.mul_(scale)
        model.head.weight[TOKENIZER.separator_id] = 0
    return model


def test_a_prompt_without_tokens_or_none_at_all_is_refused() -> None:
    message = "generate: prompts must hold at least one token each, got ''"
    with pytest.raises(ValueError, match=message):
        generate(make_model(), TOKENIZER, ["x", ""], max_new_tokens=1)
    with pytest.raises(ValueError, match="generate: prompts must hold at least one prompt, got 0"):
        generate(make_model(), TOKENIZER, [], max_new_tokens=1)


def without_cache(model: LanguageModel, prompt: str, count: int) -> bytes:
    tokens = TOKENIZER.encode(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
    return bytes(tokens[start:])


@ATTENTION
def test_greedy_is_the_likeliest_token_each_time(attention: str) -> None:
    model = make_model(attention)
    found = complete(model, TOKENIZER, PROMPTS, max_new_tokens=40, temperature=0)
    assert found == [without_cache(model, prompt, 40) for prompt in PROMPTS]
    assert complete(model, TOKENIZER, PROMPTS, max_new_tokens=40, temperature=1.0, top_k=1) == found
    nucleus = {"temperature": 1.0, "top_p": 1e-9}
    assert complete(model, TOKENIZER, PROMPTS, max_new_tokens=40, **nucleus) == found


@ATTENTION
def test_batch_equals_its_prompts(attention: str) -> None:
    model = make_model(attention)
    together = complete(model, TOKENIZER, PROMPTS, max_new_tokens=30, seed=5)
    for index, prompt in enumerate(PROMPTS):
        alone = complete(model, TOKENIZER, [prompt], max_new_tokens=30, seed=5 + index)
        assert alone == [together[index]]


def test_seed_decides() -> None:
    model = make_model(scale=5.0)
    options = ({"max_new_tokens": 30, "seed": seed} for seed in (3, 3, 4))
    first, again, other = (complete(model, TOKENIZER, ["to be"], **each) for each in options)
    assert first == again != other
    twice = complete(model, TOKENIZER, ["to be", "to be"], max_new_tokens=30, seed=3)
    assert twice == [first[0], other[0]]


def test_separator_ends_one_text_and_not_the_others() -> None:
    model = make_model()
    # The head now answers the hidden state after some steps of the first prompt's text with the
    # separator.
    steps = 7
    text = TOKENIZER.encode(PROMPTS[0]) + list(without_cache(model, PROMPTS[0], steps))
    with torch.no_grad():
        hidden = model.hidden_states(torch.tensor(text))[-1]
        model.head.weight[TOKENIZER.separator_id] = 100 * hidden / hidden.norm()
        model.head.bias = torch.nn.Parameter(torch.zeros(256, dtype=torch.float64))
        largest = (model.head.weight @ hidden)[1:].max()
        model.head.bias[TOKENIZER.separator_id] = 1 - 100 * hidden.norm() + largest
    pieces = list(generate(model, TOKENIZER, PROMPTS[:2], max_new_tokens=20, temperature=0))
    first = [piece[0] for piece in pieces]
    assert b"".join(first) == without_cache(model, PROMPTS[0], steps)
    assert first[steps:] == [b""] * (len(pieces) - steps)
    assert len(b"".join(piece[1] for piece in pieces)) > steps
    alone = list(generate(model, TOKENIZER, PROMPTS[:1], max_new_tokens=20, temperature=0))
    assert len(alone) == steps  # ends early when nothing is left to continue


def test_gradients_and_mode_of_the_caller_stay() -> None:
    model = make_model().train()
    stream = generate(model, TOKENIZER, ["x"], max_new_tokens=3)
    next(stream)
    assert torch.is_grad_enabled()
    assert model.training


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.05, 0.2, 0.25]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
        (Sampling(top_k=2), [2 / 3, 0, 0, 1 / 3]),
        (Sampling(top_k=99), [0.5, 0.05, 0.2, 0.25]),
        (Sampling(top_p=0.74), [2 / 3, 0, 0, 1 / 3]),
        (Sampling(top_p=0.76), [0.5 / 0.95, 0, 0.2 / 0.95, 0.25 / 0.95]),
        (Sampling(top_p=0.01), [1, 0, 0, 0]),
        (Sampling(temperature=0.5), [0.25 / 0.355, 0.0025 / 0.355, 0.04 / 0.355, 0.0625 / 0.355]),
        (Sampling(top_k=3, top_p=0.5), [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(
    sampling: Sampling, expected: list[float]
) -> None:
    logits = torch.tensor([0.5, 0.05, 0.2, 0.25]).log()
    generator = torch.Generator().manual_seed(0)
    count = Counter(sampling.draw(logits, generator) for _ in range(4000))
    assert [count[token] / 4000 for token in range(4)] == pytest.approx(expected, abs=0.025)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(
    settings: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=f"generate: {message}"):
        generate(make_model(), TOKENIZER, ["x"], **{"max_new_tokens": 1, **settings})
