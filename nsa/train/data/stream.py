"""Training from a stream: sequences in the data set's own order, resumed exactly."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from nsa.errors import fail
from nsa.train.config import DataConfig
from nsa.train.data.batch import Sampler, TokenSource
from nsa.train.data.documents import SIDES, Row, tokenise
from nsa.train.data.local import Found, Origin, Place
from nsa.train.data.reader import Pace, read_documents
from nsa.train.data.tokenizer import Ids, Tokenizer, Tokens

logger = logging.getLogger(__name__)

ENDLESS = 1 << 62  # sequences of a stream, which starts over when it ends
BEGINNING = {"epoch": 0, "file": 0, "row": 0, "token": 0}
Position = dict[str, int]


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
        self.seek(0, BEGINNING)

    def sampler(self, seq_len: int, seed: int) -> StreamSampler:
        """See :class:`TokenSource`; the order is the stream's."""
        return StreamSampler(self, seq_len)

    def num_sequences(self, seq_len: int) -> int:
        """See :class:`TokenSource`: more than any run takes."""
        return ENDLESS

    def sequence(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`, but in ascending order only."""
        start, stop = index * seq_len, (index + 1) * seq_len + 1
        self._read_to(stop)
        while self._read[1:] and self._read[1][0] <= start:
            del self._read[0]
        assert start >= self._read[0][0], "a sequence before the latest one"
        parts = (tokens[max(start - at, 0) : max(stop - at, 0)] for at, _, tokens in self._read)
        return np.concatenate([*parts], dtype=np.int64)

    def position(self, token: int) -> Position:
        """Position to start reading at so that a given token is next.

        Args:
            token: its index in the stream, not before the latest sequence.

        Returns:
            ``epoch``, the number of times that the data set has ended before; ``file``; ``row``;
            and ``token`` in that row.
        """
        self._read_to(token + 1)
        begin, found, _ = next(read for read in reversed(self._read) if read[0] <= token)
        return {**found, "token": token - begin}

    def seek(self, token: int, position: Position) -> None:
        """Continue with token ``token`` of the stream at a result of :meth:`position`."""
        self._end = token - position["token"]  # index of the first token of the next document
        # Documents of the latest sequence and after it: index of the first token, position, tokens.
        self._read: list[tuple[int, Position, Tokens]] = []
        self._documents = self._training_documents(position)

    def close(self) -> None:
        """Stop reading, and end the reading process if there is one."""
        self._documents.close()

    def _read_to(self, stop: int) -> None:
        while self._end < stop:
            position, tokens = next(self._documents)
            self._read.append((self._end, position, tokens))
            self._end += len(tokens)

    def _training_documents(
        self, position: Position
    ) -> Generator[tuple[Position, Tokens], None, None]:
        """Documents with their position, without end."""
        start = Place(position["file"], position["row"])
        for epoch in count(position["epoch"]):
            is_empty = start == Place()
            _, batches = read_documents(self._origin, start=start, time_limit_s=self._time_limit_s)
            with closing(batches):
                for (file, end), texts in batches:
                    for row, document in enumerate(self._tokenise(texts), start=end - len(texts)):
                        if document.tokens.size:
                            is_empty = False
                            yield {"epoch": epoch, "file": file, "row": row}, document.tokens
            if is_empty:
                found = f"none in {self._origin.source}"
                fail("data.path", "contain training text", found)
            start = Place()


class StreamSampler(Sampler):
    """Sequences of a stream one after another, and the position in the data set of the next one.

    The state is six integers: the number of sequences drawn, their length, and
    :meth:`StreamSource.position` of the next one. Setting it moves nothing: the stream seeks when
    sequences are drawn.

    Args:
        source: the stream.
        seq_len: tokens of a sequence.
    """

    def __init__(self, source: StreamSource, seq_len: int) -> None:
        super().__init__(source, seq_len, seed=0)
        self._stream = source
        # Index of the next token and its position; None while the source continues from itself.
        self._start: tuple[int, Position] | None = 0, BEGINNING

    def sequence_at(self, position: int) -> int:
        """See :class:`Sampler`: the order is the stream's."""
        return position

    def next_indices(self, micro_batch: int, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """See :class:`Sampler`."""
        if self._start is not None:
            self._stream.seek(*self._start)
            self._start = None
        return super().next_indices(micro_batch, rank=rank, world_size=world_size)

    def state_dict(self) -> dict[str, Any]:
        """See above."""
        token = self.position * self.seq_len
        start = self._stream.position(token) if self._start is None else self._start[1]
        return {"position": self.position, "seq_len": self.seq_len, **start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a :meth:`state_dict`."""
        self.resize(state.get("seq_len", self.seq_len))
        self.position = state["position"]
        start = {name: state[name] for name in BEGINNING}
        self._start = self.position * self.seq_len, start


def read_held_out(
    origin: Origin, tokenizer: Tokenizer, config: DataConfig
) -> tuple[Found, dict[str, list[Row]]]:
    """The first validation documents of a data set and, if it has a fraction, test documents.

    The data set is read from its beginning until each has ``config.validation_tokens``, or it ends.
    """
    splits = SIDES[1:] if config.test_fraction else SIDES[1:2]
    found, batches = read_documents(origin, time_limit_s=config.time_limit_s)
    documents: dict[str, list[Row]] = {split: [] for split in splits}
    missing: dict[str, int] = dict.fromkeys(splits, config.validation_tokens)
    number, pace = 0, Pace()
    with closing(batches):
        for batch in batches:
            for row in tokenise(tokenizer, config.fractions, splits, False, batch.texts):
                if missing.get(row.kind, 0) > 0:
                    documents[row.kind].append(row)
                    missing[row.kind] -= len(row.tokens)
            number += len(batch.texts)
            if pace.is_due():
                logger.info("read %s documents for validation", f"{number:,}")
            if max(missing.values()) <= 0:
                break
    logger.info("read %s documents for validation", f"{number:,}")
    return found, documents
