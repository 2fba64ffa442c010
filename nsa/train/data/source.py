"""Token sources, whose training sequences are indexed by number, and the order of sequences."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nsa.errors import UserError, check
from nsa.train.data.tokenizer import Ids, Tokens, token_dtype


class DataUnavailableError(UserError):
    """The data do not exist, cannot be reached, or have stopped coming."""


class TokenSource:
    """Training sequences of ``seq_len + 1`` tokens: inputs, and the targets one token later.

    Attributes:
        separator_id: id that ends a document; None if there are no documents.
        token_bytes: int64 ``[vocab_size]``, bytes of text that each id spells.
    """

    separator_id: int | None
    token_bytes: Ids

    def num_windows(self, seq_len: int) -> int:
        """Number of sequences of this length."""
        raise NotImplementedError

    def window(self, seq_len: int, index: int) -> Ids:
        """Sequence ``index``: int64 ``[seq_len + 1]``; the same arguments give the same tokens."""
        raise NotImplementedError

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_] | None:
        """Mask of the targets that count: bool ``[seq_len]``, or None if all targets count."""
        return None

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """Upper bound of the documents, whole or cut, in ``num_windows`` different sequences.

        None if that is not known before the text is read.
        """
        return None


class TextSource(TokenSource):
    """Documents one after another, cut into sequences.

    Sequence i begins at token ``i * seq_len`` and overlaps the next by the one token that is only a
    target, so each token but the first is a target of exactly one sequence. Tokens at the end that
    do not fill a sequence are left out.

    Attributes:
        tokens: ``[num_tokens]``, in the smallest unsigned type for the vocabulary.

    Args:
        documents: tokens of each document, ended by the separator.
        separator_id: see :class:`TokenSource`.
        token_bytes: int64 ``[vocab_size]``.
    """

    def __init__(
        self, documents: Iterable[Tokens], separator_id: int | None, token_bytes: Ids
    ) -> None:
        empty = np.empty(0, token_dtype(len(token_bytes)))
        self.tokens = np.concatenate([empty, *documents], dtype=empty.dtype, casting="unsafe")
        self.separator_id = separator_id
        self.token_bytes = token_bytes

    @property
    def num_tokens(self) -> int:
        """Number of tokens, separators included."""
        return len(self.tokens)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens ``start`` to ``stop - 1``, or to the last one."""
        return self.tokens[start:stop]

    def num_windows(self, seq_len: int) -> int:
        """See :class:`TokenSource`; 0 if there are fewer than ``seq_len + 1`` tokens."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def window(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`."""
        assert 0 <= index < self.num_windows(seq_len), index
        return self.read(index * seq_len, (index + 1) * seq_len + 1).astype(np.int64)

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """See :class:`TokenSource`."""
        starts = self.document_starts()
        end = self.num_windows(seq_len) * seq_len
        counts = np.bincount(starts[(starts % seq_len != 0) & (starts < end)] // seq_len)
        return num_windows + int(np.sort(counts)[::-1][:num_windows].sum())

    def document_starts(self) -> Ids:
        """Position of the first token of each document: int64 ``[num_documents]``, ascending."""
        return np.append(0, np.flatnonzero(self.tokens == self.separator_id) + 1)[:-1]


class Sampler:
    """All sequences in another random order each epoch.

    The order is a function of (seed, epoch). The place in it is ``position``: the number of
    sequences drawn since training began, by all processes together. Epoch e covers the positions
    ``e * num_windows`` to ``(e + 1) * num_windows - 1``.

    With ``world_size`` processes, rank r takes the ``micro_batch`` positions from
    ``position + r * micro_batch`` on, and every rank then advances ``position`` by
    ``micro_batch * world_size``. So an optimizer step of G = micro_batch * accumulation *
    world_size sequences draws those at ``position .. position + G - 1``, whatever the number of
    processes: a run continued on another number of GPUs with the same global batch sees the same
    batches.

    The permutation sorts raw Philox output, which NumPy guarantees not to change between versions;
    its ``permutation`` carries no such promise.

    Args:
        num_windows: sequences of the source at the length in use.
        seed: seed of the order.
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        check(num_windows > 0, "Sampler", "num_windows", "be positive", num_windows)
        self.num_windows = num_windows
        self.seed = seed
        self.position = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next sequence."""
        return self.position // self.num_windows

    def window_at(self, position: int) -> int:
        """Sequence drawn at a position; any position, in any order of calls."""
        epoch, place = divmod(position, self.num_windows)
        return int(_order(self.num_windows, self.seed, epoch)[place])

    def next_windows(self, micro_batch: int, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """Draw this rank's next micro-batch; advances ``position`` for all ranks.

        Args:
            micro_batch: sequences for each rank.
            rank: rank of this process.
            world_size: number of processes.

        Returns:
            ``micro_batch`` indices of sequences.
        """
        start = self.position + rank * micro_batch
        self.position += micro_batch * world_size
        return [self.window_at(position) for position in range(start, start + micro_batch)]

    def state_dict(self) -> dict[str, int]:
        """Three integers: ``seed``, ``num_windows``, ``position``."""
        return {"seed": self.seed, "num_windows": self.num_windows, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the place of a :meth:`state_dict`.

        Raises:
            ValueError: the state belongs to another seed or another number of sequences, so that
                the order would not continue.
        """
        hint = "The data, seq_len or seed changed since the checkpoint."
        for name in ("seed", "num_windows"):
            ours, given = getattr(self, name), state[name]
            rule = f"equal this run's ({ours})"
            check(given == ours, "Sampler.load_state_dict", name, rule, given, hint)
        self.position = state["position"]


@lru_cache(maxsize=2)  # an epoch, and the next one while batches are made ahead
def _order(num_windows: int, seed: int, epoch: int) -> Ids:
    philox = np.random.Philox(np.random.SeedSequence((seed, epoch)))
    return np.argsort(philox.random_raw(num_windows), kind="stable")
