"""Training straight from a stream: windows in the data set's own order, resumed exactly, without a folder of shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.errors import check, fail
from nsa.train.data.sampler import Sampler
from nsa.train.data.stream import Batch, DocumentReader, Found, Origin, Place
from nsa.train.data.tokenise import TokenBatch, Tokenise
from nsa.train.data.tokenizer import Tokenizer, token_dtype

ENDLESS = 1 << 62  # windows of a stream, which begins anew when it ends
BEGINNING = {"epoch": 0, **Place()._asdict(), "token": 0}


@dataclass(frozen=True)
class _Chunk:
    """Tokens of a batch of documents, with the way back from a token to its document."""

    first: int  # number of the first token in the stream
    epoch: int
    batch: Batch[TokenBatch]

    @property
    def tokens(self) -> NDArray[Any]:
        return self.batch.payload.tokens["train"]

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    def place(self, token: int) -> dict[str, int]:
        """Where reading has to begin for token number ``token`` to come next."""
        ends = np.cumsum(self.batch.payload.lengths)
        row = int(np.searchsorted(ends, token - self.first, side="right"))
        into = token - self.first - int(ends[row] - self.batch.payload.lengths[row])
        return {"epoch": self.epoch, **self.batch.place_of(row)._asdict(), "token": into}


class StreamSource:
    """Windows of the training documents of a data set, in its own order; a :class:`nsa.train.data.source.TokenSource`.

    Windows are taken in ascending order: a window before the latest one is gone. When the data set ends it begins anew. Reading
    and tokenising happen in a process of their own, one batch ahead.

    Args:
        origin: what to read.
        tokenizer: with a separator.
        validation_fraction: documents whose hash falls below it are left out.
        time_limit_s: see :class:`nsa.train.data.stream.DocumentReader`.
    """

    def __init__(self, origin: Origin, tokenizer: Tokenizer, validation_fraction: float, time_limit_s: float) -> None:
        self.separator_id = tokenizer.separator_id
        self.token_bytes = tokenizer.token_bytes
        self._origin, self._time_limit_s = origin, time_limit_s
        self._tokenise = Tokenise(tokenizer, validation_fraction, sides=("train",))
        self._chunks: deque[_Chunk] = deque()
        self._batches: Generator[tuple[int, Batch[TokenBatch]], None, None] | None = None
        self.seek(0, BEGINNING)

    def num_windows(self, seq_len: int) -> int:
        """See :class:`nsa.train.data.source.TokenSource`: more than anybody can take."""
        check(seq_len > 0, "StreamSource.num_windows", "seq_len", "be positive", seq_len)
        return ENDLESS

    def window(self, seq_len: int, index: int) -> NDArray[np.int64]:
        """See :class:`nsa.train.data.source.TokenSource`, but in ascending order only."""
        start, stop = index * seq_len, (index + 1) * seq_len + 1
        first = self._chunks[0].first if self._chunks else self._next
        check(
            start >= first,
            "StreamSource.window",
            "index",
            f"be at least {-(-first // seq_len)}, windows do not come back",
            index,
        )
        self._read_to(stop)
        while self._chunks[0].end <= start:
            self._chunks.popleft()
        parts = [chunk.tokens[max(start - chunk.first, 0) : max(stop - chunk.first, 0)] for chunk in self._chunks]
        return np.concatenate(parts).astype(np.int64)

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_] | None:
        """See :class:`nsa.train.data.source.TokenSource`: every target counts."""
        return None

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """See :class:`nsa.train.data.source.TokenSource`: not known."""
        return None

    def place(self, token: int) -> dict[str, int]:
        """Where reading begins for a token to come next: ``epoch``, ``file``, ``row``, and ``token`` in that row.

        Args:
            token: its number in the stream, not before the latest window.
        """
        self._read_to(token + 1)
        return next(chunk for chunk in self._chunks if token < chunk.end).place(token)

    def seek(self, token: int, place: dict[str, int]) -> None:
        """Let token number ``token`` be the one at ``place``, as :meth:`place` gave it, and go on from there."""
        self.close()
        self._next = token - place["token"]
        self._chunks.clear()
        self._batches = self._read(place["epoch"], Place(place["file"], place["row"]))

    def close(self) -> None:
        """End the reading process; the next window starts another one."""
        if self._batches is not None:
            self._batches.close()

    def _read_to(self, stop: int) -> None:
        assert self._batches is not None, "nothing to read from"
        while self._next < stop:
            epoch, batch = next(self._batches)
            chunk = _Chunk(self._next, epoch, batch)
            self._next = chunk.end
            if len(chunk.tokens):
                self._chunks.append(chunk)

    def _read(self, epoch: int, start: Place) -> Generator[tuple[int, Batch[TokenBatch]], None, None]:
        """Batches with their epoch, for ever."""
        while True:
            num_tokens = 0
            with DocumentReader(self._origin, self._tokenise, start=start, time_limit_s=self._time_limit_s) as reader:
                for batch in reader:
                    num_tokens += len(batch.payload.tokens["train"])
                    yield epoch, batch
            if num_tokens == 0 and start == Place():
                fail("StreamSource", "data.path", "hold training text", f"none in {self._origin.source}")
            epoch, start = epoch + 1, Place()


class StreamSampler(Sampler):
    """Windows of a stream one after another, and where in the data set the next one begins.

    The state is five integers: the number of windows drawn, how often the data set has ended, file and row of the document in
    which the next window begins, and how many of its tokens the windows before have used. Setting it moves nothing: the stream
    is sought when windows are drawn.

    Args:
        source: the stream.
        seq_len: tokens of a window.
    """

    def __init__(self, source: StreamSource, seq_len: int) -> None:
        super().__init__(ENDLESS, seed=0)
        self._source, self._seq_len = source, seq_len
        self._place: dict[str, int] | None = BEGINNING  # of the window at ``position``; None: the source knows it

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
        place = self._source.place(self.position * self._seq_len) if self._place is None else self._place
        return {"position": self.position, **place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.position = state["position"]
        self._place = {name: state[name] for name in BEGINNING}


@dataclass(frozen=True)
class HeldOut:
    """The first held-out documents of a stream.

    Attributes:
        found: the data set.
        tokens: of these documents, each ended by the separator.
        num_documents: how many they are.
        num_bytes: their text.
    """

    found: Found
    tokens: NDArray[Any]
    num_documents: int
    num_bytes: int


def read_held_out(
    origin: Origin, tokenizer: Tokenizer, validation_fraction: float, time_limit_s: float, num_tokens: int
) -> HeldOut:
    """Read a data set from its beginning until its held-out documents have so many tokens, or it ends."""
    tokenise = Tokenise(tokenizer, validation_fraction, sides=("validation",))
    parts: list[NDArray[Any]] = []
    have = num_documents = num_bytes = 0
    with DocumentReader(origin, tokenise, time_limit_s=time_limit_s) as reader:
        for batch in reader:
            ends = have + np.cumsum(batch.payload.lengths)
            kept = batch.payload.head(int(np.searchsorted(ends, num_tokens)) + 1)
            parts.append(kept.tokens["validation"])
            num_documents += int(kept.held_out.sum())
            num_bytes += int(kept.num_bytes.sum())
            have += len(parts[-1])
            if have >= num_tokens:
                break
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=token_dtype(tokenizer.vocab_size))
    return HeldOut(reader.found, tokens, num_documents, num_bytes)
