"""Synthetic tasks whose lowest possible loss is known.

The tasks check a model and a trainer, and are used only if a configuration names them. A sequence
is a function of (seed, side, task, index), so sequences can be made in any order, and training and
validation draw from different random streams. All tasks use the 256 byte values; only the targets
with a known answer count.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nsa.errors import check
from nsa.train.data.batch import Mask, TokenSource
from nsa.train.data.documents import SIDES, Side
from nsa.train.data.tokenizer import Ids

NUM_SEQUENCES = {"train": 1 << 20, "validation": 1 << 12}
_MARKER = 0
_VALUE_LEN = 8
_MAX_KEYS = 64


class SyntheticSource(TokenSource):
    """Training sequences of a synthetic task.

    A sequence has ``L = seq_len + 1`` tokens. The tasks:

    * ``uniform``: independent uniform bytes; every target counts. Nothing can be predicted: 8 bits
      per byte exactly.
    * ``copy``: h = (L - 1) // 2 random bytes from 1 to 255, the marker 0, the same h bytes again,
      which count (for even L one more marker, which does not).
    * ``induction``: pairs (key, value). Each sequence draws min(64, pairs // 4) keys from 0..127
      and a value from 128..255 for each, and then pairs uniformly from them. The value after a key
      that the sequence has shown before counts.
    * ``needle``: random bytes from 1 to 255; at a uniformly random place the marker 0 and 8 bytes;
      at the end the marker again and the same 8 bytes, which count.

    Attributes:
        task: name of the task.
        ideal_loss: lowest expected loss of a counted target, nats; a target is one byte.

    Args:
        task: see above.
        side: ``train`` or ``validation``.
        seed: seed of all sequences.
        vocab_size: vocabulary of the model that trains on them; ids from 256 on do not occur.
    """

    def __init__(self, task: str, side: Side, seed: int, vocab_size: int = 256) -> None:
        self.task = task
        self.ideal_loss = math.log(256) if task == "uniform" else 0.0
        self.separator_id = None
        self.token_bytes = np.ones(vocab_size, dtype=np.int64)
        self._side = side
        self._key = (seed, SIDES.index(side), list(TASKS).index(task))

    def num_sequences(self, seq_len: int) -> int:
        """See :class:`TokenSource`: 2**20 for training, 2**12 for validation."""
        shortest, _ = TASKS[self.task]
        rule = f"be at least {shortest} for {self.task}"
        check(seq_len >= shortest, "seq_len", rule, seq_len)
        return NUM_SEQUENCES[self._side]

    def sequence(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`."""
        return self._make(seq_len, index)[0]

    def target_mask(self, seq_len: int, index: int) -> Mask:
        """See :class:`TokenSource`."""
        return self._make(seq_len, index)[1][1:]

    def _make(self, seq_len: int, index: int) -> tuple[Ids, Mask]:
        seed = np.random.SeedSequence((*self._key, index))
        rng = np.random.Generator(np.random.Philox(seed))
        tokens, known = TASKS[self.task][1](rng, seq_len + 1)
        mask = np.zeros(seq_len + 1, dtype=bool)
        mask[known] = True
        return tokens, mask


def _uniform(rng: np.random.Generator, length: int) -> tuple[Ids, slice]:
    return rng.integers(256, size=length), slice(None)


def _copy(rng: np.random.Generator, length: int) -> tuple[Ids, slice]:
    half = (length - 1) // 2
    tokens = np.full(length, _MARKER, dtype=np.int64)
    known = slice(half + 1, 2 * half + 1)
    tokens[:half] = tokens[known] = rng.integers(1, 256, size=half)
    return tokens, known


def _induction(rng: np.random.Generator, length: int) -> tuple[Ids, Ids]:
    num_pairs = (length + 1) // 2
    num_keys = max(1, min(_MAX_KEYS, num_pairs // 4))
    keys = rng.permutation(128)[:num_keys]
    values = rng.integers(128, 256, size=num_keys)
    drawn = rng.integers(num_keys, size=num_pairs)
    tokens = np.stack((keys[drawn], values[drawn]), axis=1).reshape(-1)[:length]
    first = np.unique(drawn, return_index=True)[1]
    known = 2 * np.delete(np.arange(num_pairs), first) + 1
    return tokens, known[known < length]


def _needle(rng: np.random.Generator, length: int) -> tuple[Ids, slice]:
    tokens = rng.integers(1, 256, size=length)
    size = 1 + _VALUE_LEN
    place = int(rng.integers(length - 2 * size + 1))
    tokens[place] = _MARKER
    tokens[length - size :] = tokens[place : place + size]
    return tokens, slice(length - _VALUE_LEN, None)


# By name: the shortest seq_len, and the function that makes tokens and marks those that count.
TASKS: dict[str, tuple[int, Any]] = {
    "uniform": (1, _uniform),
    "copy": (2, _copy),
    "induction": (7, _induction),
    "needle": (2 * (1 + _VALUE_LEN) - 1, _needle),
}
