"""Training straight from a stream: windows in the data set's own order, resumed exactly."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from nsa.errors import check, fail
from nsa.train.config import DataConfig
from nsa.train.data.documents import SIDES, Side
from nsa.train.data.origin import Found, Origin, Pace, Place
from nsa.train.data.reader import read_documents
from nsa.train.data.sampler import Sampler
from nsa.train.data.source import TokenSource
from nsa.train.data.tokenise import Row, tokenise
from nsa.train.data.tokenizer import Ids, Tokenizer, Tokens

logger = logging.getLogger(__name__)

ENDLESS = 1 << 62  # windows of a stream, which starts over when it ends
BEGINNING = {"epoch": 0, **Place()._asdict(), "token": 0}


class _Document(NamedTuple):
    """A document of the stream.

    Attributes:
        first: number in the stream of its first token.
        place: how often the data set had ended before, and its file and row.
        tokens: ended by the separator.
    """

    first: int
    place: dict[str, int]
    tokens: Tokens


class StreamSource(TokenSource):
    """Windows of the training documents of a data set, in its own order.

    Windows are taken in ascending order; those before the latest one are dropped. When the data
    set ends it starts over. A process of its own reads and tokenises.

    Args:
        origin: what to read.
        tokenizer: with a separator.
        config: its ``fractions`` say which documents are left out, its ``time_limit_s`` when to
            give up reading.
    """

    def __init__(self, origin: Origin, tokenizer: Tokenizer, config: DataConfig) -> None:
        self.separator_id = tokenizer.separator_id
        self.token_bytes = tokenizer.token_bytes
        self._origin, self._time_limit_s = origin, config.time_limit_s
        self._tokenise = partial(tokenise, tokenizer, config.fractions, ("train",))
        self._documents: deque[_Document] = deque()  # those of the latest window, and behind it
        self._end = 0  # number of the first token of the next document
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
        begin = self._documents[0].first
        rule = f"be at least {-(-begin // seq_len)}, because windows before that are dropped"
        check(start >= begin, "StreamSource.window", "index", rule, index)
        parts = [
            tokens[max(start - first, 0) : stop - first]
            for first, _, tokens in self._documents
            if first < stop
        ]
        return np.concatenate(parts).astype(np.int64)

    def place(self, token: int) -> dict[str, int]:
        """Where to start reading so that a certain token comes next.

        Args:
            token: its number in the stream, not before the latest window.

        Returns:
            ``epoch``, ``file``, ``row``, and ``token`` in that row.
        """
        self._read_to(token + 1)
        found = next(found for found in reversed(self._documents) if found.first <= token)
        return {**found.place, "token": token - found.first}

    def seek(self, token: int, place: dict[str, int]) -> None:
        """Continue with token number ``token`` at ``place``, as :meth:`place` gave it."""
        self.close()
        self._documents.clear()
        self._end = token - place["token"]
        self._coming = self._read(place["epoch"], Place(place["file"], place["row"]))

    def close(self) -> None:
        """End the reading process."""
        self._coming.close()

    def _read_to(self, stop: int) -> None:
        while self._end < stop:
            place, tokens = next(self._coming)
            self._documents.append(_Document(self._end, place, tokens))
            self._end += len(tokens)

    def _read(
        self,
        epoch: int,
        start: Place,
    ) -> Generator[tuple[dict[str, int], Tokens], None, None]:
        """Documents with their place, without end."""
        while True:
            is_empty = start == Place()
            _, batches = read_documents(
                self._origin,
                self._tokenise,
                start=start,
                time_limit_s=self._time_limit_s,
            )
            skipped, begin = start.row, time.monotonic()
            with closing(batches):
                for batch in batches:
                    if skipped:
                        took_s = time.monotonic() - begin
                        what = "the stream goes on after %d rows of file %d, skipped in %.1f s"
                        logger.info(what, skipped, start.file + 1, took_s)
                        skipped = 0
                    for number, row in enumerate(batch.payload, start=batch.start.row):
                        if row.tokens.size:
                            is_empty = False
                            place = {"epoch": epoch, "file": batch.start.file, "row": number}
                            yield place, row.tokens
            if is_empty:
                found = f"none in {self._origin.source}"
                fail("StreamSource", "data.path", "hold training text", found)
            epoch, start = epoch + 1, Place()


class StreamSampler(Sampler):
    """Windows of a stream one after another, and where in the data set the next one begins.

    The state is five integers: the number of windows drawn, how often the data set has ended, file
    and row of the document in which the next window begins, and how many of its tokens the windows
    before have used. Setting it moves nothing: the stream seeks when windows are drawn.

    Args:
        source: the stream.
        seq_len: tokens of a window.
    """

    def __init__(self, source: StreamSource, seq_len: int) -> None:
        super().__init__(ENDLESS, seed=0)
        self._source, self._seq_len = source, seq_len
        # Of the window at ``position``; None: the source knows it.
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
        """Continue where ``state_dict`` was taken."""
        self.position = state["position"]
        self._place = {name: state[name] for name in BEGINNING}


def read_held_out(
    origin: Origin,
    tokenizer: Tokenizer,
    config: DataConfig,
) -> tuple[Found, dict[Side, list[Row]]]:
    """The first validation documents of a data set and, with a share for them, test documents.

    It is read from its beginning until each side has ``config.validation_tokens``, or it ends.
    """
    sides = SIDES[1:] if config.test_fraction else SIDES[1:2]
    transform = partial(tokenise, tokenizer, config.fractions, sides)
    found, batches = read_documents(origin, transform, time_limit_s=config.time_limit_s)
    documents: dict[Side, list[Row]] = {side: [] for side in sides}
    missing = dict.fromkeys(sides, config.validation_tokens)
    count = num_bytes = 0
    pace = Pace()

    def report() -> None:
        read = f"{count:,} documents ({num_bytes / 1e6:.1f} MB) of the stream"
        tokens = config.validation_tokens * len(sides) - sum(missing.values())
        logger.info("read %s: %s tokens of validation text", read, f"{tokens:,}")

    with closing(batches):
        for row in chain.from_iterable(batch.payload for batch in batches):
            count, num_bytes = count + 1, num_bytes + row.num_bytes
            if pace.is_due():
                report()
            side = row.kind
            if (side == "validation" or side == "test") and missing.get(side, 0) > 0:
                documents[side].append(row)
                missing[side] -= len(row.tokens)
                if max(missing.values()) <= 0:
                    break
    report()
    return found, documents
