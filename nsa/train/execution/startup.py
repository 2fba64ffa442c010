"""Log of the start of a run, up to the end of its first optimizer step."""

from __future__ import annotations

import itertools
import logging
import time

import torch

logger = logging.getLogger(__name__)


class Startup:
    """Times the phases of a start; each ends where the next one begins.

    Attributes:
        first_step_s: duration of the start, seconds; None before the end of the first step.
    """

    def __init__(self) -> None:
        self.first_step_s: float | None = None
        self._begins: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """End the phase before and begin this one.

        Args:
            phase: a noun: ``data``, ``model``.
        """
        self._begins[phase] = time.perf_counter()
        logger.info("start: %s", phase)

    def end_step(self, device: torch.device) -> None:
        """Wait until ``device`` has finished the first step, and log the duration of each phase."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks = [*self._begins.values(), time.perf_counter()]
        self.first_step_s = marks[-1] - marks[0]
        phases = zip(self._begins, itertools.pairwise(marks), strict=True)
        parts = ", ".join(f"{name} {end - begin:.1f} s" for name, (begin, end) in phases)
        logger.info("first step after %.1f s: %s", self.first_step_s, parts)
