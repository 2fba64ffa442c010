"""Synthetic tasks whose best possible loss is known, to check a model and a trainer with; never taken unless asked for by name.

Every window is made from (seed, side, task, number) alone, so any of them is reached at once, and training and validation draw
from different random streams. All tasks use the 256 byte values; only the targets with a known answer count.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from nsa.errors import check
from nsa.train.data.source import check_window

TASKS = ("uniform", "copy", "induction", "needle")
TRAIN_WINDOWS = 1 << 20
VALIDATION_WINDOWS = 1 << 12
_SIDES = ("train", "validation")
_MARKER = 0
_VALUE_LEN = 8
_MAX_KEYS = 64
_SHORTEST = {"uniform": 1, "copy": 2, "induction": 7, "needle": 2 * (1 + _VALUE_LEN) - 1}


class SyntheticSource:
    """Windows of a synthetic task; a :class:`nsa.train.data.source.TokenSource`.

    A window has ``L = seq_len + 1`` tokens. The tasks:

    * ``uniform``: independent uniform bytes; every target counts. Nothing can be predicted: 8 bits per byte exactly.
    * ``copy``: h = (L - 1) // 2 random bytes from 1 to 255, the marker 0, the same h bytes again, which count (for even L one
      more marker, which does not).
    * ``induction``: pairs (key, value). Each window draws min(64, pairs // 4) keys from 0..127 and a value from 128..255 for
      each, and then pairs uniformly among these. The value after a key that the window has shown before counts.
    * ``needle``: random bytes from 1 to 255; at a uniformly random place the marker 0 and 8 bytes; at the end the marker again
      and the same 8 bytes, which count.

    Attributes:
        task: name of the task.
        separator_id: None: windows hold no documents.
        token_bytes: 1 for each id.

    Args:
        task: see above.
        side: ``train`` or ``validation``.
        seed: of all windows.
        vocab_size: of the model that trains on them; ids from 256 on do not occur.
    """

    def __init__(self, task: str, side: str, seed: int, vocab_size: int = 256) -> None:
        check(task in TASKS, "SyntheticSource", "task", f"be one of {', '.join(TASKS)}", task)
        check(side in _SIDES, "SyntheticSource", "side", f"be one of {', '.join(_SIDES)}", side)
        check(seed >= 0, "SyntheticSource", "seed", "be at least 0", seed)
        self.task = task
        self.separator_id: int | None = None
        self.token_bytes: NDArray[np.int64] = np.ones(vocab_size, dtype=np.int64)
        self._num_windows = TRAIN_WINDOWS if side == "train" else VALIDATION_WINDOWS
        self._key = (seed, _SIDES.index(side), TASKS.index(task))

    @property
    def ideal_loss(self) -> float:
        """Least expected loss of a counted target, nats."""
        return math.log(256) if self.task == "uniform" else 0.0

    @property
    def ideal_bits_per_byte(self) -> float:
        """The same in bits; a target is one byte."""
        return self.ideal_loss / math.log(2)

    def num_windows(self, seq_len: int) -> int:
        """See :class:`nsa.train.data.source.TokenSource`: 2**20 for training, 2**12 for validation."""
        shortest = _SHORTEST[self.task]
        check(seq_len >= shortest, "SyntheticSource", "seq_len", f"be at least {shortest} for {self.task}", seq_len)
        return self._num_windows

    def window(self, seq_len: int, index: int) -> NDArray[np.int64]:
        """See :class:`nsa.train.data.source.TokenSource`."""
        return self._make(seq_len, index)[0]

    def target_mask(self, seq_len: int, index: int) -> NDArray[np.bool_] | None:
        """See :class:`nsa.train.data.source.TokenSource`."""
        return self._make(seq_len, index)[1][1:]

    def most_sequences(self, seq_len: int, num_windows: int) -> int | None:
        """See :class:`nsa.train.data.source.TokenSource`: windows hold no documents."""
        return num_windows

    def _make(self, seq_len: int, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        check_window(self, seq_len, index)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._key, index))))
        make = {"uniform": _uniform, "copy": _copy, "induction": _induction, "needle": _needle}[self.task]
        return make(rng, seq_len + 1)


def _uniform(rng: np.random.Generator, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    return rng.integers(256, size=length), np.ones(length, dtype=bool)


def _copy(rng: np.random.Generator, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    half = (length - 1) // 2
    tokens = np.full(length, _MARKER, dtype=np.int64)
    tokens[:half] = rng.integers(1, 256, size=half)
    tokens[half + 1 : 2 * half + 1] = tokens[:half]
    known = np.zeros(length, dtype=bool)
    known[half + 1 : 2 * half + 1] = True
    return tokens, known


def _induction(rng: np.random.Generator, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    num_pairs = (length + 1) // 2
    num_keys = max(1, min(_MAX_KEYS, num_pairs // 4))
    keys = rng.permutation(128)[:num_keys]
    values = rng.integers(128, 256, size=num_keys)
    drawn = rng.integers(num_keys, size=num_pairs)
    first = np.zeros(num_pairs, dtype=bool)
    first[np.unique(drawn, return_index=True)[1]] = True
    tokens = np.stack((keys[drawn], values[drawn]), axis=1).reshape(-1)
    known = np.stack((np.zeros(num_pairs, dtype=bool), ~first), axis=1).reshape(-1)
    return tokens[:length], known[:length]


def _needle(rng: np.random.Generator, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    tokens = rng.integers(1, 256, size=length)
    size = 1 + _VALUE_LEN
    place = int(rng.integers(length - 2 * size + 1))
    tokens[place] = _MARKER
    tokens[length - size] = _MARKER
    tokens[length - _VALUE_LEN :] = tokens[place + 1 : place + size]
    known = np.zeros(length, dtype=bool)
    known[length - _VALUE_LEN :] = True
    return tokens, known
