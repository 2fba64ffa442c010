"""A plan as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nsa.plan.gpus import GIB
from nsa.plan.plan import RunPlan
from nsa.plan.timeline import GRADIENTS, OPTIMIZER, SAVED, WEIGHTS

# Parts below this share of the whole are not shown one by one.
SMALLEST = 0.001
# In this order, whatever else there is at the end.
_ORDER = (WEIGHTS, OPTIMIZER, GRADIENTS, SAVED)


def plan_lines(name: str, plan: RunPlan, price_per_gpu_hour: float | None) -> Iterator[str]:
    """The plan for a reader.

    Args:
        name: of the configuration.
        plan: what was found.
        price_per_gpu_hour: in any currency; None leaves the cost out.
    """
    config, gpu = plan.config, plan.gpu
    where = "" if gpu is None else f", on {config.world_size} x {gpu.name} of {gpu.memory_gib:.1f} GiB"
    yield f"{name}{where}"
    parts = ", ".join(f"{part} {count:,}" for part, count in plan.parameters.items() if part != "total" and count)
    yield _line("parameters", f"{plan.parameters['total']:,}: {parts}")
    windows = f"{config.steps:,} steps x {config.global_batch} windows x {config.seq_len:,}"
    yield _line("tokens", f"{plan.tokens:,} = {windows}")
    total = plan.flops_per_token * plan.tokens
    yield _line("operations", f"{plan.flops_per_token / 1e9:.4g} GFLOP a training token, {total / 1e18:.4g} EFLOP in all")
    least = "" if plan.footprint.is_all else "at least "
    sizes = f"{plan.needed_bytes / GIB:.2f} GiB for each process, {plan.footprint.peak / GIB:.2f} in tensors"
    yield _line("memory", f"{least}{sizes}")
    for part, size in shown_parts(plan.footprint.parts).items():
        yield f"  {part:44}{size / GIB:9.3f} GiB"
    if plan.speed is None or plan.seconds is None:
        yield _line(
            "time", f"not known: no peak of {gpu.name} in {config.compute_dtype}, no measured step" if gpu else "give --gpu"
        )
        return
    yield _line("speed", f"{plan.speed.tokens_per_s:,.0f} tokens/s ({plan.speed.why})")
    yield _line("time", duration(plan.seconds))
    if price_per_gpu_hour is not None:
        hours = plan.seconds / 3600 * config.world_size
        yield _line("cost", f"{plan.cost(price_per_gpu_hour):,.2f} = {hours:.2f} GPU hours x {price_per_gpu_hour:g}")


def plan_json(name: str, plan: RunPlan, price_per_gpu_hour: float | None) -> dict[str, Any]:
    """The plan for a program; sizes in bytes, times in seconds."""
    gpu = plan.gpu
    return {
        "config": name, "gpu": None if gpu is None else gpu.name, "gpus": plan.config.world_size,
        "gpu_memory_bytes": None if gpu is None else round(gpu.memory_gib * GIB),
        "parameters": plan.parameters, "tokens": plan.tokens, "flops_per_token": plan.flops_per_token,
        "memory_bytes": {**plan.footprint.parts, "peak": plan.footprint.peak, "needed": plan.needed_bytes},
        "memory_is_all": plan.footprint.is_all,
        "tokens_per_s": None if plan.speed is None else plan.speed.tokens_per_s,
        "speed_from": None if plan.speed is None else plan.speed.why,
        "seconds": plan.seconds, "cost": None if price_per_gpu_hour is None else plan.cost(price_per_gpu_hour),
    }  # fmt: skip


def shown_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """In a reader's order, with those that do not count put together."""
    large = {part: size for part, size in parts.items() if size >= SMALLEST * sum(parts.values())}
    ordered = dict(sorted(large.items(), key=lambda item: (_place(item[0]), item[0])))
    return {**ordered, "other": sum(parts.values()) - sum(large.values())}


def _line(name: str, text: str) -> str:
    return f"  {name:12}{text}"


def _place(part: str) -> int:
    return next((place for place, name in enumerate(_ORDER) if part.startswith(name)), len(_ORDER))


def duration(seconds: float) -> str:
    """``2 d 3 h``, ``3 h 20 min``, ``12 min``, ``40 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
