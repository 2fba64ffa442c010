"""Planned beside measured memory: a few steps of the trainer on the GPU of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nsa.bench.clock import release_memory
from nsa.bench.table import align
from nsa.bench.train_run import measure_steps
from nsa.errors import check
from nsa.plan.memory import step_memory
from nsa.train.config import TrainConfig
from nsa.train.telemetry.throughput import MIB
from nsa.train.watch.out_of_memory import check_run_fits

WITHIN = 0.10
WARMUP, STEPS = 3, 4


@dataclass(frozen=True)
class Comparison:
    """One configuration.

    Attributes:
        name: of it.
        planned_mib: most memory in tensors, as planned.
        measured_mib: the same as PyTorch's allocator counted it.
        reserved_mib: what the allocator held.
    """

    name: str
    planned_mib: float
    measured_mib: float
    reserved_mib: float

    @property
    def off(self) -> float:
        """How far the plan is above what was measured, as a share of that."""
        return self.planned_mib / self.measured_mib - 1

    @property
    def passed(self) -> bool:
        """Whether the plan is near enough."""
        return abs(self.off) <= WITHIN


def compare(name: str, config: TrainConfig, device: torch.device) -> Comparison:
    """Plan and measure one configuration.

    Raises:
        ValueError: there is no GPU to measure on.
    """
    check(device.type == "cuda", "nsa plan", "--measure", "be given on a machine with a CUDA GPU", device.type)
    check_run_fits("nsa plan --measure", config, device)
    planned = step_memory(config).peak / MIB
    config = replace(
        config,
        steps=max(config.steps, WARMUP + STEPS + 2),
        eval_windows=0,
        sample_tokens=0,
        checkpoint_every=0,
        log_every=STEPS,
    )
    release_memory(device)
    found, trainer = measure_steps(config, device, WARMUP, STEPS)
    del trainer
    release_memory(device)
    assert found.peak_mib is not None
    assert found.reserved_mib is not None
    return Comparison(name, planned, found.peak_mib, found.reserved_mib)


def comparison_lines(found: Sequence[Comparison]) -> list[str]:
    """A table of all configurations."""
    lines = [("configuration", "planned MiB", "measured MiB", "off", "reserved MiB", "")]
    lines += [
        (
            one.name, f"{one.planned_mib:,.0f}", f"{one.measured_mib:,.0f}", f"{one.off:+.1%}", f"{one.reserved_mib:,.0f}",
            "pass" if one.passed else f"FAIL (within {WITHIN:.0%})",
        )
        for one in found
    ]  # fmt: skip
    return align(lines)
