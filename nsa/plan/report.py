"""A plan as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from nsa.plan.gpus import GIB
from nsa.plan.plan import RunPlan


def plan_lines(name: str, plan: RunPlan, price_per_gpu_hour: float | None) -> Iterator[str]:
    """The plan for a reader.

    Args:
        name: of the configuration.
        plan: what was found.
        price_per_gpu_hour: in any currency; None leaves the cost out.
    """
    config, gpu, footprint = plan.config, plan.gpu, plan.footprint
    where = f", on {config.world_size} x {gpu.name} of {gpu.memory_gib:.1f} GiB" if gpu else ""
    yield f"{name}{where}"
    counts = plan.parameters.items()
    parts = ", ".join(f"{part} {count:,}" for part, count in counts if part != "total" and count)
    yield _line("parameters", f"{plan.parameters['total']:,}: {parts}")
    windows = f"{config.steps:,} steps x {config.global_batch} windows x {config.seq_len:,}"
    yield _line("tokens", f"{plan.tokens:,} = {windows}")
    yield _line("operations", f"{plan.flops_per_token / 1e9:.4g} GFLOP a training token")
    least = "at least " * (not footprint.is_all)
    needed = f"{footprint.needed / GIB:.2f} GiB for each process"
    yield _line("memory", f"{least}{needed}, {footprint.peak / GIB:.2f} in tensors")
    for part, size in footprint.parts.items():
        yield f"  {part:48}{size / GIB:9.3f} GiB"
    if plan.speed is None or plan.seconds is None:
        unknown = f"no peak of {gpu.name} in {config.compute_dtype}" if gpu else "give --gpu"
        yield _line("time", f"not known: {unknown}")
        return
    yield _line("speed", f"{plan.speed.tokens_per_s:,.0f} tokens/s ({plan.speed.why})")
    yield _line("time", str(timedelta(seconds=round(plan.seconds))))
    if price_per_gpu_hour is not None and plan.gpu_hours is not None:
        cost = f"{plan.gpu_hours * price_per_gpu_hour:,.2f}"
        yield _line("cost", f"{cost} = {plan.gpu_hours:.2f} GPU hours x {price_per_gpu_hour:g}")


def plan_json(name: str, plan: RunPlan, price_per_gpu_hour: float | None) -> dict[str, Any]:
    """The plan for a program; sizes in bytes, times in seconds."""
    gpu, speed, footprint, hours = plan.gpu, plan.speed, plan.footprint, plan.gpu_hours
    sizes = {**footprint.parts, "peak": footprint.peak, "needed": footprint.needed}
    return {
        "config": name,
        "gpu": gpu and gpu.name,
        "gpus": plan.config.world_size,
        "gpu_memory_bytes": gpu and round(gpu.memory_gib * GIB),
        "parameters": plan.parameters,
        "tokens": plan.tokens,
        "flops_per_token": plan.flops_per_token,
        "memory_bytes": sizes,
        "memory_is_all": footprint.is_all,
        "tokens_per_s": speed and speed.tokens_per_s,
        "speed_from": speed and speed.why,
        "seconds": plan.seconds,
        "cost": hours * price_per_gpu_hour if hours and price_per_gpu_hour else None,
    }


def _line(name: str, text: str) -> str:
    return f"  {name:12}{text}"
