"""Generation: sampling, streaming, batches, the end of a text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nsa.lm.model import LanguageModel
from nsa.train.data import ByteTokenizer
from nsa.train.generation import Speed, generate
from nsa.train.sampling import Sampling
from tests.train.cases import MODEL

TOKENIZER = ByteTokenizer()
PROMPTS = ["a", "some longer prompt than the others, over a few blocks", "\u00e9t\u00e9"]
GREEDY = Sampling(temperature=0)
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
    message = "prompts must hold at least one token each, got ''"
    with pytest.raises(ValueError, match=message):
        generate(make_model(), TOKENIZER, ["x", ""], max_new_tokens=1)
    with pytest.raises(ValueError, match="prompts must hold at least one prompt, got 0"):
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
    found = complete(model, TOKENIZER, PROMPTS, max_new_tokens=40, sampling=GREEDY)
    assert found == [without_cache(model, prompt, 40) for prompt in PROMPTS]
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(min_p=1.0)):
        again = complete(model, TOKENIZER, PROMPTS, max_new_tokens=40, sampling=sampling)
        assert again == found


@ATTENTION
def test_batch_equals_its_prompts(attention: str) -> None:
    model = make_model(attention)
    together = complete(model, TOKENIZER, PROMPTS, max_new_tokens=30, seed=5)
    for index, prompt in enumerate(PROMPTS):
        alone = complete(model, TOKENIZER, [prompt], max_new_tokens=30, seed=5 + index)
        assert alone == [together[index]]


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
    pieces = list(generate(model, TOKENIZER, PROMPTS[:2], max_new_tokens=20, sampling=GREEDY))
    first = [piece[0] for piece in pieces]
    assert b"".join(first) == without_cache(model, PROMPTS[0], steps)
    assert first[steps:] == [b""] * (len(pieces) - steps)
    assert len(b"".join(piece[1] for piece in pieces)) > steps
    alone = list(generate(model, TOKENIZER, PROMPTS[:1], max_new_tokens=20, sampling=GREEDY))
    assert len(alone) == steps  # ends early when nothing is left to continue


# --- stop strings ---------------------------------------------------------------------------------


def make_speller() -> LanguageModel:
    """An untrained model that draws nothing but letters."""
    model = make_model(scale=5.0)
    is_letter = torch.tensor(
        [chr(value).isascii() and chr(value).isalpha() for value in range(256)]
    )
    model.head.bias = torch.nn.Parameter(torch.where(is_letter, 0.0, -1e4).double())
    return model


@pytest.mark.parametrize("count", [1, 3])
def test_a_stop_string_ends_a_text_before_it_and_not_the_others(count: int) -> None:
    """Bytes are tokens here, so the string comes with several of them."""
    model, prompts = make_speller(), PROMPTS[:2]
    first, second = complete(model, TOKENIZER, prompts, max_new_tokens=20)
    start = next(i for i in range(5, 15) if first.find(first[i : i + count]) == i)
    stop = first[start : start + count]
    generation = generate(model, TOKENIZER, prompts, max_new_tokens=20, stop=[stop.decode()])
    pieces = list(generation)
    assert b"".join(piece[0] for piece in pieces) == first[:start]
    end = second.find(stop)
    assert b"".join(piece[1] for piece in pieces) == (second if end < 0 else second[:end])
    assert bytes(generation.tokens[0]) == prompts[0].encode() + first[: start + count]
    assert all(piece[0] == b"" for piece in pieces[start + count - 1 :])


def test_what_may_have_become_a_stop_string_comes_with_the_end() -> None:
    model, prompts = make_speller(), PROMPTS[:1]
    (text,) = complete(model, TOKENIZER, prompts, max_new_tokens=20)
    start = next(i for i in range(10, 19) if text.find(text[i : i + 1]) == i)
    stop = text[start:].decode() + " and more"
    steps = generate(model, TOKENIZER, prompts, max_new_tokens=20, stop=[stop])
    pieces = [piece for (piece,) in steps]
    assert b"".join(pieces) == text
    assert pieces[start:] == [b""] * (19 - start) + [text[start:]]


# --- what a generation says -----------------------------------------------------------------------


def test_penalty_counts_prompt_and_continuation() -> None:
    """One so large that no token comes twice while others are left."""
    model = make_model()
    sampling = Sampling(temperature=0, repetition_penalty=1e9)
    (text,) = complete(model, TOKENIZER, ["abc"], max_new_tokens=60, sampling=sampling)
    assert len(set(text)) == len(text) == 60
    assert not set(text) & set(b"abc")


def test_tokens_and_speed_are_those_of_the_run() -> None:
    generation = generate(
        make_model(), TOKENIZER, ["ab", "cdef"], max_new_tokens=5, sampling=GREEDY
    )
    assert generation.tokens == [[*b"ab"], [*b"cdef"]]
    pieces = list(generation)
    for index, prompt in enumerate((b"ab", b"cdef")):
        text = b"".join(piece[index] for piece in pieces)
        assert bytes(generation.tokens[index]) == prompt + text
    speed = generation.speed
    assert (speed.prefill_tokens, speed.decode_tokens) == (6, 2 * 4)
    assert min(speed.prefill_s, speed.decode_s) > 0
    assert Speed(3, 2.0, 10, 4.0) + Speed(1, 2.0, 0, 1.0) == Speed(4, 4.0, 10, 5.0)
    prefill = "prefill 1,000 tokens in 0.500 s, 2,000.0 tokens/s"
    assert Speed(1000, 0.5).line() == prefill
    decode = "decode 3 tokens in 2.000 s, 1.5 tokens/s"
    assert Speed(1000, 0.5, 3, 2.0).line() == f"{prefill}; {decode}"


def test_a_diverged_model_says_so() -> None:
    model = make_model()
    with torch.no_grad():
        model.norm.weight[3] = torch.nan
    stream = generate(model, TOKENIZER, ["x"], max_new_tokens=3)
    with pytest.raises(ValueError, match="the model must give finite logits, got NaN or inf"):
        next(stream)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"stop": ["a", ""]}, "stop must hold no empty string"),
        ({"seed": -1}, f"seed must be from 0 to {2**63 - 1}, got -1"),
        ({"stop": ["\udcff"]}, "stop must be valid UTF-8"),
        ({"max_new_tokens": 10**12}, "max_new_tokens must be at most 1,073,741,823 behind"),
        ({"max_new_tokens": 2**30 - 1}, "max_new_tokens must be so few that their cache fits"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(
    settings: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsa.train.generation.free_memory", lambda device: 2**30)
    with pytest.raises(ValueError, match=message):
        generate(make_model(), TOKENIZER, ["x"], **{"max_new_tokens": 1, **settings})
