"""Memory of a training step by module: what each keeps for the backward pass, and its peaks."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules import module as hooks

from nsa import stages
from nsa.train.profiler.attribution import PREFIX
from nsa.train.profiler.trace import Event, Trace

MODULE = "module: "  # of the ranges that mark modules
MIB = 2**20
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as a trace numbers them


@dataclass
class ModuleMemory:
    """One module over a forward and a backward pass, in bytes.

    Attributes:
        name: of the module in the model.
        forward_peak: largest allocated memory while its forward pass ran, of the whole process.
        backward_peak: the same for its backward pass.
        kept: what its forward pass left allocated.
    """

    name: str
    forward_peak: int = 0
    backward_peak: int = 0
    kept: int = 0


@contextmanager
def modules_marked(model: nn.Module) -> Iterator[None]:
    """Within, the forward pass of every module of the model is a range of the trace."""
    names = {module: name or "model" for name, module in model.named_modules()}
    ranges: list[record_function] = []

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            ranges.append(record_function(MODULE + names[module]))
            ranges[-1].__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in names:
            ranges.pop().__exit__(None, None, None)

    with (
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave),
    ):
        yield


def module_memory(trace: Trace, device: str, allocated: int) -> list[ModuleMemory]:
    """Memory by module, in the order of their forward passes.

    Args:
        trace: of a step whose modules were marked, with allocations.
        device: ``cpu`` or ``cuda``.
        allocated: bytes allocated when the trace began.
    """
    found: dict[str, ModuleMemory] = {}
    marks = [e for events in trace.host.values() for e in events if e.name.startswith(MODULE)]
    marks.sort(key=lambda mark: mark.begin)
    for mark in marks:
        found.setdefault(mark.name, ModuleMemory(mark.name.removeprefix(MODULE)))
    times, levels = [float("-inf")], [allocated]
    for time, thread, args in trace.allocations:
        if int(args["Device Type"]) != _DEVICE_TYPES[device]:
            continue
        times.append(time)
        levels.append(levels[-1] + int(args["Bytes"]))
        for name, phase in _modules(trace.innermost(thread, time)):
            peak = f"{phase}_peak"
            setattr(found[name], peak, max(getattr(found[name], peak), levels[-1]))
    for mark in marks:
        before, after = (bisect.bisect_right(times, at) - 1 for at in (mark.begin, mark.end))
        found[mark.name].kept += levels[after] - levels[before]
    return list(found.values())


def _modules(event: Event | None) -> Iterator[tuple[str, str]]:
    """Ranges of the modules that were running, each with ``forward`` or ``backward``."""
    chain = [] if event is None else list(event.ancestors())
    is_backward = any(e.name == PREFIX + stages.BACKWARD for e in chain)
    phases = [(chain, stages.BACKWARD if is_backward else stages.FORWARD)]
    phases += [([*e.forward.ancestors()], stages.BACKWARD) for e in chain if e.forward][:1]
    for events, phase in phases:
        yield from ((e.name, phase) for e in events if e.name.startswith(MODULE))


def memory_text(modules: list[ModuleMemory], tokens: int) -> str:
    """The modules as text."""
    how = "launched without torch.compile and CUDA graphs"
    lines = [
        f"one micro-batch of {tokens:,} tokens, {how}; MiB",
        f"{'module':<44}{'peak forward':>14}{'peak backward':>15}{'kept':>11}",
    ]
    for memory in modules:
        peaks = f"{memory.forward_peak / MIB:>14.1f}{memory.backward_peak / MIB:>15.1f}"
        lines.append(f"{memory.name:<44}{peaks}{memory.kept / MIB:>11.1f}")
    return "\n".join(lines) + "\n"
