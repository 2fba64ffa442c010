"""Which window comes when: a pure function of three integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nsa.errors import check, fail


class Sampler:
    """Goes through all windows in a new random order each epoch.

    The order is a function of (seed, epoch). The place in it is ``position``: the number of windows drawn since training began,
    by all processes together. Epoch e covers the positions ``e * num_windows`` to ``(e + 1) * num_windows - 1``.

    With ``world_size`` processes, rank r takes the ``micro_batch`` positions from ``position + r * micro_batch`` on, and every
    rank then advances ``position`` by ``micro_batch * world_size``. So an optimizer step of G = micro_batch * accumulation *
    world_size windows draws those at ``position .. position + G - 1``, whatever the number of processes: a run continued on
    another number of GPUs with the same global batch sees the same batches.

    The permutation sorts raw Philox output, which NumPy guarantees not to change between versions; its ``permutation`` carries
    no such promise.

    Args:
        num_windows: windows of the source at the length in use.
        seed: of the order.
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        check(num_windows > 0, "Sampler", "num_windows", "be positive", num_windows)
        check(seed >= 0, "Sampler", "seed", "be at least 0", seed)
        self.num_windows = num_windows
        self.seed = seed
        self.position = 0
        self._cached_epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Epoch of the next window."""
        return self.position // self.num_windows

    def window_at(self, position: int) -> int:
        """Window drawn at a position; any position, in any order of calls."""
        check(position >= 0, "Sampler.window_at", "position", "be at least 0", position)
        epoch, place = divmod(position, self.num_windows)
        if epoch != self._cached_epoch:
            random = np.random.Philox(np.random.SeedSequence((self.seed, epoch))).random_raw(self.num_windows)
            self._order = np.argsort(random, kind="stable")
            self._cached_epoch = epoch
        return int(self._order[place])

    def next_windows(self, micro_batch: int, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """Windows of this rank's next micro-batch; advances ``position`` for all ranks.

        Args:
            micro_batch: windows for each rank.
            rank: of this process.
            world_size: number of processes.

        Returns:
            ``micro_batch`` window numbers.
        """
        check(micro_batch > 0, "Sampler.next_windows", "micro_batch", "be positive", micro_batch)
        check(
            0 <= rank < world_size, "Sampler.next_windows", "rank", f"lie between 0 and world_size - 1 ({world_size - 1})", rank
        )
        start = self.position + rank * micro_batch
        windows = [self.window_at(position) for position in range(start, start + micro_batch)]
        self.position += micro_batch * world_size
        return windows

    def state_dict(self) -> dict[str, int]:
        """Three integers: ``seed``, ``num_windows``, ``position``."""
        return {"seed": self.seed, "num_windows": self.num_windows, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: the state belongs to another seed or another number of windows, so that the order would not continue.
        """
        for name in ("seed", "num_windows"):
            if state[name] != getattr(self, name):
                fail(
                    "Sampler.load_state_dict", name, f"equal this run's ({getattr(self, name)})", state[name],
                    "The data, seq_len or seed changed since the checkpoint.",
                )  # fmt: skip
        check(state["position"] >= 0, "Sampler.load_state_dict", "position", "be at least 0", state["position"])
        self.position = state["position"]
