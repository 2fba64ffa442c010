"""Needle in a haystack: retrieval from a long context by exact match, and prompts for lm-eval.

The sentence that is hidden is that of RULER: Hsieh et al., "RULER: What's the Real Context Size of
Your Long-Context Language Models?", arXiv:2404.06654. :func:`needle_prompts` makes prompts like its
``niah_single_1``, ``niah_multikey_1`` and ``vt``. :class:`Needles` hides made-up words in text of
the run, as ``niah_single_2`` and ``niah_multikey_1`` do with numbers, and asks by repeating the
beginning of the sentence, so that models without instruction tuning can answer by copying. Models
that were trained on :mod:`nsa.train.data.recall` are asked by the lines of that task instead, or
with :func:`find_values` for all repeated lines of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nsa.errors import check
from nsa.lm.model import LanguageModel
from nsa.train.data import TextSource, Tokenizer, TokenSource
from nsa.train.data.recall import RecallSource, lines
from nsa.train.execution.precision import autocast

_QUESTION = "One of the special magic {kind} for {key} is:"
_NEEDLE = _QUESTION + " {answer}.\n"

# --- prompts for lm-eval --------------------------------------------------------------------------
_BEFORE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
_LINE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
_AFTER = (
    "What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
_KEYS = ("anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor")
_SET = "Some lines of the following text set variables, which I will ask for afterwards.\n"
_VARIABLES = "All variables with the value {value}, in the order of their lines, are"
PromptTask = Literal["single", "multi_key", "variables"]


class _Hidden(NamedTuple):
    """Lines to hide, the text around them, and the index of the first line of the answer."""

    before: str
    lines: list[str]
    after: str
    answer: str
    asked: int


def needle_prompts(
    size: int, number: int, seed: int = 0, task: PromptTask = "single"
) -> Iterator[dict[str, Any]]:
    """Prompts with lines at random depths that answer a question.

    Args:
        size: bytes of a prompt; it is as long as whole lines allow.
        number: how many.
        seed: of lines and depths.
        task: ``single`` has one key with a number of seven digits, ``multi_key`` three more keys
            with numbers, ``variables`` two chains of five variables, each set to the one before.

    Yields:
        ``prompt``, ASCII; ``answer``, the digits or the variables of one chain; ``depth``, the
        share of the filler's lines before the key or the first variable.

    Raises:
        ValueError: the size leaves no room for a line, or there would be no prompt.
    """
    random = Random(seed)
    check(0 < number <= 10**6, "number", "be from 1 to 1,000,000", number)
    for _ in range(number):
        num_keys = 4 if task == "multi_key" else 1
        hidden = _chains(random) if task == "variables" else _numbers(random, num_keys)
        rest = sum(map(len, (hidden.before, *hidden.lines, hidden.after)))
        lines = (size - rest) // len(_LINE)
        check(lines > 0, "size", f"be at least {rest + len(_LINE)} bytes", size)
        places = sorted(random.randint(0, lines) for _ in hidden.lines)
        text, last = hidden.before, 0
        for place, line in zip(places, hidden.lines, strict=True):
            text, last = text + _LINE * (place - last) + line, place
        prompt = text + _LINE * (lines - last) + hidden.after
        depth = round(places[hidden.asked] / lines, 4)
        yield {"prompt": prompt, "answer": hidden.answer, "depth": depth}


def _numbers(random: Random, num_keys: int) -> _Hidden:
    numbers = {key: str(random.randrange(10**6, 10**7)) for key in random.sample(_KEYS, num_keys)}
    lines = [_NEEDLE.format(kind="numbers", key=x, answer=numbers[x]) for x in numbers]
    key = random.choice([*numbers])
    return _Hidden(_BEFORE, lines, _AFTER.format(key=key), numbers[key], [*numbers].index(key))


def _chains(random: Random) -> _Hidden:
    """Two chains, mixed; the question is about the first one."""
    names = random.sample([a + b + c for a in "BDFGKL" for b in "AEIOU" for c in "MNPRST"], 10)
    values, lines = random.sample(range(10**4, 10**5), 2), list[str]()
    chains: tuple[list[str], list[str]] = ([], [])
    for name, n in zip(names, random.sample([0, 1] * 5, 10), strict=True):
        source = f"VAR {chains[n][-1]}" if chains[n] else values[n]
        lines.append(f"VAR {name} = {source}.\n")
        chains[n].append(name)
    asked, after = names.index(chains[0][0]), _VARIABLES.format(value=values[0])
    return _Hidden(_SET, lines, after, " ".join(chains[0]), asked)


# --- contexts of a given length -------------------------------------------------------------------
_SYLLABLES = 3
_VALUE_BYTES = 1 + 2 * _SYLLABLES  # with the space before the word
_PASSAGE_VALUE = 8  # last tokens of a passage
_MOST_FILLER = 1 << 24  # tokens of the text that are read


@dataclass(frozen=True)
class NeedleConfig:
    """Contexts of ``nsa eval --needle``.

    Attributes:
        lengths: tokens of a context with question and answer; empty means the run's length.
        depths: number of places, evenly spaced from the beginning (0) to the end (1) of the filler.
        cases: contexts for each length and depth.
        distractors: other needles in each context, with other keys, at random places.
        passage: tokens of a passage of the text that is hidden elsewhere in it instead of made-up
            words; it is asked for by all but its last 8 tokens. 0 means words.
        seed: of keys, values, filler and places.
        style: ``ruler``, or ``recall`` for lines of :mod:`nsa.train.data.recall` with words that
            training does not contain.

    Raises:
        UserError: a value is out of range.
    """

    lengths: tuple[int, ...] = ()
    depths: int = 11
    cases: int = 100
    distractors: int = 0
    seed: int = 0
    passage: int = 0
    style: Literal["ruler", "recall"] = "ruler"

    def __post_init__(self) -> None:
        for name, value in (("depths", self.depths), ("cases", self.cases)):
            check(value > 0, f"--{name}", "be positive", value)
        check(self.distractors >= 0, "--distractors", "be at least 0", self.distractors)
        fits = self.passage == 0 or self.passage >= 2 * _PASSAGE_VALUE
        check(fits, "--passage", f"be at least {2 * _PASSAGE_VALUE} tokens", self.passage)
        fits = self.passage == 0 or self.style == "ruler"
        check(fits, "--passage", "be left out with --style recall", self.passage)

    @property
    def shortest(self) -> int:
        """Bytes of the needles, the question and the answer: all models can have them as tokens."""
        if self.passage:
            return self.passage * (self.distractors + 2)
        asked = len("\n" + _question("a" * 2 * _SYLLABLES)) + _VALUE_BYTES
        return asked + (self.distractors + 1) * (asked + len(".\n"))


class Case(NamedTuple):
    """Tokens of a context up to the value that is asked for, and of the value."""

    prompt: list[int]
    value: list[int]


class Needles:
    """Contexts that are functions of the seed, length, depth and number.

    Attributes:
        config: see :class:`NeedleConfig`.
        tokenizer: tokenizer of the model.
        lengths: tokens of a context.
        depths: share of the filler before the needle, 0 to 1, with four decimals.
        num_tokens: see below.

    Args:
        config: see :class:`NeedleConfig`.
        tokenizer: tokenizer of the model.
        source: text for the filler; documents are joined, and a text that is too short repeats.
        seq_len: length if the configuration names none.
        num_tokens: tokens of a pass of the model: as many contexts as fit, at least one.

    Raises:
        UserError: a synthetic task, or a length without room for needles and question.
    """

    def __init__(
        self,
        config: NeedleConfig,
        tokenizer: Tokenizer,
        source: TokenSource,
        seq_len: int,
        num_tokens: int,
    ) -> None:
        is_text, given = isinstance(source, TextSource), "a run without text"
        check(is_text, "--needle", "be left out for a synthetic task", given)
        assert isinstance(source, TextSource)
        self.config, self.tokenizer, self.num_tokens = config, tokenizer, num_tokens
        self.lengths = config.lengths or (seq_len,)
        for length in self.lengths:
            rule = f"be at least {config.shortest} tokens, for needles and question"
            check(length >= config.shortest, "--lengths", rule, length)
        text = source.read(0, _MOST_FILLER)
        last = max(config.depths - 1, 1)
        self.depths = [round(place / last, 4) for place in range(config.depths)]
        self._filler = text[text != source.separator_id]

    def case(self, length: int, place: int, number: int) -> Case:
        """Make a context.

        Args:
            length: tokens of prompt and value.
            place: index of the depth.
            number: index of the case at this depth.
        """
        config, encode = self.config, self.tokenizer.encode
        random = Random(f"{config.seed} {length} {place} {number}")
        if config.passage:
            needles = [self._passage(random, config.passage) for _ in range(config.distractors + 1)]
            question, value = needles[0][:-_PASSAGE_VALUE], needles[0][-_PASSAGE_VALUE:]
        elif config.style == "recall":
            made = lines(self.tokenizer, random, held_out=True)
            found = [*islice(made, config.distractors + 1)]
            needles = [[*line.question, *line.value, *line.end] for line in found]
            question, value = found[0].question, found[0].value
        else:
            keys = dict[str, None]()
            while len(keys) <= config.distractors:
                keys[_word(random).title()] = None
            questions = [encode("\n" + _question(key)) for key in keys]
            values = [encode(" " + _word(random)) for _ in keys]
            pairs, ends = zip(questions, values, strict=True), encode(".\n")
            needles = [[*ask, *answer, *ends] for ask, answer in pairs]
            question, value = questions[0], values[0]
        rest = length - sum(map(len, (*needles, question, value)))
        offsets = [
            round(self.depths[place] * rest),
            *(random.randint(0, rest) for _ in needles[1:]),
        ]
        filler = self._passage(random, rest)
        prompt, before = list[int](), 0
        for offset, needle in sorted(zip(offsets, needles, strict=True), key=lambda pair: pair[0]):
            prompt += [*filler[before:offset], *needle]
            before = offset
        return Case([*prompt, *filler[before:], *question], value)

    def _passage(self, random: Random, length: int) -> list[int]:
        start = random.randint(0, max(len(self._filler) - length, 0))
        where = np.arange(start, start + length)
        passage: list[int] = self._filler.take(where, mode="wrap").tolist()
        return passage


def _question(key: str) -> str:
    return _QUESTION.format(kind="words", key=key)


def _word(random: Random) -> str:
    """A pronounceable word that texts do not contain, of 343,000."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    return "".join(random.choice(consonants) + random.choice(vowels) for _ in range(_SYLLABLES))


# --- measurement ----------------------------------------------------------------------------------
Answers = NDArray[np.float64]  # [depths, cases, 2]: 1 for an exact match, log-probability in nats


def find_needles(
    model: LanguageModel, needles: Needles, length: int, compute_dtype: str
) -> Answers:
    """Measure whether a model continues the contexts of a length with their values.

    One forward pass over a context and its value shows what greedy generation would append: the
    value, if each of its tokens is the most likely one after those before it.

    Args:
        model: the language model, on any device.
        needles: the contexts.
        length: tokens of a context.
        compute_dtype: ``bf16`` or ``fp32``.

    Returns:
        Whether the continuation is the value, and the log-probability of the value.
    """
    config = needles.config
    indices = [(place, case) for place in range(config.depths) for case in range(config.cases)]
    size, found = max(1, needles.num_tokens // length), list[tuple[bool, float]]()
    for first in range(0, len(indices), size):
        cases = [needles.case(length, *index) for index in indices[first : first + size]]
        found += _answers(model, cases, compute_dtype)
    return np.array(found, dtype=np.float64).reshape(config.depths, config.cases, 2)


@torch.no_grad()
def _answers(
    model: LanguageModel, cases: Sequence[Case], compute_dtype: str
) -> list[tuple[bool, float]]:
    """Whether the values are found, and their log-probabilities in nats."""
    device = model.embedding.weight.device
    tokens = torch.tensor([case.prompt + case.value for case in cases], device=device)
    sizes = torch.tensor([[len(case.value)] for case in cases], device=device)
    most = max(len(case.value) for case in cases)
    with autocast(device, compute_dtype):
        logits = model.head(model.hidden_states(tokens)[:, -most - 1 : -1])
    values, is_before = tokens[:, -most:], torch.arange(most, device=device) < most - sizes
    logs = logits.double().log_softmax(-1)  # [B, V, vocabulary]
    is_right = (logs.argmax(-1) == values) | is_before
    nats = logs.gather(-1, values[..., None])[..., 0].masked_fill(is_before, 0.0).sum(-1)
    return [*zip(is_right.all(-1).tolist(), nats.tolist(), strict=True)]


@torch.no_grad()
def find_values(
    model: LanguageModel,
    source: RecallSource,
    seq_len: int,
    indices: Iterable[int],
    compute_dtype: str,
) -> list[dict[str, Any]]:
    """Measure how often a model continues the queries of sequences with their values.

    Args:
        model: the language model, on any device.
        source: sequences with queries.
        seq_len: tokens of a sequence.
        indices: indices of the sequences.
        compute_dtype: ``bf16`` or ``fp32``.

    Returns:
        Figures of :func:`row_of` by distance from ``first`` to ``last``, powers of two, for each
        distance that occurs; then those of all queries.
    """
    device, found = model.embedding.weight.device, list[tuple[int, bool, float]]()
    for index in indices:
        queries = source.queries(seq_len, index)
        tokens = torch.from_numpy(source.sequence(seq_len, index)).to(device)
        rows = [start + k for start, size, _ in queries for k in range(size)]
        at = torch.tensor(rows, dtype=torch.int64, device=device)
        values = tokens[at]
        with autocast(device, compute_dtype):
            hidden = model.hidden_states(tokens[None, :-1])[0]
            logs = model.head(hidden[at - 1]).double().log_softmax(-1)
        right = (logs.argmax(-1) == values).tolist()
        nats = logs.gather(-1, values[:, None])[:, 0].tolist()
        end = 0
        for _, size, distance in queries:
            begin, end = end, end + size
            found.append((distance, all(right[begin:end]), sum(nats[begin:end])))
    answers = np.array(found, dtype=np.float64)
    check(len(answers) > 0, "--recall", "be given for sequences with a repeated line", seq_len)
    octaves = np.log2(answers[:, 0]).astype(int)
    by_distance = [
        row_of(answers[octaves == n, 1:], first=2**n, last=2 ** (n + 1) - 1)
        for n in np.unique(octaves).tolist()
    ]
    return [*by_distance, row_of(answers[:, 1:], first=None, last=None)]


def wilson(hits: float, number: int) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927).

    Args:
        hits: successes among independent trials.
        number: trials, at least 1.
    """
    z, share = NormalDist().inv_cdf(0.975), hits / number
    middle = share + z * z / (2 * number)
    error = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    low, high = ((middle + sign * error) / (1 + z * z / number) for sign in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def row_of(answers: Answers, **about: Any) -> dict[str, Any]:
    """Figures of answers ``[..., 2]``: share of exact matches with its interval, mean nats."""
    hits, nats = answers.reshape(-1, 2).T
    low, high = wilson(float(hits.sum()), hits.size)
    share = {"exact_match": float(hits.mean()), "exact_low": low, "exact_high": high}
    return {**about, "cases": hits.size, **share, "log_prob_nats": float(nats.mean())}
