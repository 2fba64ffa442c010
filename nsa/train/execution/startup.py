"""The start of a run, until its first optimizer step is done: logged while it happens."""

from __future__ import annotations

import logging
import time

import torch

from nsa.train.execution.compilation import Compiled, compilations

logger = logging.getLogger(__name__)

_STEP = "first step"
_WORTH_A_LINE_S = 1.0


class Startup:
    """Times a start, from the construction of a trainer to the end of this process's first step.

    The phases follow one another: each ends where the next one begins. Of the last one, the step
    itself, :data:`nsa.train.execution.compilation.compilations` knows what was compiled and
    captured in it.

    Attributes:
        first_step_s: the whole start, seconds; None before the end of the first step.
    """

    def __init__(self) -> None:
        self.first_step_s: float | None = None
        self._begin = self._phase_begin = time.perf_counter()
        self._phase = ""
        self._parts: dict[str, float] = {}
        self._before = Compiled()

    def begin(self, phase: str) -> None:
        """The phase before ends here and this one begins.

        Args:
            phase: what is made ready, a noun: ``data``, ``model``.
        """
        self._end_phase()
        self._phase = phase
        logger.info("start: %s", phase)

    def begin_step(self) -> None:
        """The first step begins; its batch is there."""
        self._before = compilations.now
        self.begin(_STEP)

    def end_step(self, device: torch.device) -> None:
        """The first step was issued: wait until the device has done it, and log the whole start.

        Args:
            device: where the run computes.
        """
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._end_phase()
        self.first_step_s = time.perf_counter() - self._begin
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._all_parts().items())
        logger.info("first step after %.1f s: %s", self.first_step_s, parts)

    def _end_phase(self) -> None:
        now = time.perf_counter()
        if self._phase:
            seconds = self._parts[self._phase] = now - self._phase_begin
            if self._phase != _STEP and seconds >= _WORTH_A_LINE_S:
                logger.info("start: %s took %.1f s", self._phase, seconds)
        self._phase_begin = now

    def _all_parts(self) -> dict[str, float]:
        """Seconds of each phase, those of the step divided into what was compiled and the rest."""
        done = compilations.now - self._before
        inside = {
            "torch.compile": done.graphs_s,
            "Triton kernels": done.kernels_s,
            "CUDA graphs": done.captures_s,
        }
        inside = {name: seconds for name, seconds in inside.items() if seconds > 0}
        parts = dict(self._parts)
        rest = parts.pop(_STEP) - sum(inside.values())
        name = "the rest of the step" if inside else "the step"
        return {**parts, **inside, name: max(rest, 0.0)}
