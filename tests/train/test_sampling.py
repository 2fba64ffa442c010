"""Sampling and stop strings: probabilities by hand, independence of neighbours, divided texts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.train.sampling import Sampling, StopStrings, uniform_numbers

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.5, 0.05, 0.2, 0.25]).log()


def shares(sampling: Sampling, logits: Tensor, seen: Tensor | None = None) -> list[float]:
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
        (Sampling(top_p=0.76), [0.5 / 0.95, 0, 0.2 / 0.95, 0.25 / 0.95]),
        (Sampling(temperature=0.5), [0.25 / 0.355, 0.0025 / 0.355, 0.04 / 0.355, 0.0625 / 0.355]),
        (Sampling(top_k=2, top_p=0.66), [1, 0, 0, 0]),
        (Sampling(top_k=2, top_p=0.67), [2 / 3, 0, 0, 1 / 3]),
        (Sampling(min_p=0.39), [0.5 / 0.95, 0, 0.2 / 0.95, 0.25 / 0.95]),
        (Sampling(min_p=0.41), [2 / 3, 0, 0, 1 / 3]),
        (Sampling(temperature=0.5, min_p=0.2), [0.8, 0, 0, 0.2]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(
    sampling: Sampling, expected: list[float]
) -> None:
    assert shares(sampling, LOGITS) == pytest.approx(expected, abs=2e-4)


def test_equal_tokens_at_the_edge_of_top_k_all_stay() -> None:
    logits = torch.tensor([0.0, 1.0, 0.0, -1.0])
    kept = torch.tensor([0.0, 1.0, 0.0, -torch.inf]).softmax(0)
    assert shares(Sampling(top_k=2), logits) == pytest.approx(kept.tolist(), abs=2e-4)


def test_penalty_divides_logits_above_zero_and_multiplies_those_below() -> None:
    logits, seen = torch.tensor([2.0, -1.0, 1.5, -0.5]), torch.tensor([True, True, False, False])
    penalised = torch.tensor([2 / 1.25, -1 * 1.25, 1.5, -0.5])
    sampling = Sampling(repetition_penalty=1.25)
    found = shares(sampling, logits, seen)
    assert found == pytest.approx(penalised.softmax(0).tolist(), abs=2e-4)
    # Before the temperature, and for the likeliest token too.
    cold = Sampling(temperature=0.5, repetition_penalty=1.25)
    expected = (penalised / 0.5).softmax(0).tolist()
    assert shares(cold, logits, seen) == pytest.approx(expected, abs=2e-4)
    greedy = Sampling(temperature=0, repetition_penalty=1.5)
    assert int(greedy.draw(logits[None], torch.zeros(1), seen[None])) == 2
    assert int(greedy.draw(logits[None], torch.zeros(1), None)) == 0


SAMPLINGS = (Sampling(), Sampling(0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_row_does_not_depend_on_its_neighbours(sampling: Sampling) -> None:
    torch.manual_seed(0)
    logits, seen = torch.randn(5, 300) * 3, torch.rand(5, 300) < 0.2
    uniform = next(uniform_numbers([*range(5)], CPU))
    together = sampling.draw(logits, uniform, seen).tolist()
    alone = [
        int(sampling.draw(logits[i : i + 1], uniform[i : i + 1], seen[i : i + 1])) for i in range(5)
    ]
    assert together == alone
    assert len(set(together)) > 1


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_largest_number_draws_a_possible_token(sampling: Sampling) -> None:
    logits = torch.full((1, 50), -3e4)
    logits[0, :3] = torch.tensor([0.1, 0.3, 0.2])
    below_one = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert int(sampling.draw(logits, below_one)) < 3


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(temperature=0)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_are_marked(sampling: Sampling, value: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = value
    drawn = sampling.draw(logits, torch.full((3,), 0.5, dtype=torch.float64)).tolist()
    assert [token < 0 for token in drawn] == [False, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(temperature=0)])
def test_a_gpu_draws_the_same_without_waiting(sampling: Sampling) -> None:
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


def test_numbers_follow_from_the_own_seed() -> None:
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
        ({"min_p": 1.1}, "min_p must be from 0 to 1, got 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive, got 0.0"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


# --- stop strings ---------------------------------------------------------------------------------


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
        ("caf\u00e9 \u6f22\u5b57!", ["\u6f22\u5b57"]),
        ("ends with EN", ["END"]),
    ],
)
def test_the_end_does_not_depend_on_how_a_text_is_divided(text: str, strings: list[str]) -> None:
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
