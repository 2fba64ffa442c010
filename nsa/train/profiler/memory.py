"""Memory of a training step by module: what each keeps for the backward pass, and how high memory stands while it runs."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

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
        forward_peak: most memory allocated while its forward ran, that of everything else included.
        backward_peak: the same of its backward.
        kept: what its forward left allocated.
    """

    name: str
    forward_peak: int = 0
    backward_peak: int = 0
    kept: int = 0


@contextmanager
def modules_marked(model: nn.Module) -> Iterator[None]:
    """Within, the forward of every module of the model is a range of the trace."""
    open_ranges: list[record_function] = []
    hooks = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            open_ranges.append(record_function(MODULE + name))
            open_ranges[-1].__enter__()

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(enter(name or "model")),
            module.register_forward_hook(leave),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def module_memory(trace: Trace, device: str, allocated: int) -> list[ModuleMemory]:
    """Memory by module, in the order of their forwards.

    Args:
        trace: of a step whose modules were marked, with allocations.
        device: ``cpu`` or ``cuda``.
        allocated: bytes allocated when the trace began.
    """
    of_device = [
        instant for instant in trace.instants
        if instant[2] == "[memory]" and int(instant[3]["Device Type"]) == _DEVICE_TYPES[device]
    ]  # fmt: skip
    times, levels = [float("-inf")], [allocated]
    found: dict[str, ModuleMemory] = {}
    marks = sorted(
        (e for events in trace.host.values() for e in events if e.name.startswith(MODULE)),
        key=lambda e: e.begin,
    )
    for mark in marks:
        name = mark.name.removeprefix(MODULE)
        found.setdefault(name, ModuleMemory(name))
    for time, thread, _, args in of_device:
        times.append(time)
        levels.append(levels[-1] + int(args["Bytes"]))
        event = trace.innermost(thread, time)
        for name, is_backward in _modules(event):
            memory = found[name]
            if is_backward:
                memory.backward_peak = max(memory.backward_peak, levels[-1])
            else:
                memory.forward_peak = max(memory.forward_peak, levels[-1])
    for mark in marks:
        before, after = (
            levels[bisect.bisect_right(times, time) - 1] for time in (mark.begin, mark.end)
        )
        found[mark.name.removeprefix(MODULE)].kept += after - before
    return list(found.values())


def _modules(event: Event | None) -> Iterator[tuple[str, bool]]:
    """Modules that were running, and whether it was their backward pass."""
    chain = [] if event is None else list(event.around())
    for around in chain:
        if around.name.startswith(MODULE):
            yield (
                around.name.removeprefix(MODULE),
                any(e.name == PREFIX + stages.BACKWARD for e in chain),
            )
    linked = next((around.forward for around in chain if around.forward is not None), None)
    for around in [] if linked is None else linked.around():
        if around.name.startswith(MODULE):
            yield around.name.removeprefix(MODULE), True


def memory_text(modules: list[ModuleMemory], tokens: int) -> str:
    """The modules as text."""
    lines = [
        f"one micro-batch of {tokens:,} tokens, launched without torch.compile and CUDA graphs; MiB",
        f"{'module':<44}{'peak forward':>14}{'peak backward':>15}{'kept':>11}",
    ]
    for memory in modules:
        peaks = f"{memory.forward_peak / MIB:>14.1f}{memory.backward_peak / MIB:>15.1f}"
        lines.append(f"{memory.name:<44}{peaks}{memory.kept / MIB:>11.1f}")
    return "\n".join(lines) + "\n"
