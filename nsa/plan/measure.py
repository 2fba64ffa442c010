"""Planned and measured memory: a few steps of the trainer on the GPU of this machine."""

from __future__ import annotations

import torch

from nsa.bench.clock import release_memory
from nsa.bench.train import as_measured
from nsa.bench.train_run import measure_steps
from nsa.errors import check
from nsa.plan.memory import step_memory
from nsa.train.config import TrainConfig
from nsa.train.telemetry.throughput import MIB
from nsa.train.watch.out_of_memory import check_run_fits

WITHIN = 0.15
WARMUP, STEPS = 3, 4


def compare(config: TrainConfig, device: torch.device) -> tuple[str, bool]:
    """Plan and measure a configuration: a line for the reader, and whether the plan is near enough.

    Raises:
        ValueError: there is no GPU to measure on.
    """
    rule = "be given on a machine with a CUDA GPU"
    check(device.type == "cuda", "nsa plan", "--measure", rule, device.type)
    check_run_fits("nsa plan --measure", config, device)
    release_memory(device)
    found, trainer = measure_steps(as_measured(config, WARMUP, STEPS), device, WARMUP, STEPS)
    del trainer
    release_memory(device)
    assert found.peak_mib is not None
    return judge(step_memory(config).peak / MIB, found.peak_mib)


def judge(planned_mib: float, measured_mib: float) -> tuple[str, bool]:
    """Most memory in tensors, as planned and as PyTorch's allocator counted it."""
    off = planned_mib / measured_mib - 1
    passed = abs(off) <= WITHIN
    verdict = "pass" if passed else f"FAIL (within {WITHIN:.0%})"
    sizes = f"planned {planned_mib:,.0f} MiB, measured {measured_mib:,.0f} MiB"
    return f"{sizes}, off by {off:+.1%}: {verdict}", passed
