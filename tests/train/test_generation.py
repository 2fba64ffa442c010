"""Generation: sampling, streaming, batches, the end of a text."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.lm.model import LanguageModel
from nsa.train.data import ByteTokenizer
from nsa.train.generation import Generation, Sampling, Speed, StopStrings, uniform_numbers
from tests.train.cases import MODEL

TOKENIZER = ByteTokenizer()
PROMPTS = ["a", "some longer prompt than the others, over a few blocks", "\u00e9t\u00e9"]
GREEDY = Sampling(temperature=0)
ATTENTION = pytest.mark.parametrize("attention", ["nsa", "dense"])


def complete(*args: Any, **options: Any) -> list[bytes]:
    """The pieces of each text joined."""
    return [b"".join(pieces) for pieces in zip(*Generation(*args, **options), strict=True)]


def make_model(attention: str = "nsa", scale: float = 20.0) -> LanguageModel:
    """An untrained model with a large head, in fp64, so that rounding decides nothing."""
    torch.manual_seed(1)
    config = dataclasses.replace(MODEL, attention=attention)  # type: ignore[arg-type]
    model = LanguageModel(config).double()
    with torch.no_grad():
        model.head.weight.mul_(scale)
        model.head.weight[TOKENIZER.separator_id] = 0
    return model


def without_cache(model: LanguageModel, prompt: str, count: int) -> bytes:
    tokens = TOKENIZER.encode(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
    return bytes(tokens[start:])


@ATTENTION
def test_greedy_is_the_likeliest_token_each_time(attention):
    model = make_model(attention)
    found = complete(model, TOKENIZER, PROMPTS, max_new_tokens=20, sampling=GREEDY)
    assert found == [without_cache(model, prompt, 20) for prompt in PROMPTS]
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(min_p=1.0)):
        again = complete(model, TOKENIZER, PROMPTS, max_new_tokens=20, sampling=sampling)
        assert again == found


SAMPLINGS = (Sampling(), Sampling(0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2))


@pytest.mark.parametrize(
    ("attention", "sampling"), [("nsa", SAMPLINGS[1]), ("dense", SAMPLINGS[0])]
)
def test_batch_equals_its_prompts(attention, sampling):
    model, options = make_model(attention), {"max_new_tokens": 16, "sampling": sampling}
    together = complete(model, TOKENIZER, PROMPTS, seed=5, **options)
    for index, prompt in enumerate(PROMPTS):
        alone = complete(model, TOKENIZER, [prompt], seed=5 + index, **options)
        assert alone == [together[index]]


# --- ends of a text -------------------------------------------------------------------------------


def make_speller() -> LanguageModel:
    """An untrained model that draws nothing but letters."""
    model = make_model(scale=5.0)
    is_letter = torch.tensor(
        [chr(value).isascii() and chr(value).isalpha() for value in range(256)]
    )
    model.head.bias = torch.nn.Parameter(torch.where(is_letter, 0.0, -1e4).double())
    return model


def test_separator_ends_one_text_and_not_the_others():
    """Here the separator is a letter that the first text draws."""
    model, tokenizer, prompts = make_speller(), ByteTokenizer(), PROMPTS[:2]
    first, second = complete(model, tokenizer, prompts, max_new_tokens=20)
    steps = next(i for i in range(5, 15) if first.find(first[i : i + 1]) == i)
    tokenizer.separator_id = first[steps]
    pieces = list(Generation(model, tokenizer, prompts, max_new_tokens=20))
    of_first = [piece[0] for piece in pieces]
    assert b"".join(of_first) == first[:steps]
    assert of_first[steps:] == [b""] * (len(pieces) - steps)
    assert b"".join(piece[1] for piece in pieces) == second.partition(first[steps : steps + 1])[0]
    alone = list(Generation(model, tokenizer, PROMPTS[:1], max_new_tokens=20))
    assert len(alone) == steps  # ends early when nothing is left to continue


def test_a_stop_string_ends_a_text_before_it_and_not_the_others():
    """Bytes are tokens here, so the string comes with several of them."""
    model, prompts, count = make_speller(), PROMPTS[:2], 3
    first, second = complete(model, TOKENIZER, prompts, max_new_tokens=20)
    start = next(i for i in range(5, 15) if first.find(first[i : i + count]) == i)
    stop = first[start : start + count]
    generation = Generation(model, TOKENIZER, prompts, max_new_tokens=20, stop=[stop.decode()])
    pieces = list(generation)
    assert b"".join(piece[0] for piece in pieces) == first[:start]
    end = second.find(stop)
    assert b"".join(piece[1] for piece in pieces) == (second if end < 0 else second[:end])
    assert bytes(generation.tokens[0]) == prompts[0].encode() + first[: start + count]
    assert all(piece[0] == b"" for piece in pieces[start + count - 1 :])


def test_what_may_have_become_a_stop_string_comes_with_the_end():
    model, prompts = make_speller(), PROMPTS[:1]
    (text,) = complete(model, TOKENIZER, prompts, max_new_tokens=20)
    start = next(i for i in range(10, 19) if text.find(text[i : i + 1]) == i)
    stop = text[start:].decode() + " and more"
    steps = Generation(model, TOKENIZER, prompts, max_new_tokens=20, stop=[stop])
    pieces = [piece for (piece,) in steps]
    assert b"".join(pieces) == text
    assert pieces[start:] == [b""] * (19 - start) + [text[start:]]


# --- what a generation says -----------------------------------------------------------------------


def test_penalty_counts_prompt_and_continuation():
    """One so large that no token comes twice while others are left."""
    model = make_model()
    sampling = Sampling(temperature=0, repetition_penalty=1e9)
    (text,) = complete(model, TOKENIZER, ["abc"], max_new_tokens=60, sampling=sampling)
    assert len(set(text)) == len(text) == 60
    assert not set(text) & set(b"abc")


def test_tokens_and_speed_are_those_of_the_run():
    prompts = ["ab", "cdef"]
    found = Generation(make_model(), TOKENIZER, prompts, max_new_tokens=5, sampling=GREEDY)
    for tokens, prompt, pieces in zip(found.tokens, prompts, zip(*found, strict=True), strict=True):
        assert bytes(tokens) == prompt.encode() + b"".join(pieces)
    assert (found.speed.prefill_tokens, found.speed.decode_tokens) == (6, 2 * 4)
    assert min(found.speed.prefill_s, found.speed.decode_s) > 0
    speed, prefill = Speed(1000, 0.5), "prefill 1,000 tokens in 0.500 s, 2,000.0 tokens/s"
    assert speed.line() == prefill
    decode = "decode 3 tokens in 2.000 s, 1.5 tokens/s"
    assert (speed + Speed(0, 0.0, 3, 2.0)).line() == f"{prefill}; {decode}"


def test_a_diverged_model_says_so():
    model = make_model()
    with torch.no_grad():
        model.norm.weight[3] = torch.nan
    stream = Generation(model, TOKENIZER, ["x"], max_new_tokens=3)
    with pytest.raises(ValueError, match="the model must give finite logits, got NaN or inf"):
        next(stream)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": ["x", ""]}, "prompts must contain at least one token each, got ''"),
        ({"prompts": []}, "prompts must contain at least one prompt, got 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"stop": ["a", ""]}, "stop must contain no empty string"),
        ({"seed": -1}, f"seed must be from 0 to {2**63 - 1}, got -1"),
        ({"stop": ["\udcff"]}, "stop must be valid UTF-8"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(settings, message):
    with pytest.raises(ValueError, match=message):
        Generation(make_model(), TOKENIZER, **{"prompts": ["x"], "max_new_tokens": 1, **settings})


# --- sampling -------------------------------------------------------------------------------------
CPU = torch.device("cpu")
LOGITS = torch.tensor([0.5, 0.05, 0.2, 0.25]).log()


def frequencies(sampling: Sampling, logits: Tensor, seen: Tensor | None = None) -> list[float]:
    """How often each token is drawn, for numbers spread evenly from 0 to below 1."""
    count = 10_000
    uniform = torch.arange(count, dtype=torch.float64) / count
    rows = None if seen is None else seen.expand(count, -1)
    drawn = sampling.draw(logits.expand(count, -1), uniform, rows)
    return (torch.bincount(drawn, minlength=len(logits)) / count).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.05, 0.2, 0.25]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
        (Sampling(temperature=1e-300), [1, 0, 0, 0]),
        (Sampling(top_k=2), [2 / 3, 0, 0, 1 / 3]),
        (Sampling(top_p=0.74), [2 / 3, 0, 0, 1 / 3]),
        (Sampling(temperature=0.5), [0.25 / 0.355, 0.0025 / 0.355, 0.04 / 0.355, 0.0625 / 0.355]),
        (Sampling(top_k=2, top_p=0.66), [1, 0, 0, 0]),
        (Sampling(min_p=0.39), [0.5 / 0.95, 0, 0.2 / 0.95, 0.25 / 0.95]),
        (Sampling(temperature=0.5, min_p=0.2), [0.8, 0, 0, 0.2]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(sampling, expected):
    assert frequencies(sampling, LOGITS) == pytest.approx(expected, abs=2e-4)


def test_equal_tokens_at_the_edge_of_top_k_all_stay():
    logits = torch.tensor([0.0, 1.0, 0.0, -1.0])
    kept = torch.tensor([0.0, 1.0, 0.0, -torch.inf]).softmax(0)
    assert frequencies(Sampling(top_k=2), logits) == pytest.approx(kept.tolist(), abs=2e-4)


def test_penalty_divides_logits_above_zero_and_multiplies_those_below():
    logits, seen = torch.tensor([2.0, -1.0, 1.5, -0.5]), torch.tensor([True, True, False, False])
    penalised = torch.tensor([2 / 1.25, -1 * 1.25, 1.5, -0.5])
    sampling = Sampling(repetition_penalty=1.25)
    found = frequencies(sampling, logits, seen)
    assert found == pytest.approx(penalised.softmax(0).tolist(), abs=2e-4)
    greedy = Sampling(temperature=0, repetition_penalty=1.5)
    assert int(greedy.draw(logits[None], torch.zeros(1), seen[None])) == 2
    assert int(greedy.draw(logits[None], torch.zeros(1), None)) == 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_largest_number_draws_a_possible_token(sampling):
    logits = torch.full((1, 50), -3e4)
    logits[0, :3] = torch.tensor([0.1, 0.3, 0.2])
    below_one = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert int(sampling.draw(logits, below_one)) < 3


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(temperature=0)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_are_marked(sampling, value):
    logits = torch.zeros(3, 8)
    logits[1, 4] = value
    drawn = sampling.draw(logits, torch.full((3,), 0.5, dtype=torch.float64)).tolist()
    assert [token < 0 for token in drawn] == [False, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(temperature=0)])
def test_a_gpu_draws_the_same_without_waiting(sampling):
    torch.manual_seed(0)
    given = (
        torch.randn(5, 300) * 3,
        next(uniform_numbers([*range(5)], CPU)),
        torch.rand(5, 300) < 0.2,
    )
    on_gpu = [x.cuda() for x in given]
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = sampling.draw(*on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawn.tolist() == sampling.draw(*given).tolist()


def test_numbers_follow_from_the_own_seed():
    several = list(itertools.islice(uniform_numbers([4, 7], CPU), 150))
    one = list(itertools.islice(uniform_numbers([7], CPU), 150))
    assert [float(row[1]) for row in several] == [float(row[0]) for row in one]
    assert len({float(row[0]) for row in one}) == 150
    assert all(0 <= float(row[0]) < 1 for row in one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, got -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive, got 0.0"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def expected_text(text: bytes, strings: Sequence[bytes]) -> tuple[bytes, bool]:
    """What is left of a text whose bytes are looked at one after another."""
    for end in range(1, len(text) + 1):
        ended = [string for string in strings if text[:end].endswith(string)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("one END two END", ["END"]),
        ("ababac and more", ["abac"]),
        ("xabcdx", ["bcd", "abcd", "cd"]),
        ("aab", ["aaab", "ab"]),
        ("ends with EN", ["END"]),
    ],
)
def test_the_end_does_not_depend_on_how_a_text_is_divided(text, strings):
    content, stops = text.encode(), [string.encode() for string in strings]
    expected, ends = expected_text(content, stops)
    cuts = range(1, len(content))
    divisions = [*itertools.combinations(cuts, 2), *((cut,) for cut in cuts), (), tuple(cuts)]
    for division in divisions:
        stop, shown, is_over = StopStrings(stops), b"", False
        for start, end in itertools.pairwise((0, *division, len(content))):
            piece, is_over = stop.add(content[start:end])
            shown += piece
            assert expected.startswith(shown), "a part of a stop string was given out"
            if is_over:
                break
        assert is_over == ends
        assert (shown if ends else shown + stop.rest()) == expected
        assert stop.rest() == b""
