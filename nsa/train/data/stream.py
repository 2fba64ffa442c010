"""Training straight from a stream: windows in the data set's own order, resumed exactly."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nsa.errors import check, fail
from nsa.train.config import DataConfig
from nsa.train.data.reader import DocumentBatch, Found, Origin, Place, read_documents
from nsa.train.data.sampler import Sampler
from nsa.train.data.source import TokenSource
from nsa.train.data.tokenise import Row, tokenise
from nsa.train.data.tokenizer import Ids, Tokenizer, Tokens

ENDLESS = 1 << 62  # windows of a stream, which begins anew when it ends
BEGINNING = {"epoch": 0, **Place()._asdict(), "token": 0}


class _Document(NamedTuple):
    """Where a document of the stream comes from.

    Attributes:
        first: number in the stream of its first token.
        epoch: how often the data set had ended before.
        place: in the data set.
    """

    first: int
    epoch: int
    place: Place


class StreamSource(TokenSource):
    """Windows of the training documents of a data set, in its own order.

    Windows are taken in ascending order: a window before the latest one is gone. When the data set
    ends it begins anew. Reading and tokenising happen in a process of their own.

    Args:
        origin: what to read.
        tokenizer: with a separator.
        config: its ``validation_fraction`` says which documents are left out, its ``time_limit_s``
            when reading is given up.
    """

    def __init__(self, origin: Origin, tokenizer: Tokenizer, config: DataConfig) -> None:
        self.separator_id = tokenizer.separator_id
        self.token_bytes = tokenizer.token_bytes
        self._origin, self._time_limit_s = origin, config.time_limit_s
        self._tokenise = partial(tokenise, tokenizer, config.validation_fraction, ("train",))
        self._batches: Generator[Any, None, None] | None = None
        self._first = 0  # number of the first token in memory
        self._tokens: Tokens = np.empty(0, dtype=np.uint8)
        self._documents: deque[_Document] = deque()
        self.seek(0, BEGINNING)

    def num_windows(self, seq_len: int) -> int:
        """See :class:`TokenSource`: more than any run takes."""
        check(seq_len > 0, "StreamSource.num_windows", "seq_len", "be positive", seq_len)
        return ENDLESS

    def window(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`, but in ascending order only."""
        start = index * seq_len
        rule = f"be at least {-(-self._first // seq_len)}, windows do not come back"
        check(start >= self._first, "StreamSource.window", "index", rule, index)
        self._read_to(start + seq_len + 1)
        self._tokens = self._tokens[start - self._first :]
        self._first = start
        while len(self._documents) > 1 and self._documents[1].first <= start:
            self._documents.popleft()
        return self._tokens[: seq_len + 1].astype(np.int64)

    def place(self, token: int) -> dict[str, int]:
        """Where reading begins for a token to come next.

        Args:
            token: its number in the stream, not before the latest window.

        Returns:
            ``epoch``, ``file``, ``row``, and ``token`` in that row.
        """
        self._read_to(token + 1)
        documents = reversed(self._documents)
        begin, epoch, place = next(found for found in documents if found.first <= token)
        return {"epoch": epoch, **place._asdict(), "token": token - begin}

    def seek(self, token: int, place: dict[str, int]) -> None:
        """Go on with token number ``token`` at ``place``, as :meth:`place` gave it."""
        self.close()
        self._first = token - place["token"]
        self._tokens = self._tokens[:0]
        self._documents.clear()
        self._batches = self._read(place["epoch"], Place(place["file"], place["row"]))

    def close(self) -> None:
        """End the reading process."""
        if self._batches is not None:
            self._batches.close()

    @property
    def _end(self) -> int:
        """Number of the next token to read."""
        return self._first + len(self._tokens)

    def _read_to(self, stop: int) -> None:
        assert self._batches is not None, "nothing to read from"
        while (end := self._end) < stop:
            epoch, batch = next(self._batches)
            rows, tokens = batch.payload
            for number, row in enumerate(rows, start=batch.start.row):
                if row.num_tokens:
                    place = Place(batch.start.file, number)
                    self._documents.append(_Document(end, epoch, place))
                    end += row.num_tokens
            self._tokens = np.concatenate([self._tokens, tokens])

    def _read(
        self,
        epoch: int,
        start: Place,
    ) -> Generator[tuple[int, DocumentBatch[tuple[list[Row], Tokens]]], None, None]:
        """Batches with their epoch, for ever."""
        while True:
            begin = self._end
            _, batches = read_documents(
                self._origin,
                self._tokenise,
                start=start,
                time_limit_s=self._time_limit_s,
            )
            with closing(batches):
                for batch in batches:
                    yield epoch, batch
            if self._end == begin and start == Place():
                found = f"none in {self._origin.source}"
                fail("StreamSource", "data.path", "hold training text", found)
            epoch, start = epoch + 1, Place()


class StreamSampler(Sampler):
    """Windows of a stream one after another, and where in the data set the next one begins.

    The state is five integers: the number of windows drawn, how often the data set has ended, file
    and row of the document in which the next window begins, and how many of its tokens the windows
    before have used. Setting it moves nothing: the stream is sought when windows are drawn.

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
        place = self._place
        if place is None:
            place = self._source.place(self.position * self._seq_len)
        return {"position": self.position, **place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.position = state["position"]
        self._place = {name: state[name] for name in BEGINNING}


def read_validation(
    origin: Origin,
    tokenizer: Tokenizer,
    config: DataConfig,
) -> tuple[Found, list[Row], Tokens]:
    """The first validation documents of a data set, and their tokens.

    It is read from its beginning until they have ``config.validation_tokens``, or it ends.
    """
    transform = partial(tokenise, tokenizer, config.validation_fraction, ("validation",))
    found, batches = read_documents(origin, transform, time_limit_s=config.time_limit_s)
    documents, parts, size = list[Row](), [np.empty(0, dtype=np.uint8)], 0
    with closing(batches):
        for batch in batches:
            rows, tokens = batch.payload
            parts.append(tokens)
            for row in rows:
                if row.num_tokens and size < config.validation_tokens:
                    documents.append(row)
                    size += row.num_tokens
            if size >= config.validation_tokens:
                break
    return found, documents, np.concatenate(parts)[:size]
