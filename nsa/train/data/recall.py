"""Text with lines about made-up words, most of which repeat an earlier line: retrieval in context.

A line is a question and a value, such as ``The number of kavopi is 482135.``, inserted anywhere in
real text. A query repeats the question of an earlier line, so its value can be copied. Training and
evaluation use different words: a checksum assigns each word to one of them.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from random import Random
from string import ascii_lowercase, digits
from typing import NamedTuple
from zlib import crc32

import numpy as np

from nsa.errors import check
from nsa.train.config import RecallConfig
from nsa.train.data.batch import Mask, Sampler, TextSource, TokenSource
from nsa.train.data.tokenizer import Ids, Tokenizer

SHORTEST_DISTANCE = 16
_SHORTEST = 128  # tokens of a sequence
_VARIANTS = 1 << 20  # training sequences that short texts are repeated for, with other lines
_FIRST_LINE = 32  # assumed tokens of a line before there is one
_HELD_OUT = 8  # one word in so many is for evaluation
_QUESTIONS = {"The number of {} is": digits, "The word for {} is": ascii_lowercase, "{}:": digits}


class Line(NamedTuple):
    """Tokens of a question, its value and the end of the line."""

    question: list[int]
    value: list[int]
    end: list[int]


class Query(NamedTuple):
    """A value that repeats an earlier one.

    Attributes:
        start: index of its first token.
        size: number of its tokens.
        distance: tokens back to the first token of the latest earlier occurrence.
    """

    start: int
    size: int
    distance: int


def lines(tokenizer: Tokenizer, random: Random, *, held_out: bool) -> Iterator[Line]:
    """Endless lines with different keys.

    Args:
        tokenizer: encodes question, value and end separately.
        random: of keys, values and questions.
        held_out: whether the words are those that training does not contain.
    """
    known, end = set[str](), tokenizer.encode(".\n")
    while True:
        key = _word(random, ascii_lowercase, held_out)
        if key not in known:
            known.add(key)
            question, letters = random.choice([*_QUESTIONS.items()])
            value = tokenizer.encode(f" {_word(random, letters, held_out)}")
            yield Line(tokenizer.encode(f"\n{question.format(key)}"), value, end)


def _word(random: Random, letters: str, held_out: bool) -> str:
    while True:
        word = "".join(random.choices(letters, k=random.randint(5, 7)))
        if (crc32(word.encode()) % _HELD_OUT == 0) == held_out:
            return word


class RecallSource(TokenSource):
    """Sequences of a text with inserted lines.

    Before each line a distance is drawn, log-uniform from 16 tokens to the sequence length. The
    line repeats the one whose latest occurrence is nearest to that distance, or is new if the
    distance reaches back beyond the start. There are ``lines / ln(seq_len / 16)`` keys on average.

    All tokens of repeated values are targets, no token of a new value is, and all other targets
    count with the probability ``config.text_share``. A separator in the text becomes a line end, so
    that a sequence is one document. A short text is repeated with other lines.

    Args:
        source: the text.
        tokenizer: its tokenizer.
        config: see :class:`nsa.train.config.RecallConfig`.
        seed: of all lines.
        held_out: whether lines have the words for evaluation.
    """

    def __init__(
        self,
        source: TokenSource,
        tokenizer: Tokenizer,
        config: RecallConfig,
        seed: int,
        *,
        held_out: bool = False,
    ) -> None:
        self.separator_id, self.token_bytes = source.separator_id, source.token_bytes
        self._source, self._tokenizer, self._config = source, tokenizer, config
        self._seed, self._held_out = seed, held_out
        self._newline = tokenizer.encode("\n")[-1]
        self._latest: tuple[tuple[int, int], tuple[Ids, list[Query], Mask]] | None = None

    @property
    def text(self) -> TextSource | None:
        """See :class:`TokenSource`."""
        return self._source.text

    def num_sequences(self, seq_len: int) -> int:
        """See :class:`TokenSource`: a multiple of the text's own number."""
        check(seq_len >= _SHORTEST, "seq_len", f"be at least {_SHORTEST} for recall", seq_len)
        number = self._source.num_sequences(seq_len)
        return number if self._held_out else number * max(1, _VARIANTS // max(number, 1))

    def sampler(self, seq_len: int, seed: int) -> Sampler:
        """See :class:`TokenSource`."""
        if self.text is None:  # a stream, which has an order of its own
            return self._source.sampler(seq_len, seed)
        return super().sampler(seq_len, seed)

    def most_sequences(self, seq_len: int, num_sequences: int) -> int:
        """See :class:`TokenSource`."""
        return num_sequences

    def sequence(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`."""
        return self._made(seq_len, index)[0]

    def queries(self, seq_len: int, index: int) -> list[Query]:
        """Repeated values of a sequence."""
        return self._made(seq_len, index)[1]

    def target_mask(self, seq_len: int, index: int) -> Mask:
        """See :class:`TokenSource`."""
        return self._made(seq_len, index)[2][1:]

    def _made(self, seq_len: int, index: int) -> tuple[Ids, list[Query], Mask]:
        """Tokens, queries and mask of the tokens that count; the latest result is kept."""
        latest = self._latest
        if latest is None or latest[0] != (seq_len, index):
            latest = self._latest = (seq_len, index), self._make(seq_len, index)
        return latest[1]

    def _make(self, seq_len: int, index: int) -> tuple[Ids, list[Query], Mask]:
        random = Random(f"{self._seed} {self._held_out} {seq_len} {index}")
        text = self._source.sequence(seq_len, index % self._source.num_sequences(seq_len))
        text[text == self.separator_id] = self._newline
        length, density = len(text), self._config.density
        raw = np.random.Philox(key=random.getrandbits(64)).random_raw(length)
        counted = (raw >> np.uint64(11)) < self._config.text_share * 2**53
        tokens, queries = np.empty_like(text), list[Query]()
        # Lines that exist and the index of their latest value, ascending.
        known, starts = list[Line](), list[int]()
        new = lines(self._tokenizer, random, held_out=self._held_out)
        at, used, size = 0, 0, _FIRST_LINE
        while True:
            gap = round(random.uniform(0, 2) * (1 / density - 1) * size)
            back = at + gap - SHORTEST_DISTANCE * (length / SHORTEST_DISTANCE) ** random.random()
            before = _nearest(starts, back) if back >= 0 and starts else None
            line = next(new) if before is None else known[before]
            whole = [*line.question, *line.value, *line.end]
            size, begin = len(whole), at + gap
            if begin + size > length:
                break
            tokens[at:begin] = text[used : used + gap]
            at, used = begin + size, used + gap
            tokens[begin:at] = whole
            start = begin + len(line.question)
            counted[start : start + len(line.value)] = before is not None
            if before is not None:
                queries.append(Query(start, len(line.value), start - starts.pop(before)))
                del known[before]
            starts.append(start)
            known.append(line)
        tokens[at:] = text[used : used + length - at]
        return tokens, queries, counted


def _nearest(ascending: list[int], wanted: float) -> int:
    """Index of the number that is nearest to ``wanted``."""
    after = bisect(ascending, wanted)
    near = range(max(after - 1, 0), min(after + 1, len(ascending)))
    return min(near, key=lambda index: abs(ascending[index] - wanted))
