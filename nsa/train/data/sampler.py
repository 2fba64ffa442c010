"""The order of the windows: a pure function of three integers."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from nsa.errors import check
from nsa.train.data.tokenizer import Ids


class Sampler:
    """Goes through all windows in a new random order each epoch.

    The order is a function of (seed, epoch). The place in it is ``position``: the number of windows
    drawn since training began, by all processes together. Epoch e covers the positions
    ``e * num_windows`` to ``(e + 1) * num_windows - 1``.

    With ``world_size`` processes, rank r takes the ``micro_batch`` positions from
    ``position + r * micro_batch`` on, and every rank then advances ``position`` by
    ``micro_batch * world_size``. So an optimizer step of G = micro_batch * accumulation *
    world_size windows draws those at ``position .. position + G - 1``, whatever the number of
    processes: a run continued on another number of GPUs with the same global batch sees the same
    batches.

    The permutation sorts raw Philox output, which NumPy guarantees not to change between versions;
    its ``permutation`` carries no such promise.

    Args:
        num_windows: windows of the source at the length in use.
        seed: of the order.
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        check(num_windows > 0, "Sampler", "num_windows", "be positive", num_windows)
        self.num_windows = num_windows
        self.seed = seed
        self.position = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next window."""
        return self.position // self.num_windows

    def window_at(self, position: int) -> int:
        """Window drawn at a position; any position, in any order of calls."""
        epoch, place = divmod(position, self.num_windows)
        return int(_order(self.num_windows, self.seed, epoch)[place])

    def next_windows(self, micro_batch: int, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """Windows of this rank's next micro-batch; advances ``position`` for all ranks.

        Args:
            micro_batch: windows for each rank.
            rank: of this process.
            world_size: number of processes.

        Returns:
            ``micro_batch`` window numbers.
        """
        start = self.position + rank * micro_batch
        self.position += micro_batch * world_size
        return [self.window_at(position) for position in range(start, start + micro_batch)]

    def state_dict(self) -> dict[str, int]:
        """Three integers: ``seed``, ``num_windows``, ``position``."""
        return {"seed": self.seed, "num_windows": self.num_windows, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: the state belongs to another seed or another number of windows, so that the
                order would not continue.
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
