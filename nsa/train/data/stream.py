"""Training from a stream: sequences in the data set's own order, resumed exactly."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from nsa.errors import fail
from nsa.train.config import DataConfig
from nsa.train.data.documents import SIDES, Row, tokenise
from nsa.train.data.local import Found, Origin, Place
from nsa.train.data.reader import Pace, read_documents
from nsa.train.data.source import Sampler, TokenSource
from nsa.train.data.tokenizer import Ids, Tokenizer, Tokens

logger = logging.getLogger(__name__)

ENDLESS = 1 << 62  # sequences of a stream, which starts over when it ends
BEGINNING = {"epoch": 0, **Place()._asdict(), "token": 0}


class _Document(NamedTuple):
    """Document of the stream.

    Attributes:
        first: index in the stream of its first token.
        place: number of times that the data set had ended before, and its file and row.
        tokens: tokens, ended by the separator.
    """

    first: int
    place: dict[str, int]
    tokens: Tokens


class StreamSource(TokenSource):
    """Sequences of the training documents of a data set, in its own order.

    Sequences are taken in ascending order; the tokens before the latest one are dropped. When the
    data set ends it starts over.

    Args:
        origin: data set to read.
        tokenizer: with a separator.
        config: its ``fractions`` define which documents are left out, its ``time_limit_s`` when to
            stop reading.
    """

    def __init__(self, origin: Origin, tokenizer: Tokenizer, config: DataConfig) -> None:
        self.separator_id = tokenizer.separator_id
        self.token_bytes = tokenizer.token_bytes
        self._origin, self._time_limit_s = origin, config.time_limit_s
        self._tokenise = partial(tokenise, tokenizer, config.fractions, ("train",), False)
        self._documents = deque[_Document]()  # those of the latest sequence, and after it
        self._end = 0  # index of the first token of the next document
        self._coming = self._read(0, Place())

    def num_windows(self, seq_len: int) -> int:
        """See :class:`TokenSource`: more than any run takes."""
        return ENDLESS

    def window(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`, but in ascending order only."""
        start, stop = index * seq_len, (index + 1) * seq_len + 1
        self._read_to(stop)
        while self._documents[0].first + len(self._documents[0].tokens) <= start:
            self._documents.popleft()
        assert start >= self._documents[0].first, "a sequence before the latest one"
        parts = [
            tokens[max(start - first, 0) : stop - first]
            for first, _, tokens in self._documents
            if first < stop
        ]
        return np.concatenate(parts).astype(np.int64)

    def place(self, token: int) -> dict[str, int]:
        """Position to start reading at so that a given token is next.

        Args:
            token: its index in the stream, not before the latest sequence.

        Returns:
            ``epoch``, ``file``, ``row``, and ``token`` in that row.
        """
        self._read_to(token + 1)
        found = next(found for found in reversed(self._documents) if found.first <= token)
        return {**found.place, "token": token - found.first}

    def seek(self, token: int, place: dict[str, int]) -> None:
        """Continue with token ``token`` of the stream at ``place``, a result of :meth:`place`."""
        self.close()
        self._documents.clear()
        self._end = token - place["token"]
        self._coming = self._read(place["epoch"], Place(place["file"], place["row"]))

    def close(self) -> None:
        """Stop reading, and end the reading process if there is one."""
        self._coming.close()

    def _read_to(self, stop: int) -> None:
        while self._end < stop:
            place, tokens = next(self._coming)
            self._documents.append(_Document(self._end, place, tokens))
            self._end += len(tokens)

    def _read(
        self, epoch: int, start: Place
    ) -> Generator[tuple[dict[str, int], Tokens], None, None]:
        """Documents with their place, without end."""
        while True:
            is_empty = start == Place()
            _, batches = read_documents(
                self._origin, self._tokenise, start=start, time_limit_s=self._time_limit_s
            )
            with closing(batches):
                for batch in batches:
                    for number, row in enumerate(batch.payload, start=batch.start.row):
                        if row.tokens.size:
                            is_empty = False
                            yield (
                                {"epoch": epoch, "file": batch.start.file, "row": number},
                                row.tokens,
                            )
            if is_empty:
                found = f"none in {self._origin.source}"
                fail("StreamSource", "data.path", "hold training text", found)
            epoch, start = epoch + 1, Place()


class StreamSampler(Sampler):
    """Sequences of a stream one after another, and the place in the data set of the next one.

    The state is five integers: the number of sequences drawn, how often the data set has ended,
    file and row of the document in which the next sequence begins, and how many of its tokens
    earlier sequences have used. Setting it moves nothing: the stream seeks when sequences are
    drawn.

    Args:
        source: the stream.
        seq_len: tokens of a sequence.
    """

    def __init__(self, source: StreamSource, seq_len: int) -> None:
        super().__init__(ENDLESS, seed=0)
        self._source, self._seq_len = source, seq_len
        # Place of the sequence at ``position``; None if the source knows it.
        self._place: dict[str, int] | None = BEGINNING

    def window_at(self, position: int) -> int:
        """See :class:`Sampler`: the order is the stream's."""
        return position

    def next_windows(self, micro_batch: int, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """See :class:`Sampler`."""
        if self._place is not None:
            self._source.seek(self.position * self._seq_len, self._place)
            self._place = None
        return super().next_windows(micro_batch, rank=rank, world_size=world_size)

    def state_dict(self) -> dict[str, int]:
        """See above."""
        place = self._place or self._source.place(self.position * self._seq_len)
        return {"position": self.position, **place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the place of a :meth:`state_dict`."""
        self.position = state["position"]
        self._place = {name: state[name] for name in BEGINNING}


def read_held_out(
    origin: Origin, tokenizer: Tokenizer, config: DataConfig
) -> tuple[Found, dict[str, list[Row]]]:
    """The first validation documents of a data set and, if it has a fraction, test documents.

    The data set is read from its beginning until each has ``config.validation_tokens``, or it ends.
    """
    sides = SIDES[1:] if config.test_fraction else SIDES[1:2]
    transform = partial(tokenise, tokenizer, config.fractions, sides, False)
    found, batches = read_documents(origin, transform, time_limit_s=config.time_limit_s)
    documents: dict[str, list[Row]] = {side: [] for side in sides}
    missing: dict[str, int] = dict.fromkeys(sides, config.validation_tokens)
    count, pace = 0, Pace()
    with closing(batches):
        for row in chain.from_iterable(batch.payload for batch in batches):
            count += 1
            if pace.is_due():
                logger.info("read %s documents for validation", f"{count:,}")
            if missing.get(row.kind, 0) > 0:
                documents[row.kind].append(row)
                missing[row.kind] -= len(row.tokens)
                if max(missing.values()) <= 0:
                    break
    logger.info("read %s documents for validation", f"{count:,}")
    return found, documents
